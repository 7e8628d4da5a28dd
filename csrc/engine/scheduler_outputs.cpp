// The second half of the Scheduler: what becomes of a launched step, and the recount of everything.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "engine/scheduler.hpp"

namespace deepinfer {
namespace {

void fill_output(RequestOutput& output, const Sequence& sequence, int64_t output_index, int32_t token_id) {
  output.request_id = sequence.request_id;
  output.client_index = sequence.client_index;
  output.seq_id = sequence.seq_id;
  output.sequence_index = sequence.sequence_index;
  output.output_index = output_index;
  output.token_id = token_id;
  output.finished = sequence.is_finished();
  output.finish_reason = sequence.finish_reason();
  output.stop_token_id = sequence.stop_token_id;
  output.num_prompt_tokens = sequence.num_prompt_tokens;
  output.num_cached_tokens = sequence.num_cached_tokens;
  output.first_scheduled_time_ns = sequence.first_scheduled_time_ns;
  output.num_draft_tokens = sequence.num_draft_tokens;
  output.num_accepted_draft_tokens = sequence.num_accepted_draft_tokens;
  output.logprob = std::numeric_limits<float>::quiet_NaN();
  output.rank = 0;
  output.top_logprobs.clear();
}

// Reads a step's logprobs once, from the first row to the last.
class LogprobsReader {
 public:
  explicit LogprobsReader(const StepLogprobs& logprobs) : logprobs_(logprobs) {}

  // Those of a row of logits that is not before the last one asked for; nothing if there are none.
  void fill(RequestOutput& output, int32_t logits_row, int32_t num_logprobs) {
    while (index_ < logprobs_.num_rows && logprobs_.rows[index_] < logits_row) ++index_;
    if (index_ == logprobs_.num_rows || logprobs_.rows[index_] != logits_row) return;
    output.logprob = logprobs_.logprobs[index_];
    output.rank = logprobs_.ranks[index_];
    const size_t num_top = std::min(logprobs_.num_top, static_cast<size_t>(num_logprobs));
    for (size_t i = index_ * logprobs_.num_top; i < index_ * logprobs_.num_top + num_top; ++i) {
      output.top_logprobs.push_back({logprobs_.top_token_ids[i], logprobs_.top_logprobs[i]});
    }
  }

 private:
  const StepLogprobs& logprobs_;
  size_t index_ = 0;
};

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("scheduler: " + what);
}

}  // namespace

void Scheduler::process_outputs(ScheduledBatch& batch, const StepTokens& tokens, const StepLogprobs& logprobs) {
  check_outputs(batch, tokens);
  check_logprobs(batch, logprobs);
  if (batch.is_empty()) return;
  take_front(batch);
  size_t sampled_index = 0;
  int32_t first_logits_row = 0;
  LogprobsReader logprobs_reader(logprobs);
  for (ScheduledBatch::Row& row : batch.rows) {
    Sequence& sequence = leave_step(row);
    if (!sequence.is_finished()) {
      // What this step wrote is now certain. A sequence preempted since then does not hold those blocks any more.
      if (sequence.num_preemptions == row.num_preemptions) {
        blocks_.cache_computed(sequence.block_table, sequence.tokens, sequence.cache_salt, row.num_computed_tokens);
      }
      if (row.samples) {
        const size_t num_outputs_before = batch.num_new_outputs;
        take_sampled(sequence, row, sampled_row(tokens, sampled_index), batch);
        if (sequence.options.num_logprobs >= 0) {
          for (size_t i = num_outputs_before; i < batch.num_new_outputs; ++i) {
            const auto logits_row = first_logits_row + static_cast<int32_t>(i - num_outputs_before);
            logprobs_reader.fill(batch.new_outputs[i], logits_row, sequence.options.num_logprobs);
          }
        }
      }
    }
    if (row.samples) {
      ++sampled_index;
      first_logits_row += 1 + row.num_drafts;
    }
  }
}

void Scheduler::check_logprobs(const ScheduledBatch& batch, const StepLogprobs& logprobs) {
  int64_t previous = -1;
  for (size_t i = 0; i < logprobs.num_rows; ++i) {
    const int64_t row = logprobs.rows[i];
    if (row <= previous || row >= batch.num_sampled_rows()) {
      throw std::invalid_argument("logprobs: rows must ascend and be below " +
                                  std::to_string(batch.num_sampled_rows()) + ", got " + std::to_string(row));
    }
    previous = row;
  }
}

