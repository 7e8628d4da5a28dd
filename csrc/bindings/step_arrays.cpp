// Arrays of Python's that the core writes into or reads: checked once, then plain pointers.
#include <string>

#include "bindings/bindings.hpp"

namespace deepinfer {
namespace {

using Floats = py::array_t<float, py::array::c_style>;

// An array's memory after checking all that `write` relies on. shape: the wanted extents, -1 for any.
template <typename T>
T* checked_data(const char* name, const py::array& array, const std::vector<py::ssize_t>& shape) {
  const auto refuse = [&](const std::string& what) { throw py::value_error(std::string(name) + ": " + what); };
  if (!py::isinstance<py::array_t<T>>(array)) {
    refuse("dtype must be " + std::string(py::str(py::dtype::of<T>())) + ", got " +
           std::string(py::str(array.dtype())));
  }
  bool fits = array.ndim() == static_cast<py::ssize_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = shape[i] < 0 || array.shape(static_cast<py::ssize_t>(i)) == shape[i];
  }
  if (!fits) refuse("shape " + std::string(py::str(array.attr("shape"))) + " does not match the other arrays");
  if ((array.flags() & py::array::c_style) == 0) refuse("must be C-contiguous");
  if (!array.writeable()) refuse("must be writable");
  return static_cast<T*>(const_cast<void*>(array.data()));
}

BoundStepArrays make_step_arrays(const py::array& token_ids, const py::array& token_sources, const py::array& positions,
                                 const py::array& slot_mapping, const py::array& query_start_loc,
                                 const py::array& seq_lens, const py::array& advance_slots,
                                 const py::array& block_tables, const py::array& logits_indices,
                                 const py::array& sample_start_loc, const py::array& sample_slots,
                                 const py::array& temperature, const py::array& top_k, const py::array& top_p,
                                 const py::array& min_p, const py::array& seeds, const py::array& output_indices,
                                 const py::array& banned_rows, const py::array& banned_token_ids,
                                 const py::array& banned_until) {
  StepArrays arrays;
  arrays.token_ids = checked_data<int64_t>("token_ids", token_ids, {-1});
  arrays.seq_lens = checked_data<int32_t>("seq_lens", seq_lens, {-1});
  arrays.logits_indices = checked_data<int64_t>("logits_indices", logits_indices, {-1});
  arrays.banned_rows = checked_data<int64_t>("banned_rows", banned_rows, {-1});
  const py::ssize_t tokens = token_ids.shape(0), seqs = seq_lens.shape(0);
  const py::ssize_t logits = logits_indices.shape(0), banned = banned_rows.shape(0);
  if (seqs == 0) throw py::value_error("seq_lens: must have room for one sequence at least");
  if (logits == 0) throw py::value_error("logits_indices: must have room for one row at least");
  arrays.token_sources = checked_data<int32_t>("token_sources", token_sources, {tokens});
  arrays.positions = checked_data<int64_t>("positions", positions, {tokens});
  arrays.slot_mapping = checked_data<int64_t>("slot_mapping", slot_mapping, {tokens});
  arrays.query_start_loc = checked_data<int32_t>("query_start_loc", query_start_loc, {seqs + 1});
  arrays.advance_slots = checked_data<int32_t>("advance_slots", advance_slots, {seqs});
  arrays.block_tables = checked_data<int32_t>("block_tables", block_tables, {seqs, -1});
  arrays.sample_start_loc = checked_data<int32_t>("sample_start_loc", sample_start_loc, {seqs + 1});
  arrays.sample_slots = checked_data<int32_t>("sample_slots", sample_slots, {seqs});
  arrays.temperature = checked_data<float>("temperature", temperature, {logits});
  arrays.top_k = checked_data<int32_t>("top_k", top_k, {logits});
  arrays.top_p = checked_data<float>("top_p", top_p, {logits});
  arrays.min_p = checked_data<float>("min_p", min_p, {logits});
  arrays.seeds = checked_data<int64_t>("seeds", seeds, {seqs});
  arrays.output_indices = checked_data<int64_t>("output_indices", output_indices, {seqs});
  arrays.banned_token_ids = checked_data<int64_t>("banned_token_ids", banned_token_ids, {banned});
  arrays.banned_until = checked_data<int64_t>("banned_until", banned_until, {banned});
  arrays.max_num_tokens = static_cast<size_t>(tokens);
  arrays.max_num_seqs = static_cast<size_t>(seqs);
  arrays.max_blocks_per_seq = static_cast<size_t>(block_tables.shape(1));
  arrays.max_num_logits = static_cast<size_t>(logits);
  arrays.max_num_banned = static_cast<size_t>(banned);
  return {arrays,
          {token_ids,    token_sources,  positions,        slot_mapping, query_start_loc,  seq_lens,    advance_slots,
           block_tables, logits_indices, sample_start_loc, sample_slots, temperature,      top_k,       top_p,
           min_p,        seeds,          output_indices,   banned_rows,  banned_token_ids, banned_until}};
}

BoundStepLogprobs make_step_logprobs(const TokenIds& rows, const Floats& logprobs, const TokenIds& ranks,
                                     const TokenIds& top_token_ids, const Floats& top_logprobs) {
  if (rows.ndim() != 1 || top_token_ids.ndim() != 2) throw py::value_error("logprobs: rows [m], top_token_ids [m, k]");
  const py::ssize_t num_rows = rows.shape(0), num_top = top_token_ids.shape(1);
  if (!has_shape(logprobs, {num_rows}) || !has_shape(ranks, {num_rows}) ||
      !has_shape(top_token_ids, {num_rows, num_top}) || !has_shape(top_logprobs, {num_rows, num_top})) {
    throw py::value_error("logprobs: the arrays' shapes do not match");
  }
  return {{static_cast<size_t>(num_rows), static_cast<size_t>(num_top), rows.data(), logprobs.data(), ranks.data(),
           top_token_ids.data(), top_logprobs.data()},
          {rows, logprobs, ranks, top_token_ids, top_logprobs}};
}

}  // namespace

bool has_shape(const py::array& array, const std::vector<py::ssize_t>& shape) {
  return std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()) == shape;
}

void bind_step_arrays(py::module_& m) {
  py::class_<BoundStepArrays>(m, "StepArrays", py::is_final(), "The Worker's own host buffers, filled in place.")
      .def(py::init(&make_step_arrays), py::kw_only(), "token_ids"_a, "token_sources"_a, "positions"_a,
           "slot_mapping"_a, "query_start_loc"_a, "seq_lens"_a, "advance_slots"_a, "block_tables"_a, "logits_indices"_a,
           "sample_start_loc"_a, "sample_slots"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seeds"_a,
           "output_indices"_a, "banned_rows"_a, "banned_token_ids"_a, "banned_until"_a);

  py::class_<BoundStepLogprobs>(m, "StepLogprobs", py::is_final(), "Probabilities of the tokens that a step sampled.")
      .def(py::init(&make_step_logprobs), py::kw_only(), "rows"_a, "logprobs"_a, "ranks"_a, "top_token_ids"_a,
           "top_logprobs"_a);
}

}  // namespace deepinfer
