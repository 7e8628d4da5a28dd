// The module deepinfer_backend._core: names, GIL, docstrings. Contracts are in _core.pyi and in the engine's headers.
#include <pybind11/native_enum.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <map>
#include <string>
#include <utility>

#include "engine/request_output.hpp"
#include "engine/scheduled_batch.hpp"
#include "engine/scheduler.hpp"
#include "engine/sequence.hpp"

namespace py = pybind11;
using namespace pybind11::literals;  // NOLINT: the documented way to get "name"_a

namespace deepinfer {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using Handles = py::array_t<uint64_t, py::array::c_style>;
using TokenIds = py::array_t<int32_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style>;

template <typename T>
py::array_t<T> to_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// ---- step arrays ----

struct BoundStepArrays {
  StepArrays arrays;
  std::array<py::array, 15> owners;  // keep the memory that `arrays` points into
};

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

BoundStepArrays make_step_arrays(const py::array& token_ids, const py::array& inflight_rows, const py::array& positions,
                                 const py::array& slot_mapping, const py::array& query_start_loc,
                                 const py::array& seq_lens, const py::array& block_tables,
                                 const py::array& logits_indices, const py::array& temperature, const py::array& top_k,
                                 const py::array& top_p, const py::array& min_p, const py::array& uniforms,
                                 const py::array& banned_rows, const py::array& banned_token_ids) {
  StepArrays arrays;
  arrays.token_ids = checked_data<int64_t>("token_ids", token_ids, {-1});
  arrays.seq_lens = checked_data<int32_t>("seq_lens", seq_lens, {-1});
  const py::ssize_t tokens = token_ids.shape(0), seqs = seq_lens.shape(0);
  if (seqs == 0) throw py::value_error("seq_lens: must have room for one sequence at least");
  arrays.inflight_rows = checked_data<int32_t>("inflight_rows", inflight_rows, {tokens});
  arrays.positions = checked_data<int64_t>("positions", positions, {tokens});
  arrays.slot_mapping = checked_data<int64_t>("slot_mapping", slot_mapping, {tokens});
  arrays.query_start_loc = checked_data<int32_t>("query_start_loc", query_start_loc, {seqs + 1});
  arrays.block_tables = checked_data<int32_t>("block_tables", block_tables, {seqs, -1});
  arrays.logits_indices = checked_data<int64_t>("logits_indices", logits_indices, {-1});
  arrays.temperature = checked_data<float>("temperature", temperature, {seqs});
  arrays.top_k = checked_data<int32_t>("top_k", top_k, {seqs});
  arrays.top_p = checked_data<float>("top_p", top_p, {seqs});
  arrays.min_p = checked_data<float>("min_p", min_p, {seqs});
  arrays.uniforms = checked_data<double>("uniforms", uniforms, {seqs});
  arrays.banned_rows = checked_data<int64_t>("banned_rows", banned_rows, {-1});
  arrays.banned_token_ids = checked_data<int64_t>("banned_token_ids", banned_token_ids, {banned_rows.shape(0)});
  arrays.max_num_tokens = static_cast<size_t>(tokens);
  arrays.max_num_seqs = static_cast<size_t>(seqs);
  arrays.max_blocks_per_seq = static_cast<size_t>(block_tables.shape(1));
  arrays.max_num_logits = static_cast<size_t>(logits_indices.shape(0));
  if (arrays.max_num_logits == 0) throw py::value_error("logits_indices: must have room for one row at least");
  arrays.max_num_banned = static_cast<size_t>(banned_rows.shape(0));
  return {arrays,
          {token_ids, inflight_rows, positions, slot_mapping, query_start_loc, seq_lens, block_tables, logits_indices,
           temperature, top_k, top_p, min_p, uniforms, banned_rows, banned_token_ids}};
}

// ---- logprobs of a step ----

struct BoundStepLogprobs {
  StepLogprobs logprobs;
  std::array<py::array, 5> owners;  // keep the memory that `logprobs` points into
};

BoundStepLogprobs make_step_logprobs(const TokenIds& rows, const Floats& logprobs, const TokenIds& ranks,
                                     const TokenIds& top_token_ids, const Floats& top_logprobs) {
  if (rows.ndim() != 1 || top_token_ids.ndim() != 2) throw py::value_error("logprobs: rows [m], top_token_ids [m, k]");
  const py::ssize_t num_rows = rows.shape(0), num_top = top_token_ids.shape(1);
  const auto has_shape = [](const py::array& array, const std::vector<py::ssize_t>& shape) {
    return std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()) == shape;
  };
  if (!has_shape(logprobs, {num_rows}) || !has_shape(ranks, {num_rows}) ||
      !has_shape(top_token_ids, {num_rows, num_top}) || !has_shape(top_logprobs, {num_rows, num_top})) {
    throw py::value_error("logprobs: the arrays' shapes do not match");
  }
  return {{static_cast<size_t>(num_rows), static_cast<size_t>(num_top), rows.data(), logprobs.data(), ranks.data(),
           top_token_ids.data(), top_logprobs.data()},
          {rows, logprobs, ranks, top_token_ids, top_logprobs}};
}