void Scheduler::check_outputs(const ScheduledBatch& batch, const StepTokens& tokens) const {
  if (tokens.num_rows != static_cast<size_t>(batch.num_sampled())) {
    throw std::invalid_argument("token_ids: the step samples " + std::to_string(batch.num_sampled()) + " rows, got " +
                                std::to_string(tokens.num_rows));
  }
  if (batch.is_empty()) return;
  check_is_next(batch);
  size_t index = 0;
  for (const ScheduledBatch::Row& row : batch.rows) {
    if (!row.samples) continue;
    const SampledRow sampled = sampled_row(tokens, index);
    const auto refuse = [index](const std::string& what) {
      throw std::invalid_argument("row " + std::to_string(index) + ": " + what);
    };
    const auto max_num_tokens = std::min(tokens.width, size_t{1} + static_cast<size_t>(row.num_drafts));
    if (sampled.num_tokens < 0 || static_cast<size_t>(sampled.num_tokens) > max_num_tokens) {
      refuse("num_tokens must be 0 to " + std::to_string(max_num_tokens) + ", got " +
             std::to_string(sampled.num_tokens));
    }
    ++index;
    const Sequence& sequence = *row.sequence;
    if (sequence.is_finished() || sequence.options.is_beam) continue;
    if (sampled.num_tokens == 0 && sequence.num_inflight_steps > 1) {
      refuse("has no token, but the step after it builds on one");
    }
    for (int32_t i = 0; i < sampled.num_tokens; ++i) {
      const int32_t token_id = sampled.token_ids[i];
      if (token_id < 0) refuse("token id " + std::to_string(token_id) + " is negative");
      const bool is_last = i + 1 == sampled.num_tokens;
      if (!is_last && (static_cast<size_t>(i) >= sequence.drafts.size() || sequence.drafts[i] != token_id)) {
        refuse("token " + std::to_string(i) + " cannot be an accepted draft: it was not proposed");
      }
    }
  }
}

void Scheduler::check_is_next(const ScheduledBatch& batch) const {
  if (launched_.empty() || launched_.front().get() != &batch) {
    throw std::invalid_argument("the step was processed already, or an earlier one was not");
  }
}

void Scheduler::take_front(ScheduledBatch& batch) {
  launched_.erase(launched_.begin());
  batch.state = BatchState::kProcessed;
}

Sequence& Scheduler::leave_step(ScheduledBatch::Row& row) {
  Sequence& sequence = *std::exchange(row.sequence, nullptr);
  --sequence.num_inflight_steps;
  sequence.num_inflight_drafts -= row.num_drafts;
  if (row.samples) --sequence.num_inflight_tokens;
  return sequence;
}

Scheduler::SampledRow Scheduler::sampled_row(const StepTokens& tokens, size_t index) const {
  const int32_t* drafts = tokens.drafts;
  if (drafts != nullptr) drafts += index * static_cast<size_t>(config_.num_speculative_tokens);
  return {tokens.token_ids + index * tokens.width, tokens.num_tokens[index], drafts};
}

void Scheduler::take_sampled(Sequence& sequence, const ScheduledBatch::Row& row, const SampledRow& sampled,
                             ScheduledBatch& batch) {
  if (sequence.options.is_beam) {
    sequence.is_held = true;
    return;
  }
  // Before it has an output of its own: each of them samples its first token itself.
  fork_due_seqs(sequence);
  // The device took the row for one that gave a token: what it holds of the sequence is wrong.
  if (sampled.num_tokens == 0) sequence.is_slot_filled = false;
  Queue& queue = queue_of(sequence);
  judge_drafts(sequence, row, sampled);
  const int32_t num_accepted = append_sampled(sequence, sampled, batch);
  if (num_accepted > 0 && sequence.num_preemptions == row.num_preemptions) {
    sequence.num_computed_tokens += num_accepted;
    blocks_.cache_computed(sequence.block_table, sequence.tokens, sequence.cache_salt,
                           row.num_computed_tokens + num_accepted);
  }
  sequence.drafts.clear();
  if (sampled.drafts != nullptr) {
    sequence.drafts.assign(sampled.drafts, sampled.drafts + config_.num_speculative_tokens);
  }
  if (sequence.is_finished()) retire(sequence, queue);
}

