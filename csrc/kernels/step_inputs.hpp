// What a step computes on that the host does not know yet when it launches it: the tokens that the step before sampled,
// the drafts that follow them, and where all of them stand, which depends on how many drafts that step accepted.
#pragma once

#include <cstdint>

namespace deepinfer::cpu {

// Arrays of a step: tokens of all rows one after another, row s from query_start_loc[s] on.
struct StepInputs {
  int64_t num_seqs;
  int64_t num_tokens;
  int64_t* token_ids;              // [num_tokens]
  int64_t* positions;              // [num_tokens]
  int64_t* slot_mapping;           // [num_tokens] block * block_size + offset
  int32_t* seq_lens;               // [num_seqs]
  const int32_t* token_sources;    // [num_tokens] an index into next_tokens; below 0: token_ids is right
  const int32_t* advance_slots;    // [num_seqs] an index into num_accepted; below 0: the row stands where it is
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* block_tables;     // [num_seqs, max_num_blocks], rows block_table_stride apart
  int64_t block_table_stride;
  int64_t max_num_blocks;
  int64_t block_size;
  int64_t max_seq_len;
};

// Completes the arrays in place. A source below 0 in next_tokens (no token) gives token 0. What would stand beyond its
// block table or max_seq_len belongs to a sequence that has ended, and stays within bounds: slot 0, the last position.
void resolve_step_inputs(const StepInputs& step, const int32_t* next_tokens, const int32_t* num_accepted);

// For each row of logits, of which sequence s has those from sample_start_loc[s] on: its output index, and the uniform
// number in [0, 1) that samples it. Seeds are the bits of unsigned numbers; output_indices are those of the sequences'
// first rows, before num_accepted of their advance_slots (below 0: none) is added.
struct SampledRows {
  int64_t num_seqs;
  const int64_t* seeds;             // [num_seqs]
  const int64_t* output_indices;    // [num_seqs]
  const int32_t* advance_slots;     // [num_seqs]
  const int32_t* sample_start_loc;  // [num_seqs + 1]
};

void uniforms_of(const SampledRows& rows, const int32_t* num_accepted, double* uniforms, int64_t* row_output_indices);

}  // namespace deepinfer::cpu
