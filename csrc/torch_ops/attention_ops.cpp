// torch.ops.deepinfer.write_kv_cache / paged_attention.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "torch_ops/layer_cache.hpp"

namespace deepinfer {

namespace {

using at::Tensor;
using std::optional;

void check(const Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(),
                    " on ", tensor.device(), ": must be ", dtype, " on cpu");
  TORCH_CHECK_VALUE(tensor.sizes() == sizes, name, " has shape ", tensor.sizes(), ": must be ", sizes);
}

void check_contiguous(const Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  check(tensor, name, dtype, sizes);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " is not contiguous");
}

const float* scales_of(const optional<Tensor>& scales, const char* name, bool is_int8, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(scales.has_value() == is_int8, name,
                    is_int8 ? " is missing: an int8 cache needs it" : " is set: only an int8 cache has it");
  if (!is_int8) return nullptr;
  check_contiguous(*scales, name, at::kFloat, sizes);
  return scales->const_data_ptr<float>();
}

const float* floats_of(const optional<Tensor>& tensor, const char* name, at::IntArrayRef sizes) {
  if (!tensor.has_value()) return nullptr;
  check_contiguous(*tensor, name, at::kFloat, sizes);
  return tensor->const_data_ptr<float>();
}

// Normalizes and turns the queries of the merged projection's output, in place, and stores its keys and values.
void write_kv_cache(Tensor qkv, int64_t num_heads, const Tensor& keys, const Tensor& values,
                    const optional<Tensor>& key_scales, const optional<Tensor>& value_scales,
                    const Tensor& slot_mapping, const optional<Tensor>& cos, const optional<Tensor>& sin,
                    const optional<Tensor>& query_norm, const optional<Tensor>& key_norm, double eps) {
  const cpu::LayerCache cache = layer_cache_of(keys, values, key_scales, value_scales);
  TORCH_CHECK_VALUE(num_heads >= 0, "num_heads is ", num_heads, ": must be at least 0");
  const int64_t num_tokens = slot_mapping.numel();
  const int64_t query_size = num_heads * cache.key_dim, key_size = cache.num_kv_heads * cache.key_dim;
  check_contiguous(slot_mapping, "slot_mapping", at::kLong, {num_tokens});
  check_contiguous(qkv, "qkv", at::kFloat, {num_tokens, query_size + key_size + cache.num_kv_heads * cache.value_dim});
  const int64_t num_slots = keys.size(0) * cache.block_size;
  const int64_t* slots = slot_mapping.const_data_ptr<int64_t>();
  for (int64_t token = 0; token < num_tokens; ++token) {
    TORCH_CHECK_VALUE(slots[token] >= 0 && slots[token] < num_slots, "slot_mapping has ", slots[token],
                      ": must be 0 to ", num_slots - 1);
  }
  cpu::Rotary rotary = {0, nullptr, nullptr};
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), "cos and sin: must be both set or both left out");
  if (cos.has_value()) {
    const int64_t half = cos->size(-1);
    TORCH_CHECK_VALUE(2 * half <= cache.key_dim, "cos has ", half, " columns: must be at most ", cache.key_dim / 2);
    rotary = {2 * half, floats_of(cos, "cos", {num_tokens, half}), floats_of(sin, "sin", {num_tokens, half})};
  }
  const cpu::HeadNorms norms = {floats_of(query_norm, "query_norm", {cache.key_dim}),
                                floats_of(key_norm, "key_norm", {cache.key_dim}), static_cast<float>(eps)};
  const cpu::AttentionBatch batch = {0, num_tokens, nullptr, 0, nullptr, nullptr, slots};
  float* rows = qkv.data_ptr<float>();
  cpu::paged_attention().write(cache, batch, rotary, norms, num_heads, num_heads == 0 ? nullptr : rows,
                               rows + query_size, rows + query_size + key_size, qkv.size(1));
}

void check_key_ends(const cpu::AttentionBatch& batch, int64_t seq) {
  const int32_t* begin = batch.key_ends + batch.query_start_loc[seq];
  const int32_t* end = batch.key_ends + batch.query_start_loc[seq + 1];
  TORCH_CHECK_VALUE(std::is_sorted(begin, end) && (begin == end || end[-1] <= batch.seq_lens[seq]),
                    "key_ends: those of a sequence must not fall, and be at most its length, ", batch.seq_lens[seq]);
}

