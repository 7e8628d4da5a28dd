#include "engine/scheduler.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

namespace deepinfer {
namespace {

// Free blocks that an admission leaves over, in percent of all: without them the next decode step would have to preempt
// what was just admitted.
constexpr int kWatermarkPercent = 1;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_range(const char* field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return;
  refuse(std::string(field) + ": must be " + std::to_string(min) + " to " + std::to_string(max) + ", got " +
         std::to_string(value));
}

constexpr double kNsPerSecond = 1e9;

int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

void SchedulerConfig::validate() const {
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  check_range("num_blocks", num_blocks, 1, kMaxInt32 - 1);
  check_range("block_size", block_size, 1, kMaxInt32);
  check_range("max_num_seqs", max_num_seqs, 1, kMaxInt32);
  check_range("max_num_batched_tokens", max_num_batched_tokens, 1, kMaxInt32);
  check_range("max_model_len", max_model_len, 2, kMaxInt32);
  check_range("max_num_prompt_logits", max_num_prompt_logits, 1, kMaxInt32);
  check_range("max_consecutive_prefills", max_consecutive_prefills, 1, kMaxInt32);
  check_range("prefill_attempt_interval", prefill_attempt_interval, 1, kMaxInt32);
  if (!(priority_aging_s >= 0 && std::isfinite(priority_aging_s))) {
    refuse("priority_aging_s: must be 0 (strict) or more, got " + std::to_string(priority_aging_s));
  }
  if (num_blocks * block_size < 2) {
    refuse("num_blocks: the cache must hold at least 2 tokens, " + std::to_string(num_blocks) + " blocks of " +
           std::to_string(block_size) + " hold fewer");
  }
}

bool Scheduler::ServedBefore::operator()(const Sequence* a, const Sequence* b) const {
  if (a->service_rank != b->service_rank) return a->service_rank < b->service_rank;
  if (a->arrival != b->arrival) return a->arrival < b->arrival;
  return a->seq_id < b->seq_id;
}

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_((config.validate(), config)),
      max_seq_len_(std::min(config.max_model_len, config.num_blocks * config.block_size)),
      blocks_(static_cast<int>(config.num_blocks), static_cast<int>(config.block_size), config.enable_prefix_caching,
              config.hash_seed) {}

// ---- a request comes, forks, goes ----

int64_t Scheduler::add_seq(const std::string& request_id, std::vector<int32_t> prompt_token_ids,
                           const SamplingOptions& options, int64_t priority, const std::string& cache_salt,
                           int32_t client_index) {
  if (prompt_token_ids.empty()) refuse("prompt_token_ids: the prompt is empty");
  const auto num_prompt_tokens = static_cast<int64_t>(prompt_token_ids.size());
  if (num_prompt_tokens > max_seq_len_ - 1) {
    const bool limited_by_model = max_seq_len_ == config_.max_model_len;
    refuse("prompt_token_ids: the prompt has " + std::to_string(num_prompt_tokens) + " tokens, at most " +
           std::to_string(max_seq_len_ - 1) + " leave room for an output " +
           (limited_by_model ? "within max_model_len" : "in the KV cache"));
  }
  if (requests_.count(request_id) > 0) refuse("request_id: '" + request_id + "' is that of an unfinished request");

  auto sequence = std::make_unique<Sequence>();
  sequence->seq_id = next_seq_id_++;
  sequence->request_id = request_id;
  sequence->options = options;
  sequence->cache_salt = cache_salt;
  sequence->client_index = client_index;
  sequence->service_rank = service_rank(priority);
  sequence->arrival = next_arrival_++;
  sequence->tokens = std::move(prompt_token_ids);
  sequence->num_prompt_tokens = num_prompt_tokens;
  sequence->num_forks_due = options.n - 1;
  const int64_t seq_id = sequence->seq_id;
  Request& request = requests_[request_id];
  request.client_index = client_index;
  request.live_seq_ids.push_back(seq_id);
  waiting_.insert(sequence.get());
  sequences_.emplace(seq_id, std::move(sequence));
  return seq_id;
}

// A moment that lies later the less urgent a request is: whatever waits long enough comes before all that is new.
double Scheduler::service_rank(int64_t priority) const {
  if (config_.priority_aging_s == 0) return static_cast<double>(priority);
  return static_cast<double>(now_ns()) / kNsPerSecond + static_cast<double>(priority) * config_.priority_aging_s;
}

int64_t Scheduler::fork_seq(int64_t seq_id, uint64_t seed) {
  const auto found = sequences_.find(seq_id);
  if (found == sequences_.end() || found->second->is_finished()) {
    throw NotFound("seq_id: there is no unfinished sequence " + std::to_string(seq_id));
  }
  const Sequence& parent = *found->second;
  if (parent.status == SequenceStatus::kWaiting && !parent.is_held) {
    refuse("seq_id: sequence " + std::to_string(seq_id) + " has not finished its prefill");
  }
  if (parent.num_inflight_steps > 0) {
    refuse("seq_id: sequence " + std::to_string(seq_id) + " has a step in flight");
  }
  return add_fork(parent, seed);
}

int64_t Scheduler::add_fork(const Sequence& parent, uint64_t seed) {
  Request& request = requests_.at(parent.request_id);
  auto child = std::make_unique<Sequence>(parent);
  child->seq_id = next_seq_id_++;
  child->sequence_index = request.num_seqs++;
  child->options.seed = seed;
  child->options.prompt_logprobs = false;
  child->num_forks_due = 0;
  if (parent.status != SequenceStatus::kWaiting && num_holding_blocks() < static_cast<size_t>(config_.max_num_seqs)) {
    child->block_table = blocks_.fork(parent.block_table);
  } else {
    child->block_table = BlockTable();
    child->num_computed_tokens = 0;
    child->status = SequenceStatus::kWaiting;
  }
  const int64_t child_id = child->seq_id;
  request.live_seq_ids.push_back(child_id);
  queue_of(*child).insert(child.get());
  sequences_.emplace(child_id, std::move(child));
  return child_id;
}

void Scheduler::append_token(int64_t seq_id, int32_t token_id) {
  const auto found = sequences_.find(seq_id);
  if (found == sequences_.end() || found->second->is_finished()) {
    throw NotFound("seq_id: there is no unfinished sequence " + std::to_string(seq_id));
  }
  Sequence& sequence = *found->second;
  if (!sequence.is_held) refuse("seq_id: sequence " + std::to_string(seq_id) + " is not held");
  if (token_id < 0) refuse("token_id: must be 0 or more, got " + std::to_string(token_id));
  Queue& queue = queue_of(sequence);
  sequence.is_held = false;
  sequence.append_token(token_id, max_seq_len_);
  if (sequence.is_finished()) retire(sequence, queue);
}

bool Scheduler::is_held(int64_t seq_id) const {
  const auto found = sequences_.find(seq_id);
  return found != sequences_.end() && !found->second->is_finished() && found->second->is_held;
}

bool Scheduler::abort_seq(int64_t seq_id) {
  const auto found = sequences_.find(seq_id);
  if (found == sequences_.end() || found->second->is_finished()) return false;
  end_sequence(*found->second, SequenceStatus::kFinishedAborted);
  drop_unbuilt_outputs([seq_id](const RequestOutput& output) { return output.seq_id == seq_id; });
  return true;
}

bool Scheduler::abort_request(const std::string& request_id, int32_t sequence_index) {
  drop_unbuilt_outputs([&](const RequestOutput& output) {
    return output.request_id == request_id &&
           (sequence_index == kAllSequences || output.sequence_index == sequence_index);
  });
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return false;
  bool is_any = false;
  const std::vector<int64_t> seq_ids = found->second.live_seq_ids;
  for (const int64_t seq_id : seq_ids) {
    Sequence& sequence = *sequences_.at(seq_id);
    if (sequence_index != kAllSequences && sequence.sequence_index != sequence_index) continue;
    end_sequence(sequence, SequenceStatus::kFinishedAborted);
    is_any = true;
  }
  return is_any;
}

void Scheduler::abort_client(int32_t client_index) {
  std::vector<std::string> request_ids;
  for (const auto& [request_id, request] : requests_) {
    if (request.client_index == client_index) request_ids.push_back(request_id);
  }
  for (const std::string& request_id : request_ids) abort_request(request_id);
  drop_unbuilt_outputs([&](const RequestOutput& output) { return output.client_index == client_index; });
}

bool Scheduler::was_scheduled(const std::string& request_id) const {
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return false;
  const std::vector<int64_t>& seq_ids = found->second.live_seq_ids;
  return std::any_of(seq_ids.begin(), seq_ids.end(),
                     [this](int64_t seq_id) { return sequences_.at(seq_id)->first_scheduled_time_ns != 0; });
}

template <typename Predicate>
void Scheduler::drop_unbuilt_outputs(Predicate is_dropped) {
  for (const auto& batch : batches_) {
    if (batch->state == BatchState::kProcessed) batch->drop_outputs(is_dropped);
  }
}

void Scheduler::end_sequence(Sequence& sequence, SequenceStatus status) {
  Queue& queue = queue_of(sequence);
  sequence.status = status;
  retire(sequence, queue);
}

void Scheduler::retire(Sequence& sequence, Queue& queue) {
  queue.erase(&sequence);
  finished_.push_back(&sequence);
  const auto request = requests_.find(sequence.request_id);
  std::vector<int64_t>& live = request->second.live_seq_ids;
  live.erase(std::find(live.begin(), live.end(), sequence.seq_id));
  if (live.empty()) requests_.erase(request);
}

void Scheduler::free_finished_seqs() {
  const auto is_freed = [this](Sequence* sequence) {
    if (sequence->num_inflight_steps > 0) return false;
    blocks_.free(sequence->block_table);
    if (sequence->options.is_tracked) freed_seq_ids_.push_back(sequence->seq_id);
    sequences_.erase(sequence->seq_id);
    return true;
  };
  finished_.erase(std::remove_if(finished_.begin(), finished_.end(), is_freed), finished_.end());
}

std::vector<Fork> Scheduler::take_forks() { return std::exchange(forks_, {}); }

std::vector<int64_t> Scheduler::take_freed_seq_ids() { return std::exchange(freed_seq_ids_, {}); }

// ---- a step is scheduled ----

std::shared_ptr<ScheduledBatch> Scheduler::schedule(const std::shared_ptr<SequenceMetadataPool>& pool) {
  check_may_schedule();
  free_finished_seqs();
  std::shared_ptr<ScheduledBatch> batch = spare_batch();
  const bool could_decode = can_decode();
  batch->reset(pool, true);
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
    batch->reset(pool, false);
    schedule_decode(*batch);
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
  const auto is_open = [this](const Sequence* sequence) { return sequence->can_decode(max_seq_len_); };
  return std::any_of(running_.begin(), running_.end(), is_open) ||
         std::any_of(prompted_.begin(), prompted_.end(), is_open);
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
      if (fits_in_step(batch, *next)) add_chunk(*next, batch);
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
  return !sequence.wants_prompt_logprobs() || batch.num_prompt_logits() < config_.max_num_prompt_logits;
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
  sequence.num_computed_tokens = int64_t{admission.num_cached_blocks} * blocks_.block_size();
  if (sequence.first_scheduled_time_ns == 0) sequence.first_scheduled_time_ns = now_ns();
  // Counted once: a recomputed sequence finds its own blocks again, which is not what the count is for.
  if (sequence.num_cached_tokens < 0) {
    sequence.num_cached_tokens = sequence.num_computed_tokens;
    batch.num_cached_tokens += sequence.num_computed_tokens;
    num_cached_tokens_ += sequence.num_computed_tokens;
  }
  add_chunk(sequence, batch);
  return true;
}

void Scheduler::add_chunk(Sequence& sequence, ScheduledBatch& batch) {
  const int64_t begin = sequence.num_computed_tokens;
  int64_t budget = config_.max_num_batched_tokens - batch.num_tokens();
  if (sequence.wants_prompt_logprobs()) {
    budget = std::min(budget, config_.max_num_prompt_logits - batch.num_prompt_logits());
  }
  const int64_t end = std::min(sequence.num_tokens(), begin + budget);
  launch(sequence, begin, end, batch);
  if (end == sequence.num_tokens()) {
    move(sequence, prefilling_, prompted_);
    sequence.status = SequenceStatus::kPrompted;
  }
}

void Scheduler::schedule_decode(ScheduledBatch& batch) {
  while (!prompted_.empty()) {
    Sequence& sequence = **prompted_.begin();
    move(sequence, prompted_, running_);
    sequence.status = SequenceStatus::kRunning;
  }
  for (auto next = running_.begin(); next != running_.end(); ++next) {
    Sequence& sequence = **next;
    if (!sequence.can_decode(max_seq_len_)) continue;
    const int64_t begin = sequence.decode_begin();
    const int64_t end = sequence.decode_end();
    if (batch.num_tokens() + end - begin > config_.max_num_batched_tokens) break;
    // It can only have preempted itself, as the last of all: nobody comes after it.
    if (!reserve_for_decode(sequence, batch)) break;
    launch(sequence, begin, end, batch);
  }
}

bool Scheduler::reserve_for_decode(Sequence& sequence, ScheduledBatch& batch) {
  const int64_t begin = sequence.decode_begin();
  const int64_t end = sequence.decode_end();
  // Asked anew after each victim: it may have been the one that a block was shared with.
  while (blocks_.num_blocks_to_write(sequence.block_table, begin, end) > blocks_.num_free_blocks()) {
    Sequence* victim = *running_.rbegin();
    if (!prefilling_.empty() && ServedBefore()(victim, *prefilling_.rbegin())) victim = *prefilling_.rbegin();
    preempt(*victim);
    ++batch.num_preempted;
    if (victim == &sequence) return false;
  }
  blocks_.make_writable(sequence.block_table, begin, end, batch.block_copies);
  return true;
}

void Scheduler::launch(Sequence& sequence, int64_t begin, int64_t end, ScheduledBatch& batch) {
  batch.add_row(sequence, begin, end, blocks_.block_size());
  sequence.num_computed_tokens = end;
  ++sequence.num_inflight_steps;
  if (batch.rows.back().samples) {
    sequence.inflight_row = static_cast<int32_t>(batch.num_sampled() - 1);
    ++sequence.num_inflight_tokens;
  }
}

// Its blocks may be given out at once, even if a step in flight still reads and writes them: the device runs steps in
// the order of their launch, so whoever gets a block writes it only after that step.
void Scheduler::preempt(Sequence& victim) {
  move(victim, queue_of(victim), waiting_);
  blocks_.free(victim.block_table);
  victim.num_computed_tokens = 0;
  victim.status = SequenceStatus::kWaiting;
  ++victim.num_preemptions;
  ++num_preemptions_;
}

bool Scheduler::preempt_held(ScheduledBatch& batch) {
  if (waiting_head() == nullptr) return false;
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
  return batches_.emplace_back(std::make_shared<ScheduledBatch>());
}

Scheduler::Queue& Scheduler::queue_of(const Sequence& sequence) {
  switch (sequence.status) {
    case SequenceStatus::kWaiting:
      return sequence.block_table.blocks.empty() ? waiting_ : prefilling_;
    case SequenceStatus::kPrompted:
      return prompted_;
    case SequenceStatus::kRunning:
      return running_;
    default:
      throw std::logic_error("a finished sequence stands in no queue");
  }
}

}  // namespace deepinfer
