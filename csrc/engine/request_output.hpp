// What comes out of a step: one object per new token, in a pool, or packed for another process.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engine/handle_pool.hpp"
#include "engine/sequence.hpp"

namespace deepinfer {

struct TokenLogprob {
  int32_t token_id;
  float logprob;
};

// One new token of one sequence, or (token_id = -1) the news that it ended without one.
struct RequestOutput {
  std::string request_id;
  int32_t client_index = 0;
  int64_t seq_id = 0;
  int32_t sequence_index = 0;
  int64_t output_index = 0;  // position among the sequence's outputs, from 0
  int32_t token_id = -1;
  bool finished = false;
  FinishReason finish_reason = FinishReason::kNone;
  int32_t stop_token_id = -1;
  int64_t num_prompt_tokens = 0;
  int64_t num_cached_tokens = 0;
  int64_t first_scheduled_time_ns = 0;  // of std::chrono::steady_clock
  // Drafts of its sequence so far that were proposed and verified, and that became outputs, this one included.
  int64_t num_draft_tokens = 0;
  int64_t num_accepted_draft_tokens = 0;
  // The model's own log-probability of the token, its rank among all (1 is the likeliest), and the likeliest tokens,
  // best first; NaN, 0 and none unless the request asked for them.
  float logprob = std::numeric_limits<float>::quiet_NaN();
  int32_t rank = 0;
  std::vector<TokenLogprob> top_logprobs;
};

// A finished text that the scheduler did not see grow: a beam search puts it together from several sequences.
struct WrittenSequence {
  int32_t sequence_index = 0;
  std::vector<int32_t> token_ids;
  std::vector<float> logprobs;  // one per token
  FinishReason finish_reason = FinishReason::kStop;
  int32_t stop_token_id = -1;
};

using RequestOutputPool = HandlePool<RequestOutput>;

// The outputs behind `handles` in one buffer for each client that has any: magic, version, count, total size, then each
// output. Byte order is the machine's: all processes run on it. Throws NotFound if a handle is stale.
[[nodiscard]] std::map<int32_t, std::string> pack(const RequestOutputPool& pool, const uint64_t* handles,
                                                  size_t num_handles);

// The outputs in a buffer from `pack`. Throws std::invalid_argument unless it is whole and nothing follows it.
[[nodiscard]] std::vector<RequestOutput> unpack(std::string_view data);

}  // namespace deepinfer