void Scheduler::judge_drafts(Sequence& sequence, const ScheduledBatch::Row& row, const SampledRow& sampled) {
  const std::vector<int32_t>& drafts = sequence.drafts;
  const auto verified_end =
      drafts.begin() + std::min<std::ptrdiff_t>(row.num_drafts, static_cast<std::ptrdiff_t>(drafts.size()));
  const auto is_none = [](int32_t draft) { return draft < 0; };
  const int64_t num_verified = std::find_if(drafts.begin(), verified_end, is_none) - drafts.begin();
  sequence.num_draft_tokens += num_verified;
  num_draft_tokens_ += num_verified;
  if (num_verified > 0) ++num_drafts_;
  // The token after those that were verified is there to be compared with too.
  const size_t num_tokens = std::min(static_cast<size_t>(sampled.num_tokens), drafts.size());
  const auto num_awaited = static_cast<size_t>(row.num_drafts);
  if (num_tokens > 0 && num_awaited == 0 && is_none(drafts[0])) sequence.acceptance_rate.take_nothing();
  for (size_t i = 0; i < num_tokens && (i < num_awaited || !is_none(drafts[i])); ++i) {
    const bool is_right = drafts[i] == sampled.token_ids[i];
    sequence.acceptance_rate.take(is_right);
    if (!is_right) break;
  }
}

int32_t Scheduler::append_sampled(Sequence& sequence, const SampledRow& sampled, ScheduledBatch& batch) {
  // All but the last are drafts that were accepted.
  int32_t num_accepted = 0;
  for (int32_t i = 0; i < sampled.num_tokens && !sequence.is_finished(); ++i) {
    const int64_t output_index = sequence.num_outputs();
    sequence.append_token(sampled.token_ids[i], max_seq_len_);
    if (i + 1 < sampled.num_tokens) {
      ++num_accepted;
      ++sequence.num_accepted_draft_tokens;
      ++num_accepted_by_position_[i];
    }
    fill_output(batch.add_output(), sequence, output_index, sampled.token_ids[i]);
  }
  num_accepted_draft_tokens_ += num_accepted;
  return num_accepted;
}

void Scheduler::fork_due_seqs(Sequence& parent) {
  const int32_t num_forks = std::exchange(parent.num_forks_due, 0);
  for (int32_t i = 1; i <= num_forks; ++i) {
    const int64_t child_id = add_fork(parent, parent.options.seed + static_cast<uint64_t>(i));
    if (parent.options.is_tracked) forks_.push_back({parent.seq_id, child_id});
  }
}

void Scheduler::build_request_outputs(ScheduledBatch& batch, RequestOutputPool& pool, std::vector<uint64_t>& handles) {
  if (batch.is_empty()) return;
  if (batch.state != BatchState::kProcessed) {
    throw std::invalid_argument("the step was not processed, or its outputs were built already");
  }
  for (size_t i = 0; i < batch.num_new_outputs; ++i) {
    handles.push_back(pool.acquire());
    std::swap(pool.get(handles.back()), batch.new_outputs[i]);
  }
  batch.num_new_outputs = 0;
  batch.end();
}

void Scheduler::build_sequence_outputs(int64_t seq_id, const WrittenSequence& text, RequestOutputPool& pool,
                                       std::vector<uint64_t>& handles) const {
  const auto found = sequences_.find(seq_id);
  if (found == sequences_.end()) throw NotFound("seq_id: there is no sequence " + std::to_string(seq_id));
  if (text.token_ids.empty() || text.logprobs.size() != text.token_ids.size()) {
    throw std::invalid_argument("token_ids: must have one entry at least, and logprobs as many");
  }
  for (size_t i = 0; i < text.token_ids.size(); ++i) {
    const bool is_last = i + 1 == text.token_ids.size();
    handles.push_back(pool.acquire());
    RequestOutput& output = pool.get(handles.back());
    fill_output(output, *found->second, static_cast<int64_t>(i), text.token_ids[i]);
    output.sequence_index = text.sequence_index;
    output.finished = is_last;
    output.finish_reason = is_last ? text.finish_reason : FinishReason::kNone;
    output.stop_token_id = is_last ? text.stop_token_id : -1;
    output.logprob = text.logprobs[i];
  }
}

void Scheduler::fail_step(ScheduledBatch& batch, RequestOutputPool& pool, std::vector<uint64_t>& handles) {
  if (batch.is_empty()) return;
  check_is_next(batch);
  take_front(batch);
  for (ScheduledBatch::Row& row : batch.rows) {
    Sequence& sequence = leave_step(row);
    if (sequence.is_finished()) continue;
    end_sequence(sequence, SequenceStatus::kFinishedError);
    fill_output(batch.add_output(), sequence, sequence.num_outputs(), -1);
  }
  build_request_outputs(batch, pool, handles);
}