// query: [num_tokens, num_heads, key_dim], tokens may lie apart → [num_tokens, num_heads, value_dim]. key_ends:
// [num_tokens] int32.
Tensor paged_attention(const Tensor& query, const Tensor& keys, const Tensor& values,
                       const optional<Tensor>& key_scales, const optional<Tensor>& value_scales,
                       const Tensor& block_tables, const Tensor& seq_lens, const Tensor& query_start_loc, double scale,
                       int64_t window, const optional<Tensor>& key_ends) {
  const cpu::LayerCache cache = layer_cache_of(keys, values, key_scales, value_scales);
  TORCH_CHECK_VALUE(query.dim() == 3, "query has ", query.dim(), " dimensions: must be 3");
  const int64_t num_tokens = query.size(0), num_heads = query.size(1), num_seqs = seq_lens.numel();
  check(query, "query", at::kFloat, {num_tokens, num_heads, cache.key_dim});
  TORCH_CHECK_VALUE(query.stride(2) == 1 && query.stride(1) == cache.key_dim,
                    "query: a token's heads must be contiguous");
  TORCH_CHECK_VALUE(num_heads % cache.num_kv_heads == 0, "query has ", num_heads, " heads: must be a multiple of ",
                    cache.num_kv_heads);
  TORCH_CHECK_VALUE(window >= 0, "window is ", window, ": must be at least 0");
  check_contiguous(seq_lens, "seq_lens", at::kInt, {num_seqs});
  check_contiguous(query_start_loc, "query_start_loc", at::kInt, {num_seqs + 1});
  TORCH_CHECK_VALUE(block_tables.dim() == 2 && block_tables.size(0) == num_seqs && block_tables.stride(1) == 1 &&
                        block_tables.scalar_type() == at::kInt,
                    "block_tables has shape ", block_tables.sizes(), " of ", block_tables.scalar_type(), ": must be [",
                    num_seqs, ", max_num_blocks] of Int, rows contiguous");
  const Tensor out = at::empty({num_tokens, num_heads, cache.value_dim}, query.options());
  const cpu::AttentionBatch batch = {num_seqs,
                                     num_tokens,
                                     block_tables.const_data_ptr<int32_t>(),
                                     block_tables.stride(0),
                                     seq_lens.const_data_ptr<int32_t>(),
                                     query_start_loc.const_data_ptr<int32_t>(),
                                     nullptr,
                                     key_ends ? key_ends->const_data_ptr<int32_t>() : nullptr};
  if (key_ends) check_contiguous(*key_ends, "key_ends", at::kInt, {num_tokens});
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t num_queries = batch.query_start_loc[seq + 1] - batch.query_start_loc[seq];
    const int64_t seq_len = batch.seq_lens[seq], limit = block_tables.size(1) * cache.block_size;
    TORCH_CHECK_VALUE(num_queries >= 0 && seq_len >= num_queries && seq_len <= limit, "seq_lens has ", seq_len,
                      ": must be at least its ", num_queries, " queries and at most ", limit);
    if (key_ends) check_key_ends(batch, seq);
  }
  TORCH_CHECK_VALUE(batch.query_start_loc[num_seqs] <= num_tokens, "query_start_loc ends at ",
                    batch.query_start_loc[num_seqs], ": must be at most ", num_tokens);
  cpu::paged_attention().attend(cache, batch, num_heads, query.const_data_ptr<float>(), query.stride(0),
                                static_cast<float>(scale), window, out.data_ptr<float>());
  return out;
}

}  // namespace

cpu::LayerCache layer_cache_of(const Tensor& keys, const Tensor& values, const optional<Tensor>& key_scales,
                               const optional<Tensor>& value_scales) {
  TORCH_CHECK_VALUE(keys.dim() == 5 && values.dim() == 4, "keys and values have ", keys.dim(), " and ", values.dim(),
                    " dimensions: must be 5 and 4");
  const at::ScalarType dtype = keys.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kChar, "keys is ", dtype,
                    ": must be Float, BFloat16 or Char");
  const int64_t packed = 4 / static_cast<int64_t>(keys.element_size());
  const int64_t num_blocks = keys.size(0), num_kv_heads = keys.size(1), block_size = keys.size(3);
  check_contiguous(keys, "keys", dtype, {num_blocks, num_kv_heads, keys.size(2), block_size, packed});
  check_contiguous(values, "values", dtype, {num_blocks, num_kv_heads, block_size, values.size(3)});
  const bool is_int8 = dtype == at::kChar;
  const float* scales_of_keys = scales_of(key_scales, "key_scales", is_int8, {num_blocks, num_kv_heads, block_size});
  const float* scales_of_values =
      scales_of(value_scales, "value_scales", is_int8, {num_blocks, num_kv_heads, block_size});
  return {is_int8                  ? cpu::DType::kInt8
          : dtype == at::kBFloat16 ? cpu::DType::kBFloat16
                                   : cpu::DType::kFloat32,
          num_kv_heads,
          keys.size(2) * packed,
          values.size(3),
          block_size,
          keys.data_ptr(),
          values.data_ptr(),
          const_cast<float*>(scales_of_keys),
          const_cast<float*>(scales_of_values)};
}

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "write_kv_cache(Tensor(a!) qkv, int num_heads, Tensor(b!) keys, Tensor(c!) values, Tensor(d!)? key_scales, "
      "Tensor(e!)? value_scales, Tensor slot_mapping, Tensor? cos=None, Tensor? sin=None, Tensor? query_norm=None, "
      "Tensor? key_norm=None, float eps=0.0) -> ()",
      &write_kv_cache);
  m.def(
      "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor? key_scales, Tensor? value_scales, "
      "Tensor block_tables, Tensor seq_lens, Tensor query_start_loc, float scale, int window, "
      "Tensor? key_ends=None) -> Tensor",
      &paged_attention);
}

}  // namespace deepinfer