// ---- metadata: a handle and its pool, resolved at every read ----

struct BoundMetadata {
  std::shared_ptr<SequenceMetadataPool> pool;
  uint64_t handle;
  [[nodiscard]] const SequenceMetadata& get() const { return pool->get(handle); }
};

struct BoundMetadataList {
  std::shared_ptr<ScheduledBatch> batch;
  [[nodiscard]] BoundMetadata at(py::ssize_t index) const {
    const auto size = static_cast<py::ssize_t>(batch->metadata().size());
    if (index < 0) index += size;
    if (index < 0 || index >= size) throw py::index_error("the batch has " + std::to_string(size) + " sequences");
    return {batch->pool(), batch->metadata()[static_cast<size_t>(index)]};
  }
};

template <typename Field>
auto metadata_field(Field SequenceMetadata::* field) {
  return [field](const BoundMetadata& self) { return self.get().*field; };
}

// ---- the four kinds of classes ----

void bind_options(py::module_& m) {
  py::native_enum<FinishReason>(m, "FinishReason", "enum.Enum", "Why a sequence ended.")
      .value("NONE", FinishReason::kNone)
      .value("STOP", FinishReason::kStop)
      .value("LENGTH", FinishReason::kLength)
      .value("ABORT", FinishReason::kAbort)
      .value("ERROR", FinishReason::kError)
      .finalize();

  py::class_<SamplingOptions>(m, "SamplingOptions", py::is_final(),
                              "What the core needs to know of a request's sampling parameters.")
      .def(py::init([](int64_t max_tokens, int64_t min_tokens, std::vector<int32_t> eos_token_ids,
                       std::vector<int32_t> stop_token_ids, bool ignore_eos, float temperature, int32_t top_k,
                       float top_p, float min_p, uint64_t seed, int32_t n, int32_t num_logprobs, bool prompt_logprobs,
                       bool is_tracked, bool is_beam, int32_t lora_id) {
             SamplingOptions options{max_tokens,
                                     min_tokens,
                                     std::move(eos_token_ids),
                                     std::move(stop_token_ids),
                                     ignore_eos,
                                     temperature,
                                     top_k,
                                     top_p,
                                     min_p,
                                     seed,
                                     n,
                                     num_logprobs,
                                     prompt_logprobs,
                                     is_tracked,
                                     is_beam,
                                     lora_id};
             options.validate();
             return options;
           }),
           py::kw_only(), "max_tokens"_a, "min_tokens"_a = 0, "eos_token_ids"_a = std::vector<int32_t>(),
           "stop_token_ids"_a = std::vector<int32_t>(), "ignore_eos"_a = false, "temperature"_a = 0.0f, "top_k"_a = 0,
           "top_p"_a = 1.0f, "min_p"_a = 0.0f, "seed"_a = 0, "n"_a = 1, "num_logprobs"_a = -1,
           "prompt_logprobs"_a = false, "is_tracked"_a = false, "is_beam"_a = false, "lora_id"_a = 0);

  py::class_<SchedulerConfig>(m, "SchedulerConfig", py::is_final(), "Limits of the scheduler.")
      .def(py::init([](int64_t num_blocks, int64_t block_size, int64_t max_num_seqs, int64_t max_num_batched_tokens,
                       int64_t max_model_len, int64_t max_num_prompt_logits, bool enable_prefix_caching,
                       int64_t max_consecutive_prefills, int64_t prefill_attempt_interval, double priority_aging_s,
                       uint64_t hash_seed) {
             SchedulerConfig config{num_blocks,
                                    block_size,
                                    max_num_seqs,
                                    max_num_batched_tokens,
                                    max_model_len,
                                    max_num_prompt_logits,
                                    enable_prefix_caching,
                                    max_consecutive_prefills,
                                    prefill_attempt_interval,
                                    priority_aging_s,
                                    hash_seed};
             config.validate();
             return config;
           }),
           py::kw_only(), "num_blocks"_a, "block_size"_a, "max_num_seqs"_a, "max_num_batched_tokens"_a,
           "max_model_len"_a, "max_num_prompt_logits"_a = SchedulerConfig().max_num_prompt_logits,
           "enable_prefix_caching"_a = SchedulerConfig().enable_prefix_caching,
           "max_consecutive_prefills"_a = SchedulerConfig().max_consecutive_prefills,
           "prefill_attempt_interval"_a = SchedulerConfig().prefill_attempt_interval,
           "priority_aging_s"_a = SchedulerConfig().priority_aging_s, "hash_seed"_a = SchedulerConfig().hash_seed);
}

