// Which drafts the model would have sampled itself, and what becomes of a sequence's tokens: kept for the next step, and
// added to the history that drafts are looked up in.
#pragma once

#include <cstdint>

namespace deepinfer::cpu {

inline constexpr int32_t kNoToken = -1;

// Sequence s has the rows of logits from sample_start_loc[s] on, `width` at most: one for its last token and one for each
// of its drafts, which stand in next_tokens from column 1 on. It accepts the leading drafts that equal their rows'
// targets, and gets the targets up to and including the first that differs. A target below 0, no token, is not given to a
// sequence that accepted a draft: it ends at that draft, and the next step finds out again.
struct DraftedRows {
  int64_t num_seqs;
  int64_t width;                    // columns of next_tokens
  const int64_t* targets;           // [sample_start_loc[num_seqs]]
  const int32_t* sample_start_loc;  // [num_seqs + 1]
  const int32_t* slots;             // [num_seqs] rows of next_tokens
};

// token_ids: [num_seqs, width], kNoToken behind the last of num_tokens [num_seqs]. Of each sequence's slot, column 0 of
// next_tokens becomes its last token, and num_accepted one less than its number of tokens.
void verify_drafts(const DraftedRows& rows, int32_t* next_tokens, int32_t* num_accepted, int32_t* token_ids,
                   int32_t* num_tokens);

// Adds what verify_drafts gave to the histories [num_slots, max_len] as far as there is room; kNoToken is no token.
void append_history(int64_t num_seqs, int64_t width, const int32_t* token_ids, const int32_t* num_tokens,
                    const int32_t* slots, int64_t max_len, int32_t* history, int32_t* history_lens);

}  // namespace deepinfer::cpu
