#include "engine/sequence.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace deepinfer {
namespace {

bool contains(const std::vector<int32_t>& values, int32_t value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_token_ids(const char* name, const std::vector<int32_t>& token_ids) {
  for (const int32_t token_id : token_ids) {
    if (token_id < 0) refuse(std::string(name) + ": must be 0 or more, got " + std::to_string(token_id));
  }
}

}  // namespace

void SamplingOptions::validate() const {
  if (max_tokens < 1) refuse("max_tokens: must be 1 or more, got " + std::to_string(max_tokens));
  if (min_tokens < 0 || min_tokens > max_tokens) {
    refuse("min_tokens: must be 0 to max_tokens (" + std::to_string(max_tokens) + "), got " +
           std::to_string(min_tokens));
  }
  check_token_ids("eos_token_ids", eos_token_ids);
  check_token_ids("stop_token_ids", stop_token_ids);
  if (!std::isfinite(temperature) || temperature < 0) {
    refuse("temperature: must be 0 or more, got " + std::to_string(temperature));
  }
  if (top_k < 0) refuse("top_k: must be 0 (off) or more, got " + std::to_string(top_k));
  if (!(top_p > 0 && top_p <= 1)) refuse("top_p: must be above 0 and at most 1, got " + std::to_string(top_p));
  if (!(min_p >= 0 && min_p <= 1)) refuse("min_p: must be 0 to 1, got " + std::to_string(min_p));
  if (n < 1) refuse("n: must be 1 or more, got " + std::to_string(n));
  if (num_logprobs < -1) refuse("num_logprobs: must be -1 (off) or more, got " + std::to_string(num_logprobs));
  if (media_id < 0) refuse("media_id: must be 0 (none) or more, got " + std::to_string(media_id));
  if (lora_id < 0) refuse("lora_id: must be 0 (none) or more, got " + std::to_string(lora_id));
  if (is_beam && n > 1) refuse("n: must be 1 for a beam, got " + std::to_string(n));
}

bool SamplingOptions::is_end_token(int32_t token_id) const {
  return (!ignore_eos && contains(eos_token_ids, token_id)) || contains(stop_token_ids, token_id);
}

FinishReason Sequence::finish_reason() const {
  switch (status) {
    case SequenceStatus::kFinishedStopped:
      return FinishReason::kStop;
    case SequenceStatus::kFinishedLength:
      return FinishReason::kLength;
    case SequenceStatus::kFinishedAborted:
      return FinishReason::kAbort;
    case SequenceStatus::kFinishedError:
      return FinishReason::kError;
    case SequenceStatus::kWaiting:
    case SequenceStatus::kPrompted:
    case SequenceStatus::kRunning:
      return FinishReason::kNone;
  }
  throw std::logic_error("a sequence has no known status");
}

bool Sequence::can_decode(int64_t max_seq_len) const {
  if (options.is_beam && (is_held || num_inflight_steps > 0)) return false;
  return !ends_by_length_in_flight(max_seq_len);
}

bool Sequence::ends_by_length_in_flight(int64_t max_seq_len) const {
  const int64_t num_tokens = num_tokens_with_inflight();
  return num_tokens - num_prompt_tokens >= options.max_tokens || num_tokens >= max_seq_len;
}

void Sequence::append_token(int32_t token_id, int64_t max_seq_len) {
  if (is_finished()) throw std::logic_error("a finished sequence got a token");
  tokens.push_back(token_id);
  if (num_outputs() > options.min_tokens && options.is_end_token(token_id)) {
    status = SequenceStatus::kFinishedStopped;
    stop_token_id = token_id;
  } else if (num_outputs() >= options.max_tokens || num_tokens() >= max_seq_len) {
    status = SequenceStatus::kFinishedLength;
  }
}

}  // namespace deepinfer
