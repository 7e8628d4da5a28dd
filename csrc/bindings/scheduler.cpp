// The scheduler.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"

namespace deepinfer {
namespace {

std::vector<int32_t> to_vector(const TokenIds& prompt_token_ids) {
  if (prompt_token_ids.ndim() != 1) throw py::value_error("prompt_token_ids: must have one dimension");
  return {prompt_token_ids.data(), prompt_token_ids.data() + prompt_token_ids.size()};
}

StepTokens step_tokens(const Scheduler& scheduler, const TokenIds& token_ids, const TokenIds& num_tokens,
                       const std::optional<TokenIds>& drafts) {
  if (token_ids.ndim() != 2) throw py::value_error("token_ids: must have the shape [num_sampled, width]");
  const py::ssize_t num_rows = token_ids.shape(0);
  if (!has_shape(num_tokens, {num_rows})) {
    throw py::value_error("num_tokens: must have one entry per row of token_ids");
  }
  const auto num_drafts = static_cast<py::ssize_t>(scheduler.num_accepted_by_position().size());
  if (drafts && !has_shape(*drafts, {num_rows, num_drafts})) {
    throw py::value_error("drafts: must have num_speculative_tokens (" + std::to_string(num_drafts) +
                          ") entries per row of token_ids");
  }
  return {static_cast<size_t>(num_rows), static_cast<size_t>(token_ids.shape(1)), token_ids.data(), num_tokens.data(),
          drafts ? drafts->data() : nullptr};
}

}  // namespace

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

  py::class_<AwaitedBlocks>(m, "AwaitedBlocks", py::is_final(), "Blocks whose content comes from another engine.")
      .def_readonly("seq_id", &AwaitedBlocks::seq_id)
      .def_readonly("request_id", &AwaitedBlocks::request_id)
      .def_readonly("client_index", &AwaitedBlocks::client_index)
      .def_readonly("source", &AwaitedBlocks::source)
      .def_readonly("first_block", &AwaitedBlocks::first_block)
      .def_property_readonly("blocks", [](const AwaitedBlocks& self) { return to_array(self.blocks); });

  py::class_<Scheduler>(m, "Scheduler", py::is_final(),
                        "Queues waiting, prompted and running; who computes what next; who owns which block.")
      .def(py::init<const SchedulerConfig&>(), "config"_a)
      .def(
          "add_seq",
          [](Scheduler& self, const std::string& request_id, const TokenIds& prompt_token_ids,
             const SamplingOptions& options, int64_t priority, const std::string& cache_salt, int32_t client_index,
             const std::vector<std::pair<int64_t, int64_t>>& media_spans, bool keeps_media_whole) {
            std::vector<TokenSpan> spans;
            for (const auto& [begin, end] : media_spans) spans.push_back({begin, end});
            return self.add_seq(request_id, to_vector(prompt_token_ids), options, priority, cache_salt, client_index,
                                std::move(spans), keeps_media_whole);
          },
          "request_id"_a, "prompt_token_ids"_a, "options"_a, py::kw_only(), "priority"_a = 0, "cache_salt"_a = "",
          "client_index"_a = 0, "media_spans"_a = std::vector<std::pair<int64_t, int64_t>>(),
          "keeps_media_whole"_a = false)
      .def(
          "add_prompted_seq",
          [](Scheduler& self, const std::string& request_id, const TokenIds& prompt_token_ids,
             const PromptedSequence& prompted, const SamplingOptions& options, int64_t priority,
             const std::string& cache_salt, int32_t client_index) {
            return self.add_prompted_seq(request_id, to_vector(prompt_token_ids), prompted, options, priority,
                                         cache_salt, client_index);
          },
          "request_id"_a, "prompt_token_ids"_a, "prompted"_a, "options"_a, py::kw_only(), "priority"_a = 0,
          "cache_salt"_a = "", "client_index"_a = 0)
      .def("take_awaited", &Scheduler::take_awaited)
      .def("awaits_blocks", &Scheduler::awaits_blocks, "seq_id"_a)
      .def("blocks_arrived", &Scheduler::blocks_arrived, "seq_id"_a, "num_blocks"_a)
      .def(
          "prompted_blocks",
          [](const Scheduler& self, const std::string& request_id) {
            return to_array(self.prompted_blocks(request_id));
          },
          "request_id"_a)
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
          [](Scheduler& self, const std::shared_ptr<SequenceMetadataPool>& pool, double draft_threshold) {
            std::shared_ptr<ScheduledBatch> batch;
            {
              const py::gil_scoped_release release;
              batch = self.schedule(pool, draft_threshold);
            }
            return std::pair(BoundMetadataList{batch}, batch);
          },
          "pool"_a, py::kw_only(), "draft_threshold"_a = 0.0)
      .def(
          "process_outputs",
          [](Scheduler& self, ScheduledBatch& outputs, const TokenIds& token_ids, const TokenIds& num_tokens,
             const std::optional<TokenIds>& drafts, const BoundStepLogprobs* logprobs) {
            const StepTokens tokens = step_tokens(self, token_ids, num_tokens, drafts);
            const StepLogprobs step_logprobs = logprobs == nullptr ? StepLogprobs() : logprobs->logprobs;
            const py::gil_scoped_release release;
            self.process_outputs(outputs, tokens, step_logprobs);
          },
          "outputs"_a, "token_ids"_a, "num_tokens"_a, py::kw_only(), "drafts"_a = py::none(), "logprobs"_a = nullptr)
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
      .def_property_readonly("acceptance_rates",
                             [](const Scheduler& self) { return to_array(self.acceptance_rates()); })
      .def_property_readonly("num_drafts", &Scheduler::num_drafts)
      .def_property_readonly("num_draft_tokens", &Scheduler::num_draft_tokens)
      .def_property_readonly("num_accepted_draft_tokens", &Scheduler::num_accepted_draft_tokens)
      .def_property_readonly("num_accepted_by_position",
                             [](const Scheduler& self) { return to_array(self.num_accepted_by_position()); })
      .def("check_invariants", &Scheduler::check_invariants, ReleaseGil());
}

}  // namespace deepinfer
