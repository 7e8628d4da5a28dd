// torch.ops.deepinfer: what a step takes from the one before it on the device, and what becomes of drafts.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "kernels/cpu/ngram_lookup.hpp"
#include "kernels/step_inputs.hpp"
#include "kernels/verify_drafts.hpp"
#include "torch_ops/tensor_checks.hpp"

namespace deepinfer {

namespace {

using at::Tensor;

// The elements of a vector that are indices below `limit`; where `may_lack` is set, one below 0 is none.
const int32_t* indices(const char* name, const Tensor& tensor, int64_t size, int64_t limit, bool may_lack) {
  check_tensor(name, tensor, at::kInt, {size});
  const int32_t* data = tensor.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < size; ++i) {
    TORCH_CHECK_VALUE(data[i] < limit && (may_lack || data[i] >= 0), name, "[", i, "] is ", data[i], ": must be ",
                      may_lack ? "below " : "0 to ", may_lack ? limit : limit - 1);
  }
  return data;
}

// Where the rows of each of num_seqs sequences begin: num_rows in all, `least` to `most` of each.
const int32_t* start_loc(const char* name, const Tensor& tensor, int64_t num_seqs, int64_t num_rows, int64_t least,
                         int64_t most) {
  check_tensor(name, tensor, at::kInt, {num_seqs + 1});
  const int32_t* data = tensor.const_data_ptr<int32_t>();
  TORCH_CHECK_VALUE(data[0] == 0 && data[num_seqs] == num_rows, name, " is ", data[0], " to ", data[num_seqs],
                    ": must be 0 to ", num_rows);
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t num = int64_t{data[seq + 1]} - data[seq];
    TORCH_CHECK_VALUE(num >= least && num <= most, name, " gives sequence ", seq, " ", num, " rows: must be ", least,
                      " to ", most);
  }
  return data;
}

// Of tensors that have a row for each slot, `width` wide.
void check_next_tokens(const Tensor& next_tokens) {
  TORCH_CHECK_VALUE(next_tokens.dim() == 2 && next_tokens.size(1) >= 1, "next_tokens is ", next_tokens.sizes(),
                    ": must be [num_slots, 1 + num_speculative_tokens]");
  check_tensor("next_tokens", next_tokens, at::kInt, next_tokens.sizes());
}

void check_history(const Tensor& history, const Tensor& history_lens) {
  TORCH_CHECK_VALUE(history.dim() == 2, "history is ", history.sizes(), ": must be [num_slots, max_seq_len]");
  check_tensor("history", history, at::kInt, history.sizes());
  check_tensor("history_lens", history_lens, at::kInt, {history.size(0)});
  const int32_t* lens = history_lens.const_data_ptr<int32_t>();
  for (int64_t slot = 0; slot < history.size(0); ++slot) {
    TORCH_CHECK_VALUE(lens[slot] >= 0 && lens[slot] <= history.size(1), "history_lens[", slot, "] is ", lens[slot],
                      ": must be 0 to ", history.size(1));
  }
}

void resolve_step_inputs(const Tensor& token_ids, const Tensor& positions, const Tensor& slot_mapping,
                         const Tensor& seq_lens, const Tensor& token_sources, const Tensor& advance_slots,
                         const Tensor& query_start_loc, const Tensor& block_tables, const Tensor& next_tokens,
                         const Tensor& num_accepted, int64_t block_size, int64_t max_seq_len) {
  const int64_t num_tokens = token_ids.numel(), num_seqs = seq_lens.numel();
  check_tensor("token_ids", token_ids, at::kLong, {num_tokens});
  check_tensor("positions", positions, at::kLong, {num_tokens});
  check_tensor("slot_mapping", slot_mapping, at::kLong, {num_tokens});
  check_tensor("seq_lens", seq_lens, at::kInt, {num_seqs});
  check_next_tokens(next_tokens);
  check_tensor("num_accepted", num_accepted, at::kInt, {next_tokens.size(0)});
  TORCH_CHECK_VALUE(block_tables.dim() == 2 && block_tables.size(0) == num_seqs &&
                        block_tables.scalar_type() == at::kInt && block_tables.device().is_cpu() &&
                        (block_tables.size(1) <= 1 || block_tables.stride(1) == 1),
                    "block_tables is ", block_tables.toString(), " ", block_tables.sizes(), ": must be Int [", num_seqs,
                    ", max_num_blocks] on the CPU, its rows contiguous");
  TORCH_CHECK_VALUE(block_size >= 1, "block_size is ", block_size, ": must be 1 or more");
  TORCH_CHECK_VALUE(max_seq_len >= 1, "max_seq_len is ", max_seq_len, ": must be 1 or more");
  cpu::resolve_step_inputs(
      {num_seqs, num_tokens, token_ids.mutable_data_ptr<int64_t>(), positions.mutable_data_ptr<int64_t>(),
       slot_mapping.mutable_data_ptr<int64_t>(), seq_lens.mutable_data_ptr<int32_t>(),
       indices("token_sources", token_sources, num_tokens, next_tokens.numel(), true),
       indices("advance_slots", advance_slots, num_seqs, next_tokens.size(0), true),
       start_loc("query_start_loc", query_start_loc, num_seqs, num_tokens, 0, num_tokens),
       block_tables.const_data_ptr<int32_t>(), block_tables.stride(0), block_tables.size(1), block_size, max_seq_len},
      next_tokens.const_data_ptr<int32_t>(), num_accepted.const_data_ptr<int32_t>());
}