void bind_batch(py::module_& m) {
  py::class_<BoundStepArrays>(m, "StepArrays", py::is_final(), "The Worker's own host buffers, filled in place.")
      .def(py::init(&make_step_arrays), py::kw_only(), "token_ids"_a, "inflight_rows"_a, "positions"_a,
           "slot_mapping"_a, "query_start_loc"_a, "seq_lens"_a, "block_tables"_a, "logits_indices"_a, "temperature"_a,
           "top_k"_a, "top_p"_a, "min_p"_a, "uniforms"_a, "banned_rows"_a, "banned_token_ids"_a);

  py::class_<BoundStepLogprobs>(m, "StepLogprobs", py::is_final(), "Probabilities of the tokens that a step sampled.")
      .def(py::init(&make_step_logprobs), py::kw_only(), "rows"_a, "logprobs"_a, "ranks"_a, "top_token_ids"_a,
           "top_logprobs"_a);

  py::class_<BoundMetadata>(m, "SequenceMetadata", py::is_final(),
                            "One sequence's part in one step; reading one whose step is over raises LookupError.")
      .def_property_readonly("request_id", metadata_field(&SequenceMetadata::request_id))
      .def_property_readonly("seq_id", metadata_field(&SequenceMetadata::seq_id))
      .def_property_readonly("is_prefill", metadata_field(&SequenceMetadata::is_prefill))
      .def_property_readonly("block_table", [](const BoundMetadata& self) { return to_array(self.get().block_table); })
      .def_property_readonly("seqlen_q", metadata_field(&SequenceMetadata::seqlen_q))
      .def_property_readonly("seqlen_k", metadata_field(&SequenceMetadata::seqlen_k))
      .def_property_readonly("samples", metadata_field(&SequenceMetadata::samples))
      .def_property_readonly("output_index", metadata_field(&SequenceMetadata::output_index));

  py::class_<SequenceMetadataPool, std::shared_ptr<SequenceMetadataPool>>(
      m, "SequenceMetadataPool", py::is_final(), "Grows to the largest step, then never allocates again.")
      .def(py::init<>())
      .def_property_readonly("num_in_use", &SequenceMetadataPool::num_in_use);

  py::class_<BoundMetadataList>(m, "SequenceMetadataList", py::is_final(), "The batch's sequences, in batch order.")
      .def("__len__", [](const BoundMetadataList& self) { return self.batch->metadata().size(); })
      .def("__getitem__", &BoundMetadataList::at, "index"_a)
      // Python's own iterator over anything with __getitem__; it ends at the IndexError.
      .def("__iter__",
           [](const py::object& self) { return py::reinterpret_steal<py::iterator>(PySeqIter_New(self.ptr())); });

  py::class_<ScheduledBatch, std::shared_ptr<ScheduledBatch>>(m, "SchedulerOutputs", py::is_final(),
                                                              "One scheduled batch: prefill or decode, maybe empty.")
      .def("is_empty", &ScheduledBatch::is_empty)
      .def_readonly("is_prefill", &ScheduledBatch::is_prefill)
      .def_property_readonly("num_seqs", &ScheduledBatch::num_seqs)
      .def_property_readonly("num_tokens", &ScheduledBatch::num_tokens)
      .def_property_readonly("num_sampled", &ScheduledBatch::num_sampled)
      .def_property_readonly("num_prompt_logits", &ScheduledBatch::num_prompt_logits)
      .def_property_readonly("num_banned", &ScheduledBatch::num_banned)
      .def_readonly("max_query_len", &ScheduledBatch::max_query_len)
      .def_readonly("max_seq_len", &ScheduledBatch::max_seq_len)
      .def_readonly("max_num_blocks", &ScheduledBatch::max_num_blocks)
      .def_readonly("all_greedy", &ScheduledBatch::all_greedy)
      .def_readonly("max_top_k", &ScheduledBatch::max_top_k)
      .def_readonly("any_top_p", &ScheduledBatch::any_top_p)
      .def_readonly("any_min_p", &ScheduledBatch::any_min_p)
      .def_readonly("any_lora", &ScheduledBatch::any_lora)
      .def_property_readonly("lora_ids", [](const ScheduledBatch& self) { return to_array(self.lora_ids); })
      .def_property_readonly("tracked_rows", [](const ScheduledBatch& self) { return to_array(self.tracked_rows); })
      .def_property_readonly("tracked_seq_ids",
                             [](const ScheduledBatch& self) { return to_array(self.tracked_seq_ids); })
      .def_property_readonly("prompt_logits",
                             [](const ScheduledBatch& self) {
                               static_assert(sizeof(PromptLogitsSpan) == 3 * sizeof(int64_t));
                               const auto num_spans = static_cast<py::ssize_t>(self.prompt_logits.size());
                               return py::array_t<int64_t>(
                                   {num_spans, py::ssize_t{3}},
                                   num_spans == 0 ? nullptr : &self.prompt_logits.front().seq_id);
                             })
      .def_readonly("num_preempted", &ScheduledBatch::num_preempted)
      .def_readonly("num_cached_tokens", &ScheduledBatch::num_cached_tokens)
      .def_property_readonly("block_copies",
                             [](const ScheduledBatch& self) {
                               static_assert(sizeof(BlockCopy) == 2 * sizeof(int32_t));
                               const auto num_copies = static_cast<py::ssize_t>(self.block_copies.size());
                               return py::array_t<int32_t>(
                                   {num_copies, py::ssize_t{2}},
                                   num_copies == 0 ? nullptr : &self.block_copies.front().source);
                             })
      .def(
          "write", [](const ScheduledBatch& self, const BoundStepArrays& arrays) { self.write(arrays.arrays); },
          "arrays"_a, ReleaseGil());
}

