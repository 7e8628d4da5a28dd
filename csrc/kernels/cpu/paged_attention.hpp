// Attention of a ragged batch over the paged KV cache, and the write into that cache.
//
// The cache of a layer, for blocks of `block_size` tokens; p is how many elements fit into 32 bits (float32 1, bfloat16
// 2, int8 4), so that the keys of a block stand side by side as the weights of a packed matrix do:
//   keys    [num_blocks][num_kv_heads][key_dim / p][block_size][p]
//   values  [num_blocks][num_kv_heads][block_size][value_dim]
// int8 has a float32 scale for each token and head: [num_blocks][num_kv_heads][block_size], of keys and of values.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa.hpp"

namespace deepinfer::cpu {

enum class DType : uint8_t { kFloat32, kBFloat16, kInt8 };

struct LayerCache {
  DType dtype;
  int64_t num_kv_heads;
  int64_t key_dim;  // a multiple of 4
  int64_t value_dim;
  int64_t block_size;
  void* keys;
  void* values;
  float* key_scales;  // null unless dtype is kInt8
  float* value_scales;
};

// One step's sequences. seq_lens: keys of each, this step's own included; query_start_loc: [num_seqs + 1]. key_ends: of
// each token, up to where in its sequence it sees keys, if that is behind itself; they never fall within a sequence.
// Null: no token sees beyond itself.
struct AttentionBatch {
  int64_t num_seqs;
  int64_t num_tokens;
  const int32_t* block_tables;  // [num_seqs, block_table_stride]
  int64_t block_table_stride;
  const int32_t* seq_lens;
  const int32_t* query_start_loc;
  const int64_t* slot_mapping;        // [num_tokens] block * block_size + offset, for `write`
  const int32_t* key_ends = nullptr;  // [num_tokens]
};

// Which part of a head is turned, and by what: cos, sin [num_tokens, rotary_dim / 2]. Halves are paired (GPT-NeoX's
// way): element i with i + rotary_dim / 2. rotary_dim 0: nothing is turned.
struct Rotary {
  int64_t rotary_dim;
  const float* cos;
  const float* sin;
};

// RMS norm of every head before it is turned (Qwen3), [key_dim] each; null: none.
struct HeadNorms {
  const float* query;
  const float* key;
  float eps;
};

struct PagedAttentionKernels {
  // query [num_tokens, num_heads, key_dim] is normalized and turned in place; key [num_tokens, num_kv_heads, key_dim]
  // goes into the cache normalized and turned, value [num_tokens, num_kv_heads, value_dim] as it is. Rows are
  // row_stride floats apart in all three, so that they may lie in one merged projection's output. query may be null.
  void (*write)(const LayerCache& cache, const AttentionBatch& batch, const Rotary& rotary, const HeadNorms& norms,
                int64_t num_heads, float* query, const float* key, const float* value, int64_t row_stride);
  // query as after `write` → out [num_tokens, num_heads, value_dim] float32, contiguous. window: keys that a query
  // sees, itself included; 0: all before it.
  void (*attend)(const LayerCache& cache, const AttentionBatch& batch, int64_t num_heads, const float* query,
                 int64_t query_row_stride, float scale, int64_t window, float* out);
};

DEEPINFER_KERNEL_TABLE(PagedAttentionKernels, paged_attention)

}  // namespace deepinfer::cpu
