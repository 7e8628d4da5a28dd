// A layer's KV cache as torch's tensors hold it → what the kernels take.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/cpu/paged_attention.hpp"

namespace deepinfer {

// keys [num_blocks, num_kv_heads, key_dim / p, block_size, p], values [num_blocks, num_kv_heads, block_size, value_dim],
// both float32, bfloat16 or int8 (p: 1, 2, 4); scales [num_blocks, num_kv_heads, block_size] float32, for int8 and only
// for it. The tensors must outlive the result. Raises ValueError.
[[nodiscard]] cpu::LayerCache layer_cache_of(const at::Tensor& keys, const at::Tensor& values,
                                             const std::optional<at::Tensor>& key_scales,
                                             const std::optional<at::Tensor>& value_scales);

}  // namespace deepinfer
