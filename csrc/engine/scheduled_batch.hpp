// One step's batch: which sequences take part, and the packed arrays that the Worker's forward reads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/handle_pool.hpp"
#include "engine/request_output.hpp"
#include "engine/sequence.hpp"

namespace deepinfer {

// One sequence's part in one step, as it was when the step was scheduled.
struct SequenceMetadata {
  std::string request_id;
  int64_t seq_id = 0;
  bool is_prefill = false;
  std::vector<int32_t> block_table;
  int64_t seqlen_q = 0;      // tokens this step computes, drafts included
  int64_t seqlen_k = 0;      // keys it attends to, its own included; the least, as is the next
  bool samples = false;      // false for a prefill chunk that is not the last
  int64_t output_index = 0;  // position among the sequence's outputs of the first token it samples
};

using SequenceMetadataPool = HandlePool<SequenceMetadata>;

// What the drafter does for a sequence at the end of a step: nothing, unless num_drafts is above 0.
struct Proposal {
  int32_t num_drafts = 0;  // that it proposes, at most
  int32_t query_len = 0;   // how many of the sequence's last tokens it computes to begin with; 0: it has no model
};

// Consecutive tokens of one sequence's prompt, for each of which a step gives logits.
struct PromptLogitsSpan {
  int64_t seq_id;
  int64_t begin;  // position of the first
  int64_t num_tokens;
};

// What a step computes of a sequence that has images or videos.
struct MediaRow {
  int64_t media_id;
  int64_t first_token;  // of all the step's
  int64_t begin;        // the position of that one in the sequence; the least, with drafts
  int64_t num_tokens;
};

// A slot of the device's state that belongs to another sequence from this step on.
struct NewSlot {
  int32_t slot;
  size_t begin, end;  // its tokens, of all the step's
};

// The Worker's buffers, whose contents _core.pyi explains. T, S, B, L and M are their capacities in tokens, sequences,
// blocks per sequence, rows of logits and banned tokens.
struct StepArrays {
  size_t max_num_tokens = 0;      // T
  size_t max_num_seqs = 0;        // S
  size_t max_blocks_per_seq = 0;  // B
  size_t max_num_logits = 0;      // L
  size_t max_num_banned = 0;      // M
  int64_t* token_ids = nullptr;
  int32_t* token_sources = nullptr;
  int64_t* positions = nullptr;
  int64_t* slot_mapping = nullptr;
  int32_t* query_start_loc = nullptr;
  int32_t* seq_lens = nullptr;
  int32_t* advance_slots = nullptr;
  int32_t* block_tables = nullptr;
  int64_t* logits_indices = nullptr;
  int32_t* sample_start_loc = nullptr;
  int32_t* sample_slots = nullptr;
  float* temperature = nullptr;
  int32_t* top_k = nullptr;
  float* top_p = nullptr;
  float* min_p = nullptr;
  int64_t* seeds = nullptr;
  int64_t* output_indices = nullptr;
  int64_t* banned_rows = nullptr;
  int64_t* banned_token_ids = nullptr;
  int64_t* banned_until = nullptr;
};

enum class BatchState : uint8_t {
  kLaunched,   // the device may work on it
  kProcessed,  // its tokens were appended; their outputs are not built yet
  kOver,       // nobody may read its sequences any more
};

// Owns one step's rows. The Scheduler fills it, then nothing of it changes but its state.
//
// 1. It is a copy of what was true when the step was scheduled: writing or reading it never looks at a sequence, so
//    that a later preemption or abort cannot change a step on its way.
// 2. A row's sequence stays in memory until the step was processed.
// 3. Batches are recycled, capacity and all: after warm-up a step allocates nothing.
class ScheduledBatch {
 public:
  struct Row {
    Sequence* sequence;           // null once the step was processed: it may be gone
    int64_t num_computed_tokens;  // of the sequence, once this step is done and has accepted none of its drafts
    int32_t num_preemptions;      // of the sequence, at this time
    int32_t num_drafts;           // that the step verifies
    bool samples;                 // a beam's row does too: it gives candidates
  };

  // num_speculative_tokens: the most drafts that a slot of the device's state holds.
  ScheduledBatch(int block_size, int32_t num_speculative_tokens)
      : block_size_(block_size), num_speculative_tokens_(num_speculative_tokens) {}
  ~ScheduledBatch() { end(); }
  ScheduledBatch(const ScheduledBatch&) = delete;
  ScheduledBatch& operator=(const ScheduledBatch&) = delete;

