#include "kernels/cpu/ngram_lookup.hpp"

#include "kernels/cpu/vec.hpp"
#include "kernels/parallel.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

constexpr int64_t kMinTokensPerThread = 65536;
// Positions are looked at by blocks of so many vectors, and those without any that matters are passed over.
constexpr int64_t kVectors = 8;
constexpr int64_t kBlock = kVectors * kLanes;

I32 load(const int32_t* from) {
  I32 vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

I32 broadcast(int32_t value) { return value - I32{}; }

bool any(I32 mask) {
  int64_t words[kLanes / 2];
  std::memcpy(words, &mask, sizeof(mask));
  int64_t all = 0;
  for (const int64_t word : words) all |= word;
  return all != 0;
}

// Whether one of tokens[0 .. kBlock) is `last` while the token `distance` before it is `first`.
bool has_both(const int32_t* tokens, int64_t distance, I32 last, I32 first) {
  I32 found = {};
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    found |= (load(tokens + i) == last) & (load(tokens + i - distance) == first);
  }
  return any(found);
}

struct Occurrence {
  int64_t num_matched;
  int64_t end;  // index of its last token; -1: there is none
};

// Backwards from the end: a longer match than the best so far is looked for only where both of its ends fit.
Occurrence latest_longest(const int32_t* tokens, int64_t len, int64_t min_ngram, int64_t max_ngram) {
  Occurrence best{min_ngram - 1, -1};
  const int32_t* last = tokens + len - 1;
  int64_t end = len - 2;
  while (end >= best.num_matched && best.num_matched < max_ngram) {
    const int64_t num_matched = best.num_matched;
    if (end - kBlock + 1 >= num_matched &&
        !has_both(tokens + end - kBlock + 1, num_matched, broadcast(*last), broadcast(last[-num_matched]))) {
      end -= kBlock;
      continue;
    }
    const int64_t begin = max(end - kBlock, num_matched - 1);
    for (; end > begin; --end) {
      if (tokens[end] != *last || tokens[end - num_matched] != last[-num_matched]) continue;
      int64_t matched = 1;
      while (matched < max_ngram && matched <= end && tokens[end - matched] == last[-matched]) ++matched;
      if (matched > num_matched) {
        best = {matched, end};
        --end;
        break;
      }
    }
  }
  return best;
}

void propose(const TokenHistories& histories, const int32_t* slots, int64_t num_seqs, int64_t min_ngram,
             int64_t max_ngram, int32_t* next_tokens, int64_t width) {
  int64_t longest = 1;
  for (int64_t seq = 0; seq < num_seqs; ++seq) longest = max(longest, histories.lens[slots[seq]]);
  parallel_for(num_seqs, ceil_div(kMinTokensPerThread, longest), [=, &histories](int64_t begin, int64_t end) {
    for (int64_t seq = begin; seq < end; ++seq) {
      const int32_t* tokens = histories.tokens + slots[seq] * histories.max_len;
      const int64_t len = histories.lens[slots[seq]];
      int32_t* drafts = next_tokens + slots[seq] * width + 1;
      const Occurrence found = latest_longest(tokens, len, min_ngram, max_ngram);
      for (int64_t i = 0; i < width - 1; ++i) {
        const int64_t from = found.end + 1 + i;
        drafts[i] = found.end < 0 ? -1 : from < len ? tokens[from] : drafts[from - len];
      }
    }
  });
}

}  // namespace

extern const NgramLookupKernels ngram_lookup;
const NgramLookupKernels ngram_lookup = {&propose};

}  // namespace deepinfer::cpu::DEEPINFER_ISA
