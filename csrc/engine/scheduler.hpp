// Who computes what in the next step.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/block_manager.hpp"
#include "engine/request_output.hpp"
#include "engine/scheduled_batch.hpp"
#include "engine/sequence.hpp"

namespace deepinfer {

struct SchedulerConfig {
  int64_t num_blocks = 0;              // usable blocks; the dummy block 0 comes on top
  int64_t block_size = 0;              // tokens
  int64_t max_num_seqs = 0;            // sequences that hold blocks, and so in one step
  int64_t max_num_batched_tokens = 0;  // tokens one step computes
  int64_t max_model_len = 0;           // prompt and outputs of one sequence
  int64_t max_num_extra_logits = 1;    // rows of logits of one step beyond one a sequence: prompt tokens' and drafts'
  int32_t num_speculative_tokens = 0;  // drafts that one step verifies for a sequence
  // Positions behind a step's own where a drafter writes keys and values while it proposes; 0: it has none, and proposes
  // for every sequence whether it is asked or not.
  int32_t num_lookahead_tokens = 0;
  // Last tokens of a sequence that such a drafter computes at once, if it was not asked about it for some steps; further
  // behind, it proposes nothing for it any more.
  int64_t max_tokens_behind = 64;
  bool enable_prefix_caching = true;
  int64_t max_consecutive_prefills = 2;  // prefill steps in a row while something could decode
  int64_t prefill_attempt_interval = 1;  // decode steps between two prefill attempts while something waits
  // A request of priority p is served like one of priority 0 that came p times as many seconds later; 0: priority is
  // strict, and a steady stream of urgent requests keeps the others waiting for ever.
  double priority_aging_s = 0;
  uint64_t hash_seed = 0;  // keys the prefix cache's hashes
  // It only prefills: a sequence stays PROMPTED, with its first token, until it is aborted.
  bool is_prompt_engine = false;

  // Throws std::invalid_argument with the field, its value and its limit.
  void validate() const;
};

// What a step tells about the probabilities of the tokens that it sampled, for the rows of logits that asked; they
// ascend. Shapes: [num_rows], and [num_rows, num_top] for the last two.
struct StepLogprobs {
  size_t num_rows = 0;
  size_t num_top = 0;
  const int32_t* rows = nullptr;
  const float* logprobs = nullptr;
  const int32_t* ranks = nullptr;
  const int32_t* top_token_ids = nullptr;
  const float* top_logprobs = nullptr;
};

// What a step sampled. Rows are the sequences that sample.
struct StepTokens {
  size_t num_rows = 0;
  size_t width = 0;
  const int32_t* token_ids = nullptr;   // [num_rows, width]; the first num_tokens[row] of a row are new
  const int32_t* num_tokens = nullptr;  // [num_rows]
  // [num_rows, num_speculative_tokens]: proposals for the tokens after the new ones; negative behind the last. Null: no
  // row has any.
  const int32_t* drafts = nullptr;
};

// What an engine that only prefills, `source`, made of a sequence; times and counts are those of its outputs.
struct PromptedSequence {
  int32_t first_token_id = 0;
  int32_t source = 0;
  int64_t num_cached_tokens = 0;
  int64_t first_scheduled_time_ns = 0;
};

// A sequence that was given blocks whose content comes from outside: those of its prompt from `first_block` on.
struct AwaitedBlocks {
  int64_t seq_id;
  std::string request_id;
  int32_t client_index;
  int32_t source;
  int64_t first_block;
  std::vector<int32_t> blocks;
};

// A sequence that came into being while a step was processed.
struct Fork {
  int64_t parent_id;
  int64_t child_id;
};

// Owns the sequences, the queues they stand in, the blocks, and the batches on their way through the device.
//
// 1. A sequence that is not finished stands in exactly one queue:
//      waiting     WAITING, holds no blocks (new, or preempted)
//      prefilling  WAITING, holds the blocks of all its known tokens; between two chunks, or awaiting their content
//      prompted    PROMPTED
//      running     RUNNING
//    A finished one stands in `finished_` until no launched step refers to it; then its blocks are freed and it goes.
// 2. Every queue is in the order in which sequences are served: priority (with age), arrival, id. It never changes while
//    they live. Nobody is admitted past a head that does not fit (held ones aside: they have nothing to compute), and a
//    block is taken only from sequences served later than the one that needs it, or from held ones when nothing else
//    could go on.
// 3. At most max_num_seqs sequences hold blocks (finished ones aside), so moving one on never needs a place. Each of
//    these has a slot of the device's state, below max_num_seqs. A slot may go to another sequence while a step in
//    flight still uses it: the device runs steps in the order of their launch.
// 4. At most one launched step is unprocessed when `schedule` is called, and it is a decode step. Steps are processed
//    in the order in which they were launched.
// 5. While something can decode, at most max_consecutive_prefills prefill steps come in a row; while something waits, a
//    prefill is attempted at least every prefill_attempt_interval decode steps. So neither starves the other.
// 6. Per step the work is O(batch), and after warm-up nothing is allocated.
//
// One thread at a time owns it; a call that throws std::invalid_argument or NotFound has changed nothing.
class Scheduler {
 public:
  static constexpr int32_t kAllSequences = -1;