void bind_outputs(py::module_& m) {
  py::class_<RequestOutput>(m, "RequestOutput", py::is_final(),
                            "One new token of one sequence, or (token_id = -1) the news that it ended without one.")
      .def_readonly("request_id", &RequestOutput::request_id)
      .def_readonly("client_index", &RequestOutput::client_index)
      .def_readonly("seq_id", &RequestOutput::seq_id)
      .def_readonly("sequence_index", &RequestOutput::sequence_index)
      .def_readonly("output_index", &RequestOutput::output_index)
      .def_readonly("token_id", &RequestOutput::token_id)
      .def_readonly("finished", &RequestOutput::finished)
      .def_readonly("finish_reason", &RequestOutput::finish_reason)
      .def_readonly("stop_token_id", &RequestOutput::stop_token_id)
      .def_readonly("num_prompt_tokens", &RequestOutput::num_prompt_tokens)
      .def_readonly("num_cached_tokens", &RequestOutput::num_cached_tokens)
      .def_readonly("first_scheduled_time_ns", &RequestOutput::first_scheduled_time_ns)
      .def_readonly("logprob", &RequestOutput::logprob)
      .def_readonly("rank", &RequestOutput::rank)
      .def_property_readonly("top_logprobs",
                             [](const RequestOutput& self) {
                               std::vector<std::pair<int32_t, float>> pairs;
                               for (const TokenLogprob& top : self.top_logprobs) {
                                 pairs.emplace_back(top.token_id, top.logprob);
                               }
                               return pairs;
                             })
      .def_static("clone", &RequestOutputPool::copy_from_any, "handle"_a, "A copy that outlives the step.")
      .def_static(
          "unpack", [](const py::bytes& data) { return unpack(data); }, "data"_a,
          "The outputs that RequestOutputPool.pack wrote.")
      .def("__repr__", [](const RequestOutput& self) {
        return "RequestOutput(request_id='" + self.request_id +
               "', sequence_index=" + std::to_string(self.sequence_index) +
               ", output_index=" + std::to_string(self.output_index) + ", token_id=" + std::to_string(self.token_id) +
               ", finished=" + (self.finished ? "True" : "False") + ")";
      });

  py::class_<WrittenSequence>(m, "WrittenSequence", py::is_final(),
                              "A finished text that the scheduler did not see grow.")
      .def(py::init([](int32_t sequence_index, std::vector<int32_t> token_ids, std::vector<float> logprobs,
                       FinishReason finish_reason, int32_t stop_token_id) {
             return WrittenSequence{sequence_index, std::move(token_ids), std::move(logprobs), finish_reason,
                                    stop_token_id};
           }),
           py::kw_only(), "sequence_index"_a, "token_ids"_a, "logprobs"_a, "finish_reason"_a, "stop_token_id"_a = -1);

  py::class_<RequestOutputPool>(m, "RequestOutputPool", py::is_final(),
                                "Owns the RequestOutputs of a step behind generation-checked handles.")
      .def(py::init<>())
      .def(
          "clone",
          [](const RequestOutputPool& self, const Handles& handles) {
            std::vector<RequestOutput> outputs;
            for (py::ssize_t i = 0; i < handles.size(); ++i) outputs.push_back(self.get(handles.data()[i]));
            return outputs;
          },
          "handles"_a)
      .def(
          "pack",
          [](const RequestOutputPool& self, const Handles& handles) {
            std::map<int32_t, py::bytes> packed;
            for (const auto& [client_index, data] : pack(self, handles.data(), static_cast<size_t>(handles.size()))) {
              packed.emplace(client_index, data);
            }
            return packed;
          },
          "handles"_a)
      .def(
          "release",
          [](RequestOutputPool& self, const Handles& handles) {
            for (py::ssize_t i = 0; i < handles.size(); ++i) self.release(handles.data()[i]);
          },
          "handles"_a)
      .def_property_readonly("num_in_use", &RequestOutputPool::num_in_use);
}