void uniforms_of(const Tensor& seeds, const Tensor& output_indices, const Tensor& advance_slots,
                 const Tensor& sample_start_loc, const Tensor& num_accepted, const Tensor& uniforms,
                 const Tensor& row_output_indices) {
  const int64_t num_seqs = seeds.numel(), num_rows = uniforms.numel(), num_slots = num_accepted.numel();
  check_tensor("seeds", seeds, at::kLong, {num_seqs});
  check_tensor("output_indices", output_indices, at::kLong, {num_seqs});
  check_tensor("num_accepted", num_accepted, at::kInt, {num_slots});
  check_tensor("uniforms", uniforms, at::kDouble, {num_rows});
  check_tensor("row_output_indices", row_output_indices, at::kLong, {num_rows});
  cpu::uniforms_of({num_seqs, seeds.const_data_ptr<int64_t>(), output_indices.const_data_ptr<int64_t>(),
                    indices("advance_slots", advance_slots, num_seqs, num_slots, true),
                    start_loc("sample_start_loc", sample_start_loc, num_seqs, num_rows, 1, num_rows)},
                   num_accepted.const_data_ptr<int32_t>(), uniforms.mutable_data_ptr<double>(),
                   row_output_indices.mutable_data_ptr<int64_t>());
}

void verify_drafts(const Tensor& targets, const Tensor& sample_start_loc, const Tensor& slots,
                   const Tensor& next_tokens, const Tensor& num_accepted, const Tensor& token_ids,
                   const Tensor& num_tokens) {
  const int64_t num_seqs = slots.numel(), num_rows = targets.numel();
  check_next_tokens(next_tokens);
  const int64_t width = next_tokens.size(1);
  check_tensor("targets", targets, at::kLong, {num_rows});
  check_tensor("num_accepted", num_accepted, at::kInt, {next_tokens.size(0)});
  check_tensor("token_ids", token_ids, at::kInt, {num_seqs, width});
  check_tensor("num_tokens", num_tokens, at::kInt, {num_seqs});
  cpu::verify_drafts({num_seqs, width, targets.const_data_ptr<int64_t>(),
                      start_loc("sample_start_loc", sample_start_loc, num_seqs, num_rows, 1, width),
                      indices("slots", slots, num_seqs, next_tokens.size(0), false)},
                     next_tokens.mutable_data_ptr<int32_t>(), num_accepted.mutable_data_ptr<int32_t>(),
                     token_ids.mutable_data_ptr<int32_t>(), num_tokens.mutable_data_ptr<int32_t>());
}

void append_history(const Tensor& token_ids, const Tensor& num_tokens, const Tensor& slots, const Tensor& history,
                    const Tensor& history_lens) {
  const int64_t num_seqs = slots.numel();
  TORCH_CHECK_VALUE(token_ids.dim() == 2, "token_ids is ", token_ids.sizes(), ": must be [num_seqs, width]");
  const int64_t width = token_ids.size(1);
  check_tensor("token_ids", token_ids, at::kInt, {num_seqs, width});
  check_history(history, history_lens);
  cpu::append_history(num_seqs, width, token_ids.const_data_ptr<int32_t>(),
                      indices("num_tokens", num_tokens, num_seqs, width + 1, false),
                      indices("slots", slots, num_seqs, history.size(0), false), history.size(1),
                      history.mutable_data_ptr<int32_t>(), history_lens.mutable_data_ptr<int32_t>());
}

void propose_ngram(const Tensor& history, const Tensor& history_lens, const Tensor& slots, const Tensor& next_tokens,
                   int64_t min_ngram, int64_t max_ngram) {
  check_history(history, history_lens);
  check_next_tokens(next_tokens);
  TORCH_CHECK_VALUE(next_tokens.size(0) == history.size(0), "next_tokens has ", next_tokens.size(0), " slots: must be ",
                    history.size(0), " as history has");
  TORCH_CHECK_VALUE(min_ngram >= 1 && min_ngram <= max_ngram, "min_ngram is ", min_ngram,
                    ": must be 1 to max_ngram, which is ", max_ngram);
  const int64_t num_seqs = slots.numel();
  cpu::ngram_lookup().propose(
      {history.const_data_ptr<int32_t>(), history_lens.const_data_ptr<int32_t>(), history.size(1)},
      indices("slots", slots, num_seqs, history.size(0), false), num_seqs, min_ngram, max_ngram,
      next_tokens.mutable_data_ptr<int32_t>(), next_tokens.size(1));
}

}  // namespace

// All write into tensors that they are given. Shapes: deepinfer_backend/ops/{step_inputs,verify_drafts,ngram_drafts}.py.
TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "resolve_step_inputs(Tensor(a!) token_ids, Tensor(b!) positions, Tensor(c!) slot_mapping, Tensor(d!) seq_lens, "
      "Tensor token_sources, Tensor advance_slots, Tensor query_start_loc, Tensor block_tables, Tensor next_tokens, "
      "Tensor num_accepted, int block_size, int max_seq_len) -> ()",
      &resolve_step_inputs);
  m.def(
      "uniforms_of(Tensor seeds, Tensor output_indices, Tensor advance_slots, Tensor sample_start_loc, "
      "Tensor num_accepted, Tensor(a!) uniforms, Tensor(b!) row_output_indices) -> ()",
      &uniforms_of);
  m.def(
      "verify_drafts(Tensor targets, Tensor sample_start_loc, Tensor slots, Tensor(a!) next_tokens, "
      "Tensor(b!) num_accepted, Tensor(c!) token_ids, Tensor(d!) num_tokens) -> ()",
      &verify_drafts);
  m.def(
      "append_history(Tensor token_ids, Tensor num_tokens, Tensor slots, Tensor(a!) history, Tensor(b!) history_lens) "
      "-> ()",
      &append_history);
  m.def(
      "propose_ngram(Tensor history, Tensor history_lens, Tensor slots, Tensor(a!) next_tokens, int min_ngram, "
      "int max_ngram) -> ()",
      &propose_ngram);
}

}  // namespace deepinfer
