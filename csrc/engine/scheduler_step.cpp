// The Scheduler's choice of a step: who computes what, in which blocks.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "engine/scheduler.hpp"

namespace deepinfer {
namespace {

// Free blocks that an admission leaves over, in percent of all: without them the next decode step would have to preempt
// what was just admitted.
constexpr int kWatermarkPercent = 1;

}  // namespace

std::shared_ptr<ScheduledBatch> Scheduler::schedule(const std::shared_ptr<SequenceMetadataPool>& pool,
                                                    double draft_threshold) {
  if (!(draft_threshold >= 0)) {
    throw std::invalid_argument("draft_threshold: must be 0 or more, got " + std::to_string(draft_threshold));
  }
  check_may_schedule();
  free_finished_seqs();
  std::shared_ptr<ScheduledBatch> batch = spare_batch();
  const bool could_decode = others_could_decode_ = can_decode();
  batch->reset(pool, true, draft_threshold);
  if (is_prefill_attempt_due(could_decode)) {
    num_decodes_since_attempt_ = 0;
    schedule_prefill(*batch);
    // Held ones may be waiting, outside, for the very sequence that finds no room beside them.
    while (batch->is_empty() && !could_decode && launched_.empty() && preempt_held(*batch)) schedule_prefill(*batch);
  }
  if (!batch->is_empty()) {
    last_step_was_prefill_ = true;
    if (could_decode) ++num_consecutive_prefills_;
  } else {
    batch->reset(pool, false, draft_threshold);
    if (!config_.is_prompt_engine) schedule_decode(*batch);
    if (!batch->is_empty()) {
      last_step_was_prefill_ = false;
      num_consecutive_prefills_ = 0;
      ++num_decodes_since_attempt_;
    }
  }
  if (batch->is_empty()) {
    batch->end();
  } else {
    launched_.push_back(batch);
  }
  return batch;
}

void Scheduler::check_may_schedule() const {
  if (launched_.size() > 1) throw std::logic_error("schedule() with more than one step in flight");
  if (!launched_.empty() && launched_.front()->is_prefill) {
    throw std::logic_error("schedule() with a prefill step in flight; it must be processed first");
  }
}

bool Scheduler::can_decode() const {
  if (config_.is_prompt_engine) return false;
  const auto is_open = [this](const Sequence* sequence) { return sequence->can_decode(max_seq_len_); };
  return std::any_of(running_.begin(), running_.end(), is_open) ||
         std::any_of(prompted_.begin(), prompted_.end(), is_open);
}

std::vector<double> Scheduler::acceptance_rates() const {
  std::vector<double> rates;
  for (const Queue* queue : {&prompted_, &running_}) {
    for (const Sequence* sequence : *queue) {
      if (sequence->can_decode(max_seq_len_)) rates.push_back(sequence->acceptance_rate.rate());
    }
  }
  return rates;
}

bool Scheduler::is_prefill_attempt_due(bool could_decode) const {
  if (num_waiting() == 0) return false;
  if (!could_decode) return true;
  // A prefill that admitted something is followed up until its turn is over; one that did not waits for the next.
  const bool in_turn = last_step_was_prefill_ || num_decodes_since_attempt_ >= config_.prefill_attempt_interval;
  return in_turn && num_consecutive_prefills_ < config_.max_consecutive_prefills;
}

void Scheduler::schedule_prefill(ScheduledBatch& batch) {
  auto started = prefilling_.begin();
  bool admitting = true;
  while (fits_in_step(batch)) {
    Sequence* next = started == prefilling_.end() ? nullptr : *started;
    Sequence* head = admitting ? waiting_head() : nullptr;
    if (head != nullptr && (next == nullptr || ServedBefore()(head, next))) {
      // When the head does not fit nobody behind it is admitted, but what was begun goes on: it needs no memory, and it
      // must end before the head can fit.
      admitting = fits_in_step(batch, *head) && admit(*head, batch);
    } else if (next != nullptr) {
      ++started;
      if (!next->awaits_blocks && fits_in_step(batch, *next)) add_chunk(*next, batch);
    } else {
      break;
    }
  }
}

bool Scheduler::fits_in_memory(const Admission& admission) const {
  int watermark = 0;
  if (blocks_.num_used_blocks() > 0) watermark = std::max(1, blocks_.num_blocks() / 100 * kWatermarkPercent);
  return admission.num_free_blocks + watermark <= blocks_.num_free_blocks();
}

bool Scheduler::fits_in_step(const ScheduledBatch& batch) const {
  return batch.num_tokens() < config_.max_num_batched_tokens && batch.num_seqs() < config_.max_num_seqs;
}

bool Scheduler::fits_in_step(const ScheduledBatch& batch, const Sequence& sequence) const {
  return !sequence.wants_prompt_logprobs() || batch.num_prompt_logits() < config_.max_num_extra_logits;
}

Sequence* Scheduler::waiting_head() const {
  const auto is_free = [](const Sequence* sequence) { return !sequence->is_held; };
  const auto head = std::find_if(waiting_.begin(), waiting_.end(), is_free);
  return head == waiting_.end() ? nullptr : *head;
}

bool Scheduler::admit(Sequence& sequence, ScheduledBatch& batch) {
  // Preempted with a token in flight: until that is here, nobody knows what there is to compute.
  if (sequence.num_inflight_steps > 0) return false;
  if (num_holding_blocks() >= static_cast<size_t>(config_.max_num_seqs)) return false;
  // A token that is found in the cache is not computed, and what is not computed has no logits.
  const bool may_reuse = !sequence.wants_prompt_logprobs();
  const Admission admission = blocks_.plan(sequence.block_table, sequence.tokens, sequence.cache_salt, may_reuse);
  if (!fits_in_memory(admission)) return false;
  blocks_.allocate(sequence.block_table, sequence.tokens, admission);
  move(sequence, waiting_, prefilling_);
  take_slot(sequence);
  sequence.num_tokens_behind = 0;
  sequence.num_computed_tokens = int64_t{admission.num_cached_blocks} * blocks_.block_size();
  if (sequence.first_scheduled_time_ns == 0) sequence.first_scheduled_time_ns = now_ns();
  // Counted once: a recomputed sequence finds its own blocks again, which is not what the count is for.
  if (sequence.num_cached_tokens < 0) {
    sequence.num_cached_tokens = sequence.num_computed_tokens;
    batch.num_cached_tokens += sequence.num_computed_tokens;
    num_cached_tokens_ += sequence.num_computed_tokens;
  }
  if (sequence.awaits_blocks) {
    await_blocks(sequence);
  } else {
    add_chunk(sequence, batch);
  }
  return true;
}

void Scheduler::await_blocks(const Sequence& sequence) {
  const std::vector<int32_t>& blocks = sequence.block_table.blocks;
  const int64_t first_block = sequence.num_computed_tokens / blocks_.block_size();
  const int64_t end_block = blocks_.num_blocks_for(sequence.num_prompt_tokens);
  awaited_.push_back({sequence.seq_id,
                      sequence.request_id,
                      sequence.client_index,
                      sequence.block_source,
                      first_block,
                      {blocks.begin() + first_block, blocks.begin() + end_block}});
}

void Scheduler::add_chunk(Sequence& sequence, ScheduledBatch& batch) {
  const int64_t begin = sequence.num_computed_tokens;
  int64_t budget = config_.max_num_batched_tokens - batch.num_tokens();
  if (sequence.wants_prompt_logprobs()) {
    budget = std::min(budget, config_.max_num_extra_logits - batch.num_prompt_logits());
  }
  const int64_t end = end_by_media(sequence, begin, std::min(sequence.num_tokens(), begin + budget), batch);
  if (end == begin) return;
  launch(sequence, begin, end, 0, batch);
  if (end == sequence.num_tokens()) {
    move(sequence, prefilling_, prompted_);
    sequence.status = SequenceStatus::kPrompted;
  }
}

int64_t Scheduler::end_by_media(const Sequence& sequence, int64_t begin, int64_t end, ScheduledBatch& batch) const {
  for (const TokenSpan& span : sequence.media_spans) {
    if (span.end <= begin) continue;
    if (span.begin >= end) break;
    const bool must_wait = others_could_decode_ && batch.num_media_spans > 0;
    const bool is_cut = sequence.keeps_media_whole && span.end > end;
    if (must_wait || is_cut) return std::max(begin, span.begin);
    ++batch.num_media_spans;
  }
  return end;
}

void Scheduler::schedule_decode(ScheduledBatch& batch) {
  while (!prompted_.empty()) {
    Sequence& sequence = **prompted_.begin();
    move(sequence, prompted_, running_);
    sequence.status = SequenceStatus::kRunning;
  }
  // Everybody's own token comes before anybody's drafts, in the step and in memory.
  decoding_.clear();
  for (auto next = running_.begin(); next != running_.end(); ++next) {
    Sequence& sequence = **next;
    if (!sequence.can_decode(max_seq_len_)) continue;
    if (static_cast<int64_t>(decoding_.size()) == config_.max_num_batched_tokens) break;
    // It can only have preempted itself, as the last of all: nobody comes after it.
    if (!reserve_for_decode(sequence, batch)) break;
    decoding_.push_back(&sequence);
  }
  int64_t draft_budget =
      std::min(config_.max_num_batched_tokens - static_cast<int64_t>(decoding_.size()), config_.max_num_extra_logits);
  for (Sequence* sequence : decoding_) {
    const int32_t num_drafts = reserve_for_drafts(*sequence, draft_budget, batch);
    draft_budget -= num_drafts;
    launch(*sequence, sequence->decode_begin(), sequence->decode_begin() + 1, num_drafts, batch);
  }
}

bool Scheduler::reserve_for_decode(Sequence& sequence, ScheduledBatch& batch) {
  const int64_t begin = sequence.decode_begin();
  const int64_t end = sequence.max_decode_begin() + 1;
  // Asked anew after each victim: it may have been the one that a block was shared with.
  while (blocks_.num_blocks_to_write(sequence.block_table, begin, end) > blocks_.num_free_blocks()) {
    Sequence* victim = *running_.rbegin();
    const auto may_be_preempted = [](const Sequence* each) { return !each->awaits_blocks; };
    const auto last = std::find_if(prefilling_.rbegin(), prefilling_.rend(), may_be_preempted);
    if (last != prefilling_.rend() && ServedBefore()(victim, *last)) victim = *last;
    preempt(*victim);
    ++batch.num_preempted;
    if (victim == &sequence) return false;
  }
  blocks_.make_writable(sequence.block_table, begin, end, batch.block_copies);
  return true;
}

int32_t Scheduler::reserve_for_drafts(Sequence& sequence, int64_t budget, ScheduledBatch& batch) {
  // A beam's next token is not what it samples; and what a slot holds that no step has filled was left by another.
  if (sequence.options.is_beam || !sequence.is_slot_filled) return 0;
  int32_t num_drafts = sequence.acceptance_rate.num_drafts(batch.draft_threshold, sequence.num_proposed);
  if (num_drafts == 0) return 0;
  // A step gives one token more than it has drafts. None of them may be certain to be cut off; nor may one lie beyond
  // the last position, should the step in flight have accepted all of its drafts.
  const int64_t num_outputs = sequence.num_tokens_with_inflight() - sequence.num_prompt_tokens;
  const int64_t begin = sequence.max_decode_begin() + 1;
  const int64_t room = std::min(sequence.options.max_tokens - num_outputs, max_seq_len_ - begin) - 1;
  num_drafts = static_cast<int32_t>(std::clamp<int64_t>(std::min(room, budget), 0, num_drafts));
  while (num_drafts > 0 &&
         blocks_.num_blocks_to_write(sequence.block_table, begin, begin + num_drafts) > blocks_.num_free_blocks()) {
    --num_drafts;
  }
  if (num_drafts > 0) blocks_.make_writable(sequence.block_table, begin, begin + num_drafts, batch.block_copies);
  return num_drafts;
}

Proposal Scheduler::reserve_for_proposal(Sequence& sequence, int64_t max_next_position, ScheduledBatch& batch) {
  const int32_t num_speculative_tokens = config_.num_speculative_tokens;
  const int32_t num_drafts = sequence.acceptance_rate.num_drafts(batch.draft_threshold, num_speculative_tokens);
  if (config_.num_lookahead_tokens == 0) return {num_speculative_tokens, 0};
  if (num_drafts == 0 || sequence.options.is_beam || sequence.num_tokens_behind > config_.max_tokens_behind)
    return {0, 0};
  const int64_t end = std::min(max_next_position + config_.num_lookahead_tokens, max_seq_len_);
  if (max_next_position >= end ||
      blocks_.num_blocks_to_write(sequence.block_table, max_next_position, end) > blocks_.num_free_blocks()) {
    return {0, 0};
  }
  blocks_.make_writable(sequence.block_table, max_next_position, end, batch.block_copies);
  // The token before the last one too: if the last step's drafts were all right, the drafter has not computed it.
  return {num_drafts, static_cast<int32_t>(sequence.num_tokens_behind + 2)};
}

void Scheduler::launch(Sequence& sequence, int64_t begin, int64_t end, int32_t num_drafts, ScheduledBatch& batch) {
  const bool samples = end == sequence.num_tokens_with_inflight();
  Proposal proposal;
  if (samples && config_.num_speculative_tokens > 0) {
    const int64_t max_next_position = end + sequence.num_inflight_drafts + num_drafts;
    proposal = reserve_for_proposal(sequence, max_next_position, batch);
    // There may be no more tokens than that.
    proposal.query_len = static_cast<int32_t>(std::min<int64_t>(proposal.query_len, end + 1));
  }
  batch.add_row(sequence, begin, end, num_drafts, proposal);
  sequence.num_computed_tokens = end;
  ++sequence.num_inflight_steps;
  sequence.num_inflight_drafts += num_drafts;
  if (samples) {
    sequence.is_slot_filled = true;
    sequence.num_proposed = proposal.num_drafts;
    sequence.num_tokens_behind = proposal.query_len > 0 ? 0 : sequence.num_tokens_behind + 1 + num_drafts;
    ++sequence.num_inflight_tokens;
  }
}

// Its blocks may be given out at once, even if a step in flight still reads and writes them: the device runs steps in
// the order of their launch, so whoever gets a block writes it only after that step.
void Scheduler::preempt(Sequence& victim) {
  move(victim, queue_of(victim), waiting_);
  blocks_.free(victim.block_table);
  give_back_slot(victim);
  victim.num_computed_tokens = 0;
  victim.status = SequenceStatus::kWaiting;
  ++victim.num_preemptions;
  ++num_preemptions_;
}

bool Scheduler::preempt_held(ScheduledBatch& batch) {
  if (config_.is_prompt_engine || waiting_head() == nullptr) return false;
  // Nothing can decode and nothing is in flight, so all that stand here are held.
  Sequence* victim = nullptr;
  for (const Queue* queue : {&prompted_, &running_}) {
    if (queue->empty()) continue;
    if (victim == nullptr || ServedBefore()(victim, *queue->rbegin())) victim = *queue->rbegin();
  }
  if (victim == nullptr) return false;
  preempt(*victim);
  ++batch.num_preempted;
  return true;
}

std::shared_ptr<ScheduledBatch> Scheduler::spare_batch() {
  for (const auto& batch : batches_) {
    if (batch.use_count() == 1) return batch;
  }
  return batches_.emplace_back(std::make_shared<ScheduledBatch>(blocks_.block_size(), config_.num_speculative_tokens));
}

}  // namespace deepinfer