void bind_scheduler(py::module_& m) {
  using BuildOutputs = void (Scheduler::*)(ScheduledBatch&, RequestOutputPool&, std::vector<uint64_t>&);
  const auto returning_handles = [](BuildOutputs build) {
    return [build](Scheduler& self, ScheduledBatch& outputs, RequestOutputPool& pool) {
      std::vector<uint64_t> handles;
      {
        const py::gil_scoped_release release;
        (self.*build)(outputs, pool, handles);
      }
      return to_array(handles);
    };
  };

  py::class_<Scheduler>(m, "Scheduler", py::is_final(),
                        "Queues waiting, prompted and running; who computes what next; who owns which block.")
      .def(py::init<const SchedulerConfig&>(), "config"_a)
      .def(
          "add_seq",
          [](Scheduler& self, const std::string& request_id, const TokenIds& prompt_token_ids,
             const SamplingOptions& options, int64_t priority, const std::string& cache_salt, int32_t client_index) {
            if (prompt_token_ids.ndim() != 1) throw py::value_error("prompt_token_ids: must have one dimension");
            const int32_t* begin = prompt_token_ids.data();
            return self.add_seq(request_id, std::vector<int32_t>(begin, begin + prompt_token_ids.size()), options,
                                priority, cache_salt, client_index);
          },
          "request_id"_a, "prompt_token_ids"_a, "options"_a, py::kw_only(), "priority"_a = 0, "cache_salt"_a = "",
          "client_index"_a = 0)
      .def("fork_seq", &Scheduler::fork_seq, "seq_id"_a, py::kw_only(), "seed"_a)
      .def("append_token", &Scheduler::append_token, "seq_id"_a, "token_id"_a)
      .def("is_held", &Scheduler::is_held, "seq_id"_a)
      .def("abort_seq", &Scheduler::abort_seq, "seq_id"_a)
      .def("abort_request", &Scheduler::abort_request, "request_id"_a,
           "sequence_index"_a = int32_t{Scheduler::kAllSequences})
      .def("abort_client", &Scheduler::abort_client, "client_index"_a)
      .def("was_scheduled", &Scheduler::was_scheduled, "request_id"_a)
      .def(
          "schedule",
          [](Scheduler& self, const std::shared_ptr<SequenceMetadataPool>& pool) {
            std::shared_ptr<ScheduledBatch> batch;
            {
              const py::gil_scoped_release release;
              batch = self.schedule(pool);
            }
            return std::pair(BoundMetadataList{batch}, batch);
          },
          "pool"_a)
      .def(
          "process_outputs",
          [](Scheduler& self, ScheduledBatch& outputs, const TokenIds& token_ids, const TokenIds& num_tokens,
             const BoundStepLogprobs* logprobs) {
            if (token_ids.ndim() != 2) throw py::value_error("token_ids: must have the shape [num_sampled, width]");
            if (num_tokens.ndim() != 1 || num_tokens.shape(0) != token_ids.shape(0)) {
              throw py::value_error("num_tokens: must have one entry per row of token_ids");
            }
            const auto num_rows = static_cast<size_t>(token_ids.shape(0));
            const auto width = static_cast<size_t>(token_ids.shape(1));
            const int32_t* ids = token_ids.data();
            const int32_t* counts = num_tokens.data();
            const StepLogprobs step_logprobs = logprobs == nullptr ? StepLogprobs() : logprobs->logprobs;
            const py::gil_scoped_release release;
            self.process_outputs(outputs, ids, num_rows, width, counts, step_logprobs);
          },
          "outputs"_a, "token_ids"_a, "num_tokens"_a, py::kw_only(), "logprobs"_a = nullptr)
      .def("build_request_outputs", returning_handles(&Scheduler::build_request_outputs), "outputs"_a, "pool"_a)
      .def("fail_step", returning_handles(&Scheduler::fail_step), "outputs"_a, "pool"_a)
      .def(
          "build_sequence_outputs",
          [](Scheduler& self, int64_t seq_id, RequestOutputPool& pool, const WrittenSequence& sequence) {
            std::vector<uint64_t> handles;
            self.build_sequence_outputs(seq_id, sequence, pool, handles);
            return to_array(handles);
          },
          "seq_id"_a, "pool"_a, "sequence"_a)
      .def("free_finished_seqs", &Scheduler::free_finished_seqs, ReleaseGil())
      .def("take_forks",
           [](Scheduler& self) {
             std::vector<std::pair<int64_t, int64_t>> forks;
             for (const Fork& fork : self.take_forks()) forks.emplace_back(fork.parent_id, fork.child_id);
             return forks;
           })
      .def("take_freed_seq_ids", &Scheduler::take_freed_seq_ids)
      .def("has_unfinished_seqs", &Scheduler::has_unfinished_seqs)
      .def_property_readonly("num_unfinished_requests", &Scheduler::num_unfinished_requests)
      .def_property_readonly("num_waiting", &Scheduler::num_waiting)
      .def_property_readonly("num_prompted", &Scheduler::num_prompted)
      .def_property_readonly("num_running", &Scheduler::num_running)
      .def_property_readonly("num_blocks", [](const Scheduler& self) { return self.blocks().num_blocks(); })
      .def_property_readonly("num_free_blocks", [](const Scheduler& self) { return self.blocks().num_free_blocks(); })
      .def_property_readonly("num_used_blocks", [](const Scheduler& self) { return self.blocks().num_used_blocks(); })
      .def_property_readonly("num_preemptions", &Scheduler::num_preemptions)
      .def_property_readonly("num_cached_tokens", &Scheduler::num_cached_tokens)
      .def("check_invariants", &Scheduler::check_invariants, ReleaseGil());
}

}  // namespace
}  // namespace deepinfer

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core: sequences, blocks, scheduler, request outputs. Contracts are in _core.pyi.";
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const deepinfer::NotFound& not_found) {
      py::set_error(PyExc_LookupError, not_found.what());
    }
  });
  deepinfer::bind_options(m);
  deepinfer::bind_batch(m);
  deepinfer::bind_outputs(m);
  deepinfer::bind_scheduler(m);
}
