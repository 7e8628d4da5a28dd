#include "engine/scheduler.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

namespace deepinfer {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_range(const char* field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return;
  refuse(std::string(field) + ": must be " + std::to_string(min) + " to " + std::to_string(max) + ", got " +
         std::to_string(value));
}

constexpr double kNsPerSecond = 1e9;

}  // namespace

void SchedulerConfig::validate() const {
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  check_range("num_blocks", num_blocks, 1, kMaxInt32 - 1);
  check_range("block_size", block_size, 1, kMaxInt32);
  check_range("max_num_seqs", max_num_seqs, 1, kMaxInt32);
  check_range("max_num_batched_tokens", max_num_batched_tokens, 1, kMaxInt32);
  check_range("max_model_len", max_model_len, 2, kMaxInt32);
  check_range("max_num_extra_logits", max_num_extra_logits, 1, kMaxInt32);
  check_range("num_speculative_tokens", num_speculative_tokens, 0,
              std::min(max_num_batched_tokens, kMaxInt32 / max_num_seqs) - 1);
  check_range("num_lookahead_tokens", num_lookahead_tokens, 0, num_speculative_tokens);
  check_range("max_tokens_behind", max_tokens_behind, 0, kMaxInt32);
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
              config.hash_seed),
      num_accepted_by_position_(static_cast<size_t>(config.num_speculative_tokens)) {}

// ---- a request comes, forks, goes ----

int64_t Scheduler::add_seq(const std::string& request_id, std::vector<int32_t> prompt_token_ids,
                           const SamplingOptions& options, int64_t priority, const std::string& cache_salt,
                           int32_t client_index, std::vector<TokenSpan> media_spans, bool keeps_media_whole) {
  auto sequence = make_sequence(request_id, std::move(prompt_token_ids), options, priority, cache_salt, client_index);
  sequence->media_spans = std::move(media_spans);
  sequence->keeps_media_whole = keeps_media_whole;
  check_media_spans(*sequence);
  return enqueue(std::move(sequence));
}

void Scheduler::check_media_spans(const Sequence& sequence) const {
  if (sequence.keeps_media_whole && sequence.options.prompt_logprobs) {
    refuse("prompt_logprobs: must be left out where a part of the prompt is computed in one step");
  }
  int64_t end = 0;
  for (const TokenSpan& span : sequence.media_spans) {
    if (span.begin < end || span.end <= span.begin || span.end > sequence.num_prompt_tokens) {
      refuse("media_spans: must be parts of the prompt, in order");
    }
    end = span.end;
    if (sequence.keeps_media_whole && end - span.begin > config_.max_num_batched_tokens) {
      refuse("prompt_token_ids: " + std::to_string(end - span.begin) +
             " tokens must be computed in one step, which has at most " +
             std::to_string(config_.max_num_batched_tokens) + " (max_num_batched_tokens)");
    }
  }
}

int64_t Scheduler::add_prompted_seq(const std::string& request_id, std::vector<int32_t> prompt_token_ids,
                                    const PromptedSequence& prompted, const SamplingOptions& options, int64_t priority,
                                    const std::string& cache_salt, int32_t client_index) {
  if (options.n > 1 || options.is_beam) refuse("n: a request whose prompt is computed elsewhere has one sequence");
  if (prompted.first_token_id < 0) {
    refuse("first_token_id: must be 0 or more, got " + std::to_string(prompted.first_token_id));
  }
  auto sequence = make_sequence(request_id, std::move(prompt_token_ids), options, priority, cache_salt, client_index);
  sequence->append_token(prompted.first_token_id, max_seq_len_);
  if (sequence->is_finished()) refuse("first_token_id: the sequence ends with it, here");
  sequence->num_cached_tokens = prompted.num_cached_tokens;
  sequence->first_scheduled_time_ns = prompted.first_scheduled_time_ns;
  sequence->awaits_blocks = true;
  sequence->block_source = prompted.source;
  return enqueue(std::move(sequence));
}

std::unique_ptr<Sequence> Scheduler::make_sequence(const std::string& request_id, std::vector<int32_t> prompt_token_ids,
                                                   const SamplingOptions& options, int64_t priority,
                                                   const std::string& cache_salt, int32_t client_index) const {
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
  sequence->request_id = request_id;
  sequence->options = options;
  sequence->cache_salt = cache_salt;
  sequence->client_index = client_index;
  sequence->service_rank = service_rank(priority);
  sequence->tokens = std::move(prompt_token_ids);
  sequence->num_prompt_tokens = num_prompt_tokens;
  sequence->num_forks_due = options.n - 1;
  return sequence;
}

