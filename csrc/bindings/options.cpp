// What a request and the scheduler are configured with.
#include <pybind11/native_enum.h>

#include <utility>

#include "bindings/bindings.hpp"
#include "engine/sequence.hpp"

namespace deepinfer {

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
                       bool is_tracked, bool is_beam, int32_t lora_id, int64_t media_id) {
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
                                     lora_id,
                                     media_id};
             options.validate();
             return options;
           }),
           py::kw_only(), "max_tokens"_a, "min_tokens"_a = 0, "eos_token_ids"_a = std::vector<int32_t>(),
           "stop_token_ids"_a = std::vector<int32_t>(), "ignore_eos"_a = false, "temperature"_a = 0.0f, "top_k"_a = 0,
           "top_p"_a = 1.0f, "min_p"_a = 0.0f, "seed"_a = 0, "n"_a = 1, "num_logprobs"_a = -1,
           "prompt_logprobs"_a = false, "is_tracked"_a = false, "is_beam"_a = false, "lora_id"_a = 0, "media_id"_a = 0);

  py::class_<SchedulerConfig>(m, "SchedulerConfig", py::is_final(), "Limits of the scheduler.")
      .def(py::init([](int64_t num_blocks, int64_t block_size, int64_t max_num_seqs, int64_t max_num_batched_tokens,
                       int64_t max_model_len, int64_t max_num_extra_logits, int32_t num_speculative_tokens,
                       int32_t num_lookahead_tokens, int64_t max_tokens_behind, bool enable_prefix_caching,
                       int64_t max_consecutive_prefills, int64_t prefill_attempt_interval, double priority_aging_s,
                       uint64_t hash_seed, bool is_prompt_engine) {
             SchedulerConfig config{num_blocks,
                                    block_size,
                                    max_num_seqs,
                                    max_num_batched_tokens,
                                    max_model_len,
                                    max_num_extra_logits,
                                    num_speculative_tokens,
                                    num_lookahead_tokens,
                                    max_tokens_behind,
                                    enable_prefix_caching,
                                    max_consecutive_prefills,
                                    prefill_attempt_interval,
                                    priority_aging_s,
                                    hash_seed,
                                    is_prompt_engine};
             config.validate();
             return config;
           }),
           py::kw_only(), "num_blocks"_a, "block_size"_a, "max_num_seqs"_a, "max_num_batched_tokens"_a,
           "max_model_len"_a, "max_num_extra_logits"_a = SchedulerConfig().max_num_extra_logits,
           "num_speculative_tokens"_a = SchedulerConfig().num_speculative_tokens,
           "num_lookahead_tokens"_a = SchedulerConfig().num_lookahead_tokens,
           "max_tokens_behind"_a = SchedulerConfig().max_tokens_behind,
           "enable_prefix_caching"_a = SchedulerConfig().enable_prefix_caching,
           "max_consecutive_prefills"_a = SchedulerConfig().max_consecutive_prefills,
           "prefill_attempt_interval"_a = SchedulerConfig().prefill_attempt_interval,
           "priority_aging_s"_a = SchedulerConfig().priority_aging_s, "hash_seed"_a = SchedulerConfig().hash_seed,
           "is_prompt_engine"_a = SchedulerConfig().is_prompt_engine);

  py::class_<PromptedSequence>(m, "PromptedSequence", py::is_final(), "What an engine that only prefills made of one.")
      .def(py::init(
               [](int32_t first_token_id, int32_t source, int64_t num_cached_tokens, int64_t first_scheduled_time_ns) {
                 return PromptedSequence{first_token_id, source, num_cached_tokens, first_scheduled_time_ns};
               }),
           py::kw_only(), "first_token_id"_a, "source"_a = 0, "num_cached_tokens"_a = 0,
           "first_scheduled_time_ns"_a = 0);
}

}  // namespace deepinfer
