// Drafts by prompt lookup (Saxena 2023): what followed when a sequence's last tokens stood in it before.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa.hpp"

namespace deepinfer::cpu {

struct TokenHistories {
  const int32_t* tokens;  // [num_slots, max_len]
  const int32_t* lens;    // [num_slots]
  int64_t max_len;
};

struct NgramLookupKernels {
  // Finds, for each sequence, the most of its last tokens, min_ngram to max_ngram, that occur earlier in its history,
  // overlapping or not; the latest such occurrence counts. Columns 1 to `width` - 1 of its slot's row of next_tokens
  // become what followed there; where the history ends, the drafts themselves follow. Without an occurrence: -1.
  void (*propose)(const TokenHistories& histories, const int32_t* slots, int64_t num_seqs, int64_t min_ngram,
                  int64_t max_ngram, int32_t* next_tokens, int64_t width);
};

DEEPINFER_KERNEL_TABLE(NgramLookupKernels, ngram_lookup)

}  // namespace deepinfer::cpu