int64_t Scheduler::enqueue(std::unique_ptr<Sequence> sequence) {
  const int64_t seq_id = sequence->seq_id = next_seq_id_++;
  sequence->arrival = next_arrival_++;
  Request& request = requests_[sequence->request_id];
  request.client_index = sequence->client_index;
  request.live_seq_ids.push_back(seq_id);
  waiting_.insert(sequence.get());
  sequences_.emplace(seq_id, std::move(sequence));
  return seq_id;
}

int64_t Scheduler::now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A moment that lies later the less urgent a request is: whatever waits long enough comes before all that is new.
double Scheduler::service_rank(int64_t priority) const {
  if (config_.priority_aging_s == 0) return static_cast<double>(priority);
  return static_cast<double>(now_ns()) / kNsPerSecond + static_cast<double>(priority) * config_.priority_aging_s;
}

Sequence& Scheduler::unfinished(int64_t seq_id) const {
  const auto found = sequences_.find(seq_id);
  if (found == sequences_.end() || found->second->is_finished()) {
    throw NotFound("seq_id: there is no unfinished sequence " + std::to_string(seq_id));
  }
  return *found->second;
}

bool Scheduler::awaits_blocks(int64_t seq_id) const {
  const auto found = sequences_.find(seq_id);
  return found != sequences_.end() && !found->second->is_finished() && found->second->awaits_blocks &&
         !found->second->block_table.blocks.empty();
}

void Scheduler::blocks_arrived(int64_t seq_id, int64_t num_blocks) {
  Sequence& sequence = unfinished(seq_id);
  if (!awaits_blocks(seq_id)) refuse("seq_id: sequence " + std::to_string(seq_id) + " awaits no blocks");
  const int64_t num_prompt_blocks = blocks_.num_blocks_for(sequence.num_prompt_tokens);
  check_range("num_blocks", num_blocks, sequence.num_computed_tokens / blocks_.block_size(), num_prompt_blocks);
  sequence.awaits_blocks = false;
  sequence.num_computed_tokens = std::min(num_blocks * blocks_.block_size(), sequence.num_prompt_tokens);
  // A drafter of the other engine may not have computed the last one.
  sequence.num_tokens_behind = 1;
  blocks_.cache_computed(sequence.block_table, sequence.tokens, sequence.cache_salt, sequence.num_computed_tokens);
  if (num_blocks == num_prompt_blocks) {
    move(sequence, prefilling_, prompted_);
    sequence.status = SequenceStatus::kPrompted;
  }
}

std::vector<int32_t> Scheduler::prompted_blocks(const std::string& request_id) const {
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return {};
  const Sequence& sequence = *sequences_.at(found->second.live_seq_ids.front());
  if (sequence.status != SequenceStatus::kPrompted || sequence.num_inflight_steps > 0) return {};
  const std::vector<int32_t>& blocks = sequence.block_table.blocks;
  return {blocks.begin(), blocks.begin() + blocks_.num_blocks_for(sequence.num_prompt_tokens)};
}

int64_t Scheduler::fork_seq(int64_t seq_id, uint64_t seed) {
  const Sequence& parent = unfinished(seq_id);
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
  child->slot = kNoSlot;
  child->num_draft_tokens = child->num_accepted_draft_tokens = 0;
  if (parent.status != SequenceStatus::kWaiting && num_holding_blocks() < static_cast<size_t>(config_.max_num_seqs)) {
    child->block_table = blocks_.fork(parent.block_table);
    take_slot(*child);
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
  Sequence& sequence = unfinished(seq_id);
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
  give_back_slot(sequence);
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

void Scheduler::take_slot(Sequence& sequence) {
  sequence.is_slot_filled = false;
  if (free_slots_.empty()) {
    sequence.slot = num_slots_++;
  } else {
    sequence.slot = free_slots_.back();
    free_slots_.pop_back();
  }
}

void Scheduler::give_back_slot(Sequence& sequence) {
  if (sequence.slot != kNoSlot) free_slots_.push_back(sequence.slot);
  sequence.slot = kNoSlot;
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