  explicit Scheduler(const SchedulerConfig& config);

  // Into `waiting`; returns the sequence's id. With options.n > 1 the others are forked from it when its prompt is
  // computed.
  int64_t add_seq(const std::string& request_id, std::vector<int32_t> prompt_token_ids, const SamplingOptions& options,
                  int64_t priority, const std::string& cache_salt, int32_t client_index,
                  std::vector<TokenSpan> media_spans, bool keeps_media_whole);
  // A sequence of one request whose prompt another engine has computed. When it is admitted it appears among what
  // `take_awaited` returns, and no step computes it before `blocks_arrived`.
  int64_t add_prompted_seq(const std::string& request_id, std::vector<int32_t> prompt_token_ids,
                           const PromptedSequence& prompted, const SamplingOptions& options, int64_t priority,
                           const std::string& cache_salt, int32_t client_index);
  // Those admitted since the last call.
  [[nodiscard]] std::vector<AwaitedBlocks> take_awaited() { return std::exchange(awaited_, {}); }
  // Whether the sequence still holds the blocks that were awaited.
  [[nodiscard]] bool awaits_blocks(int64_t seq_id) const;
  // The content of its first blocks, that many, is there; whatever else there is of the prompt is computed here.
  void blocks_arrived(int64_t seq_id, int64_t num_blocks);
  // Those of the prompt of a request's sequence, which stays PROMPTED; none if there is none.
  [[nodiscard]] std::vector<int32_t> prompted_blocks(const std::string& request_id) const;
  // A copy that shares the blocks until one of the two writes. When max_num_seqs sequences hold blocks already, it
  // waits without blocks and recomputes, like a preempted one.
  int64_t fork_seq(int64_t seq_id, uint64_t seed);
  // Gives a held sequence its next token; no output comes of it.
  void append_token(int64_t seq_id, int32_t token_id);
  [[nodiscard]] bool is_held(int64_t seq_id) const;
  // Ends one sequence; no output of it comes out any more. False if it is not live.
  bool abort_seq(int64_t seq_id);
  // Ends the request's sequences, or the one with this index; no output of theirs comes out any more, not even of those
  // that the step which is being processed has ended. False if none was live.
  bool abort_request(const std::string& request_id, int32_t sequence_index = kAllSequences);
  // The same for every request of a client.
  void abort_client(int32_t client_index);
  // Whether a step has begun to compute a live request, however little of it.
  [[nodiscard]] bool was_scheduled(const std::string& request_id) const;

  // The next batch, possibly empty; an empty one is not launched and needs no processing. draft_threshold: a draft is
  // verified if the probability that it becomes an output is above it; 0: all that fit are.
  [[nodiscard]] std::shared_ptr<ScheduledBatch> schedule(const std::shared_ptr<SequenceMetadataPool>& pool,
                                                         double draft_threshold);

  // A row has one token and those of its drafts that equal what was sampled: these come first. Or it has none and is
  // sampled again, unless a later launched step builds on it. Whatever stands there, a beam's row is held, and what
  // comes after a sequence's end is dropped.
  void process_outputs(ScheduledBatch& batch, const StepTokens& tokens, const StepLogprobs& logprobs);
  // Appends the handles of what `process_outputs` left in the batch, and ends the step.
  void build_request_outputs(ScheduledBatch& batch, RequestOutputPool& pool, std::vector<uint64_t>& handles);
  // Ends the step and, with an error, every sequence in it that has not ended yet.
  void fail_step(ScheduledBatch& batch, RequestOutputPool& pool, std::vector<uint64_t>& handles);
  // Appends the handles of a text's outputs, one per token, for the request that a live sequence belongs to.
  void build_sequence_outputs(int64_t seq_id, const WrittenSequence& text, RequestOutputPool& pool,
                              std::vector<uint64_t>& handles) const;
  void free_finished_seqs();
  // The tracked sequences that came and went since the last call.
  [[nodiscard]] std::vector<Fork> take_forks();
  [[nodiscard]] std::vector<int64_t> take_freed_seq_ids();