  // Starts a new step, whose metadata live in `pool`.
  void reset(std::shared_ptr<SequenceMetadataPool> pool, bool is_prefill, double draft_threshold);
  // The sequence computes tokens [begin, end), and samples if that is all of it; then it may compute num_drafts drafts
  // behind. Its blocks are there already, those for the proposal too.
  void add_row(Sequence& sequence, int64_t begin, int64_t end, int32_t num_drafts, const Proposal& proposal);
  // One more entry at the end of the new outputs, with whatever it held before.
  [[nodiscard]] RequestOutput& add_output();
  // Those for which `is_dropped(const RequestOutput&)` says so.
  template <typename Predicate>
  void drop_outputs(Predicate is_dropped) {
    const auto begin = new_outputs.begin();
    const auto end = begin + static_cast<std::ptrdiff_t>(num_new_outputs);
    num_new_outputs = static_cast<size_t>(std::remove_if(begin, end, is_dropped) - begin);
  }
  // Gives the metadata back.
  void end();

  // Fills the first num_tokens / num_seqs / num_sampled / num_sampled_rows / num_banned entries (of the logits' indices
  // num_sampled_rows, then num_prompt_logits); block tables are padded with block 0 up to max_num_blocks. Throws
  // std::invalid_argument if an array is too small, NotFound if the step is over.
  void write(const StepArrays& arrays) const;

  [[nodiscard]] bool is_empty() const { return rows.empty(); }
  [[nodiscard]] int64_t num_seqs() const { return static_cast<int64_t>(rows.size()); }
  [[nodiscard]] int64_t num_tokens() const { return static_cast<int64_t>(token_ids_.size()); }
  [[nodiscard]] int64_t num_sampled() const { return static_cast<int64_t>(sample_slots_.size()); }
  [[nodiscard]] int64_t num_sampled_rows() const { return static_cast<int64_t>(logits_indices_.size()); }
  [[nodiscard]] int64_t num_prompt_logits() const { return static_cast<int64_t>(prompt_logits_indices_.size()); }
  [[nodiscard]] int64_t num_banned() const { return static_cast<int64_t>(banned_rows_.size()); }
  [[nodiscard]] const std::shared_ptr<SequenceMetadataPool>& pool() const { return pool_; }
  [[nodiscard]] const std::vector<uint64_t>& metadata() const { return metadata_; }

  BatchState state = BatchState::kOver;
  bool is_prefill = false;
  double draft_threshold = 0;  // how likely a draft must be to be verified
  int64_t max_query_len = 0;
  int64_t max_seq_len = 0;
  int64_t max_num_blocks = 0;
  bool all_greedy = true;
  int32_t max_top_k = 0;  // of the rows that are not greedy, as are the next two; 0: nobody uses it
  bool any_top_p = false;
  bool any_min_p = false;
  bool any_lora = false;
  int64_t num_preempted = 0;
  int64_t num_cached_tokens = 0;
  std::vector<Row> rows;
  std::vector<BlockCopy> block_copies;
  std::vector<int32_t> lora_ids;         // [num_seqs]
  std::vector<int32_t> tracked_rows;     // which of the sequences that sample are tracked, and
  std::vector<int64_t> tracked_seq_ids;  // their ids
  std::vector<PromptLogitsSpan> prompt_logits;
  std::vector<MediaRow> media_rows;
  int64_t num_media_spans = 0;            // of which the step computes a part
  std::vector<int32_t> draft_query_lens;  // [num_sampled] of each one's proposal
  int32_t max_num_proposed = 0;           // of the drafts of any
  std::vector<NewSlot> new_slots;         // none without drafts; in the order of rows
  std::vector<int32_t> new_slot_tokens;

  // What processing it appended, waiting to be built. Never shrinks; the first num_new_outputs count.
  std::vector<RequestOutput> new_outputs;
  size_t num_new_outputs = 0;

 private:
  void add_prompt_logits(const Sequence& sequence, int64_t begin, int64_t end);
  void add_sampled_rows(const Sequence& sequence, int64_t output_index, int32_t num_drafts);
  void add_banned(const SamplingOptions& options, int64_t first_row, int64_t output_index, int32_t num_drafts);
  void add_new_slot(const Sequence& sequence);

  const int block_size_;
  const int32_t num_speculative_tokens_;
  std::shared_ptr<SequenceMetadataPool> pool_;
  std::vector<uint64_t> metadata_;  // [num_seqs] handles into pool_
  std::vector<int32_t> token_ids_, token_sources_;
  std::vector<int64_t> positions_, slot_mapping_;
  std::vector<int32_t> query_start_loc_, seq_lens_, advance_slots_;
  std::vector<int64_t> logits_indices_, prompt_logits_indices_;
  std::vector<int32_t> sample_start_loc_, sample_slots_;
  std::vector<float> temperature_, top_p_, min_p_;
  std::vector<int32_t> top_k_;
  std::vector<int64_t> seeds_, output_indices_;
  std::vector<int64_t> banned_rows_, banned_token_ids_, banned_until_;
};

}  // namespace deepinfer