void Scheduler::check_invariants() const {
  struct InFlight {
    int32_t num_steps = 0, num_tokens = 0, num_drafts = 0;
  };
  std::unordered_map<const Sequence*, InFlight> in_flight;
  expect(launched_.size() <= 2, "more than two steps are launched");
  for (const auto& batch : launched_) {
    for (const ScheduledBatch::Row& row : batch->rows) {
      InFlight& counts = in_flight[row.sequence];
      ++counts.num_steps;
      counts.num_drafts += row.num_drafts;
      if (row.samples) ++counts.num_tokens;
    }
  }
  const auto expect_queue = [this](const Queue& queue, const char* name, SequenceStatus status, bool holds_blocks) {
    for (const Sequence* sequence : queue) {
      const std::string who = "sequence " + std::to_string(sequence->seq_id) + " in " + name;
      expect(sequences_.count(sequence->seq_id) > 0, who + " does not exist");
      expect(sequence->status == status, who + " has another status");
      expect(sequence->block_table.blocks.empty() != holds_blocks, who + " has blocks, or has none");
    }
  };
  expect_queue(waiting_, "waiting", SequenceStatus::kWaiting, false);
  expect_queue(prefilling_, "prefilling", SequenceStatus::kWaiting, true);
  expect_queue(prompted_, "prompted", SequenceStatus::kPrompted, true);
  expect_queue(running_, "running", SequenceStatus::kRunning, true);
  expect(num_holding_blocks() <= static_cast<size_t>(config_.max_num_seqs), "too many sequences hold blocks");
  expect(sequences_.size() == num_unfinished_seqs() + finished_.size(), "a sequence is in no queue, or in two");
  for (const Sequence* sequence : finished_) expect(sequence->is_finished(), "an unfinished sequence is set aside");

  std::vector<const BlockTable*> tables;
  std::unordered_set<int32_t> slots(free_slots_.begin(), free_slots_.end());
  expect(slots.size() == free_slots_.size(), "a slot is free twice");
  size_t num_live = 0;
  for (const auto& [seq_id, sequence] : sequences_) {
    const std::string who = "sequence " + std::to_string(seq_id);
    tables.push_back(&sequence->block_table);
    const auto num_held = static_cast<int64_t>(sequence->block_table.blocks.size()) * blocks_.block_size();
    expect(sequence->num_computed_tokens <= num_held, who + " has computed tokens without a block");
    const InFlight counts = in_flight[sequence.get()];
    expect(counts.num_steps == sequence->num_inflight_steps, who + ": steps in flight do not add up");
    expect(counts.num_tokens == sequence->num_inflight_tokens, who + ": tokens in flight do not add up");
    expect(counts.num_drafts == sequence->num_inflight_drafts, who + ": drafts in flight do not add up");
    const bool owns_slot = !sequence->is_finished() && num_held > 0;
    expect(owns_slot == (sequence->slot != kNoSlot), who + " has blocks without a slot, or a slot without blocks");
    if (owns_slot) expect(slots.insert(sequence->slot).second, who + " shares its slot");
    if (sequence->is_finished()) continue;
    ++num_live;
    expect(num_held == 0 || sequence->num_computed_tokens + sequence->num_inflight_drafts <= num_held,
           who + " may write drafts without a block");
    expect(sequence->num_computed_tokens <= sequence->num_tokens_with_inflight(), who + " computed unknown tokens");
    expect(sequence->num_tokens() < max_seq_len_, who + " should have ended by length");
    expect(requests_.count(sequence->request_id) > 0, who + " belongs to no request");
  }
  size_t num_live_of_requests = 0;
  for (const auto& [request_id, request] : requests_) {
    expect(!request.live_seq_ids.empty(), "request '" + request_id + "' has no unfinished sequence");
    num_live_of_requests += request.live_seq_ids.size();
  }
  expect(num_live == num_live_of_requests, "requests and sequences do not add up");
  expect(num_live == num_unfinished_seqs(), "queues and sequences do not add up");
  expect(slots.size() == static_cast<size_t>(num_slots_) && num_slots_ <= config_.max_num_seqs,
         "free and owned slots do not add up");
  blocks_.check_invariants(tables);
}

}  // namespace deepinfer