  [[nodiscard]] bool has_unfinished_seqs() const { return num_unfinished_seqs() > 0; }
  [[nodiscard]] size_t num_unfinished_requests() const { return requests_.size(); }
  [[nodiscard]] size_t num_waiting() const { return waiting_.size() + prefilling_.size(); }
  [[nodiscard]] size_t num_prompted() const { return prompted_.size(); }
  [[nodiscard]] size_t num_running() const { return running_.size(); }
  [[nodiscard]] const BlockManager& blocks() const { return blocks_; }
  [[nodiscard]] int64_t num_preemptions() const { return num_preemptions_; }
  [[nodiscard]] int64_t num_cached_tokens() const { return num_cached_tokens_; }
  // Of each sequence that a decode step might compute, how likely its next draft is right.
  [[nodiscard]] std::vector<double> acceptance_rates() const;
  // How often drafts of a sequence were verified; how many were proposed and verified, and became outputs; of the latter
  // how many at each place in a row.
  [[nodiscard]] int64_t num_drafts() const { return num_drafts_; }
  [[nodiscard]] int64_t num_draft_tokens() const { return num_draft_tokens_; }
  [[nodiscard]] int64_t num_accepted_draft_tokens() const { return num_accepted_draft_tokens_; }
  [[nodiscard]] const std::vector<int64_t>& num_accepted_by_position() const { return num_accepted_by_position_; }

  // Recounts everything; throws std::runtime_error with the first thing that does not add up.
  void check_invariants() const;

 private:
  struct ServedBefore {
    bool operator()(const Sequence* a, const Sequence* b) const;
  };
  // Sequences move between queues by node handle, which allocates nothing.
  using Queue = std::set<Sequence*, ServedBefore>;

  struct Request {
    std::vector<int64_t> live_seq_ids;
    int32_t client_index = 0;
    int32_t num_seqs = 1;  // ever; the next fork's sequence_index
  };

  // One row of StepTokens.
  struct SampledRow {
    const int32_t* token_ids;
    int32_t num_tokens;
    const int32_t* drafts;  // null: none
  };

  [[nodiscard]] double service_rank(int64_t priority) const;
  [[nodiscard]] static int64_t now_ns();

  [[nodiscard]] std::unique_ptr<Sequence> make_sequence(const std::string& request_id,
                                                        std::vector<int32_t> prompt_token_ids,
                                                        const SamplingOptions& options, int64_t priority,
                                                        const std::string& cache_salt, int32_t client_index) const;
  int64_t enqueue(std::unique_ptr<Sequence> sequence);
  void check_media_spans(const Sequence& sequence) const;
  [[nodiscard]] Sequence& unfinished(int64_t seq_id) const;

  // schedule, from top to bottom
  void check_may_schedule() const;
  [[nodiscard]] bool can_decode() const;
  [[nodiscard]] bool is_prefill_attempt_due(bool can_decode) const;
  void schedule_prefill(ScheduledBatch& batch);
  void schedule_decode(ScheduledBatch& batch);
  [[nodiscard]] bool fits_in_memory(const Admission& admission) const;
  [[nodiscard]] bool fits_in_step(const ScheduledBatch& batch) const;
  [[nodiscard]] bool fits_in_step(const ScheduledBatch& batch, const Sequence& sequence) const;
  [[nodiscard]] Sequence* waiting_head() const;
  bool admit(Sequence& sequence, ScheduledBatch& batch);
  void await_blocks(const Sequence& sequence);
  // Nothing, where what comes next of the sequence must wait for a step of its own.
  void add_chunk(Sequence& sequence, ScheduledBatch& batch);
  // Up to where a chunk from `begin` on may go, and counts the media in it: one a step, while others could decode.
  [[nodiscard]] int64_t end_by_media(const Sequence& sequence, int64_t begin, int64_t end, ScheduledBatch& batch) const;
  bool reserve_for_decode(Sequence& sequence, ScheduledBatch& batch);
  [[nodiscard]] int32_t reserve_for_drafts(Sequence& sequence, int64_t budget, ScheduledBatch& batch);
  // Of a row whose next token comes to max_next_position at the most.
  [[nodiscard]] Proposal reserve_for_proposal(Sequence& sequence, int64_t max_next_position, ScheduledBatch& batch);
  void launch(Sequence& sequence, int64_t begin, int64_t end, int32_t num_drafts, ScheduledBatch& batch);
  void preempt(Sequence& victim);
  bool preempt_held(ScheduledBatch& batch);

