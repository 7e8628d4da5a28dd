#include "engine/scheduled_batch.hpp"

#include <algorithm>
#include <stdexcept>

namespace deepinfer {
namespace {

template <typename T, typename Target>
void copy_to(const std::vector<T>& values, Target* target) {
  std::copy(values.begin(), values.end(), target);
}

void check_fits(const char* what, int64_t number, size_t limit) {
  if (number > static_cast<int64_t>(limit)) {
    throw std::invalid_argument(std::string("the step has ") + std::to_string(number) + " " + what +
                                ", the arrays hold " + std::to_string(limit));
  }
}

}  // namespace

void ScheduledBatch::reset(std::shared_ptr<SequenceMetadataPool> pool, bool is_prefill_step, double threshold) {
  end();
  pool_ = std::move(pool);
  state = BatchState::kLaunched;
  is_prefill = is_prefill_step;
  draft_threshold = threshold;
  max_num_proposed = 0;
  max_query_len = max_seq_len = max_num_blocks = 0;
  all_greedy = true;
  max_top_k = 0;
  any_top_p = any_min_p = any_lora = false;
  num_preempted = num_cached_tokens = num_media_spans = 0;
  num_new_outputs = 0;
  rows.clear();
  block_copies.clear();
  metadata_.clear();
  prompt_logits.clear();
  media_rows.clear();
  new_slots.clear();
  for (auto* values : {&token_ids_, &token_sources_, &query_start_loc_, &seq_lens_, &advance_slots_, &sample_start_loc_,
                       &sample_slots_, &top_k_, &lora_ids, &tracked_rows, &new_slot_tokens, &draft_query_lens}) {
    values->clear();
  }
  for (auto* values : {&positions_, &slot_mapping_, &logits_indices_, &prompt_logits_indices_, &seeds_,
                       &output_indices_, &banned_rows_, &banned_token_ids_, &banned_until_, &tracked_seq_ids}) {
    values->clear();
  }
  for (auto* values : {&temperature_, &top_p_, &min_p_}) values->clear();
  query_start_loc_.push_back(0);
  sample_start_loc_.push_back(0);
}

void ScheduledBatch::add_row(Sequence& sequence, int64_t begin, int64_t end, int32_t num_drafts,
                             const Proposal& proposal) {
  const int64_t num_tokens_with_inflight = sequence.num_tokens_with_inflight();
  const bool samples = end == num_tokens_with_inflight;
  const int64_t output_index = num_tokens_with_inflight - sequence.num_prompt_tokens;
  const int64_t draft_end = end + num_drafts;
  rows.push_back({&sequence, end, sequence.num_preemptions, num_drafts, samples});
  metadata_.push_back(pool_->acquire());
  SequenceMetadata& metadata = pool_->get(metadata_.back());
  metadata.request_id = sequence.request_id;
  metadata.seq_id = sequence.seq_id;
  metadata.is_prefill = is_prefill;
  metadata.block_table = sequence.block_table.blocks;
  metadata.seqlen_q = draft_end - begin;
  metadata.seqlen_k = draft_end;
  metadata.samples = samples;
  metadata.output_index = output_index;

  // In the device's state of a slot the last token in flight comes first, then the drafts for what follows.
  const int64_t first_source = int64_t{sequence.slot} * (1 + num_speculative_tokens_) - (num_tokens_with_inflight - 1);
  if (sequence.options.media_id > 0) {
    media_rows.push_back({sequence.options.media_id, num_tokens(), begin, draft_end - begin});
  }
  for (int64_t position = begin; position < draft_end; ++position) {
    const bool known = position < sequence.num_tokens();
    token_ids_.push_back(known ? std::max(sequence.tokens[position], 0) : 0);
    token_sources_.push_back(known ? kNoSlot : static_cast<int32_t>(first_source + position));
    positions_.push_back(position);
    const int64_t block = metadata.block_table[position / block_size_];
    slot_mapping_.push_back(block * block_size_ + position % block_size_);
  }
  query_start_loc_.push_back(static_cast<int32_t>(num_tokens()));
  seq_lens_.push_back(static_cast<int32_t>(draft_end));
  advance_slots_.push_back(sequence.num_inflight_drafts > 0 ? sequence.slot : kNoSlot);
  max_query_len = std::max(max_query_len, metadata.seqlen_q);
  max_seq_len = std::max(max_seq_len, draft_end + sequence.num_inflight_drafts);
  max_num_blocks = std::max(max_num_blocks, static_cast<int64_t>(metadata.block_table.size()));
  lora_ids.push_back(sequence.options.lora_id);
  any_lora |= sequence.options.lora_id > 0;
  if (sequence.wants_prompt_logprobs()) add_prompt_logits(sequence, begin, end);
  if (!samples) return;
  add_sampled_rows(sequence, output_index, num_drafts);
  draft_query_lens.push_back(proposal.query_len);
  max_num_proposed = std::max(max_num_proposed, proposal.num_drafts);
}

void ScheduledBatch::add_prompt_logits(const Sequence& sequence, int64_t begin, int64_t end) {
  // The last token's logits are those that sample.
  const int64_t num_positions = std::min(end, sequence.num_prompt_tokens - 1) - begin;
  if (num_positions <= 0) return;
  prompt_logits.push_back({sequence.seq_id, begin, num_positions});
  const int64_t first_index = num_tokens() - (end - begin);
  for (int64_t i = 0; i < num_positions; ++i) prompt_logits_indices_.push_back(first_index + i);
}

void ScheduledBatch::add_sampled_rows(const Sequence& sequence, int64_t output_index, int32_t num_drafts) {
  const SamplingOptions& options = sequence.options;
  const int64_t first_row = num_sampled_rows();
  for (int64_t index = num_tokens() - 1 - num_drafts; index < num_tokens(); ++index) {
    logits_indices_.push_back(index);
    temperature_.push_back(options.temperature);
    top_k_.push_back(options.top_k);
    top_p_.push_back(options.top_p);
    min_p_.push_back(options.min_p);
  }
  if (options.temperature > 0) {
    all_greedy = false;
    max_top_k = std::max(max_top_k, options.top_k);
    any_top_p |= options.top_p < 1;
    any_min_p |= options.min_p > 0;
  }
  if (options.is_tracked) {
    tracked_rows.push_back(static_cast<int32_t>(num_sampled()));
    tracked_seq_ids.push_back(sequence.seq_id);
  }
  sample_start_loc_.push_back(static_cast<int32_t>(num_sampled_rows()));
  sample_slots_.push_back(sequence.slot);
  seeds_.push_back(static_cast<int64_t>(options.seed));
  output_indices_.push_back(output_index);
  add_banned(options, first_row, output_index, num_drafts);
  if (num_speculative_tokens_ > 0 && !sequence.is_slot_filled) add_new_slot(sequence);
}

void ScheduledBatch::add_banned(const SamplingOptions& options, int64_t first_row, int64_t output_index,
                                int32_t num_drafts) {
  // At the least advance: those that have come past min_tokens by then are known to the device alone.
  const int64_t num_rows = std::min<int64_t>(1 + num_drafts, options.min_tokens - output_index);
  for (int64_t row = first_row; row < first_row + num_rows; ++row) {
    const auto ban = [&](const std::vector<int32_t>& token_ids) {
      for (const int32_t token_id : token_ids) {
        banned_rows_.push_back(row);
        banned_token_ids_.push_back(token_id);
        banned_until_.push_back(options.min_tokens);
      }
    };
    if (!options.ignore_eos) ban(options.eos_token_ids);
    ban(options.stop_token_ids);
  }
}

// No token of it is in flight, so that all are known.
void ScheduledBatch::add_new_slot(const Sequence& sequence) {
  const size_t begin = new_slot_tokens.size();
  for (const int32_t token : sequence.tokens) new_slot_tokens.push_back(std::max(token, 0));
  new_slots.push_back({sequence.slot, begin, new_slot_tokens.size()});
}

RequestOutput& ScheduledBatch::add_output() {
  if (num_new_outputs == new_outputs.size()) new_outputs.emplace_back();
  return new_outputs[num_new_outputs++];
}

void ScheduledBatch::end() {
  if (state != BatchState::kOver) {
    for (const uint64_t handle : metadata_) pool_->release(handle);
  }
  state = BatchState::kOver;
}

void ScheduledBatch::write(const StepArrays& arrays) const {
  if (is_empty()) return;
  if (state == BatchState::kOver) throw NotFound("the step is over");
  check_fits("tokens", num_tokens(), arrays.max_num_tokens);
  check_fits("sequences", num_seqs(), arrays.max_num_seqs);
  check_fits("blocks in a table", max_num_blocks, arrays.max_blocks_per_seq);
  check_fits("rows of logits", num_sampled_rows() + num_prompt_logits(), arrays.max_num_logits);
  check_fits("banned tokens", num_banned(), arrays.max_num_banned);

  copy_to(token_ids_, arrays.token_ids);
  copy_to(token_sources_, arrays.token_sources);
  copy_to(positions_, arrays.positions);
  copy_to(slot_mapping_, arrays.slot_mapping);
  copy_to(query_start_loc_, arrays.query_start_loc);
  copy_to(seq_lens_, arrays.seq_lens);
  copy_to(advance_slots_, arrays.advance_slots);
  copy_to(sample_start_loc_, arrays.sample_start_loc);
  copy_to(sample_slots_, arrays.sample_slots);
  copy_to(temperature_, arrays.temperature);
  copy_to(top_k_, arrays.top_k);
  copy_to(top_p_, arrays.top_p);
  copy_to(min_p_, arrays.min_p);
  copy_to(seeds_, arrays.seeds);
  copy_to(output_indices_, arrays.output_indices);
  copy_to(banned_rows_, arrays.banned_rows);
  copy_to(banned_token_ids_, arrays.banned_token_ids);
  copy_to(banned_until_, arrays.banned_until);
  copy_to(logits_indices_, arrays.logits_indices);
  copy_to(prompt_logits_indices_, arrays.logits_indices + logits_indices_.size());
  // A forward must ask for one row of logits at least: let it be one that exists.
  if (num_sampled_rows() + num_prompt_logits() == 0) arrays.logits_indices[0] = 0;

  int32_t* table_row = arrays.block_tables;
  for (const uint64_t handle : metadata_) {
    const std::vector<int32_t>& table = pool_->get(handle).block_table;
    copy_to(table, table_row);
    std::fill(table_row + table.size(), table_row + max_num_blocks, 0);
    table_row += arrays.max_blocks_per_seq;
  }
}

}  // namespace deepinfer
