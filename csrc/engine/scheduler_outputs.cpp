// The second half of the Scheduler: what becomes of a launched step, and the recount of everything.
#include <algorithm>
#include <limits>
#include <stdexcept>
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
  output.logprob = std::numeric_limits<float>::quiet_NaN();
  output.rank = 0;
  output.top_logprobs.clear();
}

void fill_logprobs(RequestOutput& output, const StepLogprobs& logprobs, size_t index, int32_t num_logprobs) {
  output.logprob = logprobs.logprobs[index];
  output.rank = logprobs.ranks[index];
  const size_t num_top = std::min(logprobs.num_top, static_cast<size_t>(num_logprobs));
  for (size_t i = index * logprobs.num_top; i < index * logprobs.num_top + num_top; ++i) {
    output.top_logprobs.push_back({logprobs.top_token_ids[i], logprobs.top_logprobs[i]});
  }
}

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("scheduler: " + what);
}

}  // namespace

void Scheduler::process_outputs(ScheduledBatch& batch, const int32_t* token_ids, size_t num_rows, size_t width,
                                const int32_t* num_tokens, const StepLogprobs& logprobs) {
  check_outputs(batch, token_ids, num_rows, width, num_tokens);
  check_logprobs(batch, num_tokens, logprobs);
  if (batch.is_empty()) return;
  take_front(batch);
  size_t sampled_row = 0;
  size_t logprobs_index = 0;
  for (ScheduledBatch::Row& row : batch.rows) {
    Sequence& sequence = *std::exchange(row.sequence, nullptr);
    --sequence.num_inflight_steps;
    if (row.samples) --sequence.num_inflight_tokens;
    if (!sequence.is_finished()) {
      // What this step wrote is now certain. A sequence preempted since then does not hold those blocks any more.
      if (sequence.num_preemptions == row.num_preemptions) {
        blocks_.cache_computed(sequence.block_table, sequence.tokens, sequence.cache_salt, row.num_computed_tokens);
      }
      if (row.samples) {
        const size_t num_outputs_before = batch.num_new_outputs;
        const bool has_logprobs =
            logprobs_index < logprobs.num_rows && static_cast<size_t>(logprobs.rows[logprobs_index]) == sampled_row;
        take_sampled(sequence, token_ids + sampled_row * width, num_tokens[sampled_row], batch);
        if (has_logprobs && sequence.options.num_logprobs >= 0 && batch.num_new_outputs > num_outputs_before) {
          fill_logprobs(batch.new_outputs[num_outputs_before], logprobs, logprobs_index, sequence.options.num_logprobs);
        }
      }
    }
    if (row.samples) {
      while (logprobs_index < logprobs.num_rows && static_cast<size_t>(logprobs.rows[logprobs_index]) <= sampled_row) {
        ++logprobs_index;
      }
      ++sampled_row;
    }
  }
}

void Scheduler::check_logprobs(const ScheduledBatch& batch, const int32_t* num_tokens, const StepLogprobs& logprobs) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument("logprobs: " + what); };
  int64_t previous = -1;
  for (size_t i = 0; i < logprobs.num_rows; ++i) {
    const int64_t row = logprobs.rows[i];
    if (row <= previous || row >= batch.num_sampled()) {
      refuse("rows must ascend and be below " + std::to_string(batch.num_sampled()) + ", got " + std::to_string(row));
    }
    if (num_tokens[row] != 1) {
      refuse("row " + std::to_string(row) + " has " + std::to_string(num_tokens[row]) + " tokens: must have one");
    }
    previous = row;
  }
}

void Scheduler::check_outputs(const ScheduledBatch& batch, const int32_t* token_ids, size_t num_rows, size_t width,
                              const int32_t* num_tokens) const {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (num_rows != static_cast<size_t>(batch.num_sampled())) {
    refuse("token_ids: the step samples " + std::to_string(batch.num_sampled()) + " rows, got " +
           std::to_string(num_rows));
  }
  if (batch.is_empty()) return;
  check_is_next(batch);
  // Every token must fit in the step that computes it.
  if (width > static_cast<size_t>(config_.max_num_batched_tokens)) {
    refuse("token_ids: " + std::to_string(width) + " tokens a row exceed max_num_batched_tokens");
  }
  size_t sampled_row = 0;
  for (const ScheduledBatch::Row& row : batch.rows) {
    if (!row.samples) continue;
    const int32_t num_new = num_tokens[sampled_row];
    const std::string name = "row " + std::to_string(sampled_row) + ": ";
    if (num_new < 0 || static_cast<size_t>(num_new) > width) {
      refuse(name + "num_tokens must be 0 to " + std::to_string(width) + ", got " + std::to_string(num_new));
    }
    if (!row.sequence->is_finished() && !row.sequence->options.is_beam) {
      if (num_new != 1 && row.sequence->num_inflight_steps > 1) {
        refuse(name + "has " + std::to_string(num_new) + " tokens, but the step after it builds on exactly one");
      }
      for (int32_t i = 0; i < num_new; ++i) {
        const int32_t token_id = token_ids[sampled_row * width + static_cast<size_t>(i)];
        if (token_id < 0) refuse(name + "token id " + std::to_string(token_id) + " is negative");
      }
    }
    ++sampled_row;
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

void Scheduler::take_sampled(Sequence& sequence, const int32_t* token_ids, int32_t num_tokens, ScheduledBatch& batch) {
  if (sequence.options.is_beam) {
    sequence.is_held = true;
    return;
  }
  // Before it has an output of its own: each of them samples its first token itself.
  fork_due_seqs(sequence);
  Queue& queue = queue_of(sequence);
  for (int32_t i = 0; i < num_tokens && !sequence.is_finished(); ++i) {
    const int64_t output_index = sequence.num_outputs();
    sequence.append_token(token_ids[i], max_seq_len_);
    fill_output(batch.add_output(), sequence, output_index, token_ids[i]);
  }
  if (sequence.is_finished()) retire(sequence, queue);
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
    Sequence& sequence = *std::exchange(row.sequence, nullptr);
    --sequence.num_inflight_steps;
    if (row.samples) --sequence.num_inflight_tokens;
    if (sequence.is_finished()) continue;
    end_sequence(sequence, SequenceStatus::kFinishedError);
    fill_output(batch.add_output(), sequence, sequence.num_outputs(), -1);
  }
  build_request_outputs(batch, pool, handles);
}

void Scheduler::check_invariants() const {
  std::unordered_map<const Sequence*, std::pair<int32_t, int32_t>> in_flight;  // steps, tokens
  expect(launched_.size() <= 2, "more than two steps are launched");
  for (const auto& batch : launched_) {
    for (const ScheduledBatch::Row& row : batch->rows) {
      ++in_flight[row.sequence].first;
      if (row.samples) ++in_flight[row.sequence].second;
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
  size_t num_live = 0;
  for (const auto& [seq_id, sequence] : sequences_) {
    const std::string who = "sequence " + std::to_string(seq_id);
    tables.push_back(&sequence->block_table);
    const auto num_held = static_cast<int64_t>(sequence->block_table.blocks.size()) * blocks_.block_size();
    expect(sequence->num_computed_tokens <= num_held, who + " has computed tokens without a block");
    expect(in_flight[sequence.get()].first == sequence->num_inflight_steps, who + ": steps in flight do not add up");
    expect(in_flight[sequence.get()].second == sequence->num_inflight_tokens, who + ": tokens in flight do not add up");
    if (sequence->is_finished()) continue;
    ++num_live;
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
  blocks_.check_invariants(tables);
}

}  // namespace deepinfer