  // processing
  void check_outputs(const ScheduledBatch& batch, const StepTokens& tokens) const;
  static void check_logprobs(const ScheduledBatch& batch, const StepLogprobs& logprobs);
  void check_is_next(const ScheduledBatch& batch) const;
  void take_front(ScheduledBatch& batch);
  [[nodiscard]] SampledRow sampled_row(const StepTokens& tokens, size_t index) const;
  static Sequence& leave_step(ScheduledBatch::Row& row);
  void take_sampled(Sequence& sequence, const ScheduledBatch::Row& row, const SampledRow& sampled,
                    ScheduledBatch& batch);
  void judge_drafts(Sequence& sequence, const ScheduledBatch::Row& row, const SampledRow& sampled);
  // Returns how many of the drafts became outputs.
  int32_t append_sampled(Sequence& sequence, const SampledRow& sampled, ScheduledBatch& batch);
  int64_t add_fork(const Sequence& parent, uint64_t seed);
  void fork_due_seqs(Sequence& parent);
  template <typename Predicate>
  void drop_unbuilt_outputs(Predicate is_dropped);
  void retire(Sequence& sequence, Queue& queue);
  void end_sequence(Sequence& sequence, SequenceStatus status);

  void take_slot(Sequence& sequence);
  void give_back_slot(Sequence& sequence);
  [[nodiscard]] std::shared_ptr<ScheduledBatch> spare_batch();
  [[nodiscard]] Queue& queue_of(const Sequence& sequence);
  [[nodiscard]] size_t num_holding_blocks() const { return prefilling_.size() + prompted_.size() + running_.size(); }
  [[nodiscard]] size_t num_unfinished_seqs() const { return waiting_.size() + num_holding_blocks(); }
  static void move(Sequence& sequence, Queue& from, Queue& to) { to.insert(from.extract(&sequence)); }

  const SchedulerConfig config_;
  const int64_t max_seq_len_;  // tokens: the model's limit, or what the whole cache holds
  BlockManager blocks_;

  std::unordered_map<int64_t, std::unique_ptr<Sequence>> sequences_;  // finished ones included
  std::unordered_map<std::string, Request> requests_;                 // live ones
  Queue waiting_, prefilling_, prompted_, running_;
  std::vector<Sequence*> finished_;
  std::vector<Sequence*> decoding_;  // of the step that is being scheduled
  std::vector<int32_t> free_slots_;  // of those that were given out before
  int32_t num_slots_ = 0;            // that ever were
  std::vector<AwaitedBlocks> awaited_;
  std::vector<Fork> forks_;  // of tracked sequences, as are the next
  std::vector<int64_t> freed_seq_ids_;
  int64_t next_seq_id_ = 0;
  uint64_t next_arrival_ = 0;

  std::vector<std::shared_ptr<ScheduledBatch>> batches_;   // all there are
  std::vector<std::shared_ptr<ScheduledBatch>> launched_;  // the unprocessed ones, oldest first; at most two
  int64_t num_consecutive_prefills_ = 0;                   // launched while something could decode
  bool last_step_was_prefill_ = false;
  bool others_could_decode_ = false;  // when the step was scheduled
  int64_t num_decodes_since_attempt_ = 0;

  int64_t num_preemptions_ = 0;
  int64_t num_cached_tokens_ = 0;
  int64_t num_drafts_ = 0;
  int64_t num_draft_tokens_ = 0;
  int64_t num_accepted_draft_tokens_ = 0;
  std::vector<int64_t> num_accepted_by_position_;  // [num_speculative_tokens]
};

}  // namespace deepinfer
