#include "kernels/verify_drafts.hpp"

namespace deepinfer::cpu {

void verify_drafts(const DraftedRows& rows, int32_t* next_tokens, int32_t* num_accepted, int32_t* token_ids,
                   int32_t* num_tokens) {
  for (int64_t seq = 0; seq < rows.num_seqs; ++seq) {
    const int64_t* targets = rows.targets + rows.sample_start_loc[seq];
    const int64_t num_drafts = rows.sample_start_loc[seq + 1] - rows.sample_start_loc[seq] - 1;
    int32_t* next = next_tokens + rows.slots[seq] * rows.width;
    int64_t accepted = 0;
    while (accepted < num_drafts && targets[accepted] >= 0 && targets[accepted] == next[1 + accepted]) ++accepted;
    if (accepted > 0 && targets[accepted] < 0) --accepted;
    int32_t* tokens = token_ids + seq * rows.width;
    for (int64_t i = 0; i < rows.width; ++i) tokens[i] = i <= accepted ? static_cast<int32_t>(targets[i]) : kNoToken;
    num_tokens[seq] = static_cast<int32_t>(accepted + 1);
    next[0] = tokens[accepted];
    num_accepted[rows.slots[seq]] = static_cast<int32_t>(accepted);
  }
}

void append_history(int64_t num_seqs, int64_t width, const int32_t* token_ids, const int32_t* num_tokens,
                    const int32_t* slots, int64_t max_len, int32_t* history, int32_t* history_lens) {
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    int32_t* tokens = history + slots[seq] * max_len;
    int32_t& len = history_lens[slots[seq]];
    for (int64_t i = 0; i < num_tokens[seq] && len < max_len; ++i) {
      const int32_t token_id = token_ids[seq * width + i];
      if (token_id >= 0) tokens[len++] = token_id;
    }
  }
}

}  // namespace deepinfer::cpu
