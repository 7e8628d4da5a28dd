// One line of tokens: what is known of it, what is computed, and why it ended.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/acceptance_rate.hpp"
#include "engine/block_manager.hpp"

namespace deepinfer {

constexpr int32_t kNoSlot = -1;

enum class FinishReason : uint8_t { kNone, kStop, kLength, kAbort, kError };

// What the core needs to know of a request's sampling parameters. Throws std::invalid_argument if out of range.
struct SamplingOptions {
  int64_t max_tokens = 1;
  int64_t min_tokens = 0;  // an eos or stop token ends a sequence only after this many other tokens
  std::vector<int32_t> eos_token_ids;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  float temperature = 0.0f;  // 0: greedy
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;
  float min_p = 0.0f;            // 0: off
  uint64_t seed = 0;             // of the first sequence; the i-th samples with seed + i
  int32_t n = 1;                 // sequences; all but the first are forked when the prompt is computed
  int32_t num_logprobs = -1;     // per output token, besides its own; -1: not even that
  bool prompt_logprobs = false;  // the steps that compute the prompt give logits for each of its tokens
  bool is_tracked = false;       // the Worker keeps a state for each of its sequences
  bool is_beam = false;          // its tokens are not sampled but appended from outside, by `append_token`
  int32_t lora_id = 0;           // the adapter it is computed with; 0: none
  int64_t media_id = 0;          // the images and videos in its prompt; 0: none

  void validate() const;
  [[nodiscard]] bool is_end_token(int32_t token_id) const;
};

// Tokens [begin, end) of a sequence.
struct TokenSpan {
  int64_t begin;
  int64_t end;
};

enum class SequenceStatus : uint8_t {
  kWaiting,   // some known token is not computed; may hold blocks (between two chunks) or not
  kPrompted,  // prefill launched to its end, never in a decode step since
  kRunning,   // in decode steps
  kFinishedStopped,
  kFinishedLength,
  kFinishedAborted,
  kFinishedError,
};

// Owns its tokens and counts; the Scheduler changes them, the BlockManager fills its block table.
//
//   0 ............ num_computed_tokens ...... n = tokens.size() ...... n + num_inflight_tokens
//   K and V written by launched steps | known, to compute | sampled by a launched step, not yet seen
//
// 1. A launched step counts as one token, however many drafts it verifies, until it is processed and they are known:
//    these counts are the least; the truth, which the device knows, is up to num_inflight_drafts more.
// 2. num_computed_tokens <= n + num_inflight_tokens, and its blocks hold at least that many tokens and the drafts.
// 3. num_inflight_tokens <= num_inflight_steps: a launched step samples one unseen token, or none.
// 4. It stays in memory, and unless preempted keeps its blocks, until num_inflight_steps is 0.
// 5. It owns a slot of the device's state exactly while it is not finished and holds blocks.
// 6. Once finished it never changes status and gets no more tokens.
// 7. While it is held no step computes it: its next token comes from outside. While it awaits blocks neither does one,
//    and it keeps them: their content comes from outside.
struct Sequence {
  int64_t seq_id = 0;
  int32_t sequence_index = 0;  // which of its request's sequences
  std::string request_id;
  SamplingOptions options;
  std::string cache_salt;
  int32_t client_index = 0;             // who is told of its outputs
  double service_rank = 0;              // lower goes first, then
  uint64_t arrival = 0;                 // lower goes first
  int32_t num_forks_due = 0;            // sequences to fork from it once its prompt is computed
  int64_t first_scheduled_time_ns = 0;  // of std::chrono::steady_clock; 0: not yet

  // Prompt, then the outputs that the host knows. A negative one stands for a place in an image or a video, whose
  // content it names to the prefix cache; the device is given 0 there.
  std::vector<int32_t> tokens;
  std::vector<TokenSpan> media_spans;  // of the prompt, in order: what is costly to compute, one after another
  bool keeps_media_whole = false;      // no chunk ends within one of them
  int64_t num_prompt_tokens = 0;
  int64_t num_computed_tokens = 0;
  int32_t num_inflight_tokens = 0;
  int32_t num_inflight_steps = 0;   // launched steps it has a part in that were not processed
  int32_t num_inflight_drafts = 0;  // that those steps verify
  int32_t slot = kNoSlot;           // of the device's state
  bool is_slot_filled = false;      // by a launched step that samples for this sequence
  int32_t num_proposed = 0;         // drafts that this step proposes for what follows, at most
  int64_t num_tokens_behind = 0;    // its last tokens without the drafter's keys and values, at most
  int32_t num_preemptions = 0;
  bool is_held = false;
  bool awaits_blocks = false;
  int32_t block_source = 0;        // from whom
  int64_t num_cached_tokens = -1;  // prompt tokens found in the prefix cache; -1 before its first admission
  BlockTable block_table;

  std::vector<int32_t> drafts;  // what its last processed step proposed for the tokens after its own, -1 behind them
  AcceptanceRate acceptance_rate;
  int64_t num_draft_tokens = 0;           // proposed to the model, and
  int64_t num_accepted_draft_tokens = 0;  // became outputs

  SequenceStatus status = SequenceStatus::kWaiting;
  int32_t stop_token_id = -1;

  [[nodiscard]] int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  [[nodiscard]] int64_t num_tokens_with_inflight() const { return num_tokens() + num_inflight_tokens; }
  [[nodiscard]] int64_t num_outputs() const { return num_tokens() - num_prompt_tokens; }
  [[nodiscard]] bool wants_prompt_logprobs() const { return options.prompt_logprobs && num_outputs() == 0; }
  [[nodiscard]] bool is_finished() const { return status >= SequenceStatus::kFinishedStopped; }
  [[nodiscard]] FinishReason finish_reason() const;

  // Whether a decode step may compute it now, memory aside.
  [[nodiscard]] bool can_decode(int64_t max_seq_len) const;
  // Whether the tokens in flight certainly end it, whatever they are.
  [[nodiscard]] bool ends_by_length_in_flight(int64_t max_seq_len) const;
  // Appends one token and applies the stop conditions: end tokens first, then length.
  void append_token(int32_t token_id, int64_t max_seq_len);

  // The position of the token that the next decode step computes: at least this, at most that. When the step before
  // gave none, it is computed again.
  [[nodiscard]] int64_t decode_begin() const { return num_tokens_with_inflight() - 1; }
  [[nodiscard]] int64_t max_decode_begin() const { return decode_begin() + num_inflight_drafts; }
};

}  // namespace deepinfer
