#include "kernels/step_inputs.hpp"

#include <algorithm>

#include "uniform.hpp"

namespace deepinfer::cpu {

namespace {

int64_t advance_of(int32_t slot, const int32_t* num_accepted) { return slot < 0 ? 0 : num_accepted[slot]; }

}  // namespace

void resolve_step_inputs(const StepInputs& step, const int32_t* next_tokens, const int32_t* num_accepted) {
  for (int64_t token = 0; token < step.num_tokens; ++token) {
    const int32_t source = step.token_sources[token];
    if (source >= 0) step.token_ids[token] = std::max(next_tokens[source], 0);
  }
  const int64_t limit = std::min(step.max_seq_len, step.max_num_blocks * step.block_size);
  for (int64_t seq = 0; seq < step.num_seqs; ++seq) {
    if (step.advance_slots[seq] < 0) continue;
    const int64_t advance = advance_of(step.advance_slots[seq], num_accepted);
    const int32_t* block_table = step.block_tables + seq * step.block_table_stride;
    for (int64_t token = step.query_start_loc[seq]; token < step.query_start_loc[seq + 1]; ++token) {
      const int64_t position = step.positions[token] + advance;
      step.positions[token] = std::min(position, limit - 1);
      step.slot_mapping[token] = position < limit ? int64_t{block_table[position / step.block_size]} * step.block_size +
                                                        position % step.block_size
                                                  : 0;
    }
    step.seq_lens[seq] = static_cast<int32_t>(std::min(step.seq_lens[seq] + advance, limit));
  }
}

void uniforms_of(const SampledRows& rows, const int32_t* num_accepted, double* uniforms, int64_t* row_output_indices) {
  for (int64_t seq = 0; seq < rows.num_seqs; ++seq) {
    const int64_t start = rows.sample_start_loc[seq];
    const int64_t first = rows.output_indices[seq] + advance_of(rows.advance_slots[seq], num_accepted);
    for (int64_t row = start; row < rows.sample_start_loc[seq + 1]; ++row) {
      row_output_indices[row] = first + row - start;
      uniforms[row] = uniform_of(static_cast<uint64_t>(rows.seeds[seq]), row_output_indices[row]);
    }
  }
}

}  // namespace deepinfer::cpu
