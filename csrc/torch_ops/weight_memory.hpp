// Memory for packed weights, on large pages where the system has them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace deepinfer {

// A contiguous tensor [count] on the CPU, aligned to 64 bytes, contents undefined. Tensors made one after another lie one
// after another: a step streams all weights, and of pages of 4 KiB it would have to look up one for every few hundred
// nanoseconds of reading. What a tensor leaves of its page is the next one's. Any thread may call it.
[[nodiscard]] at::Tensor weight_memory(int64_t count, at::ScalarType dtype);

}  // namespace deepinfer
