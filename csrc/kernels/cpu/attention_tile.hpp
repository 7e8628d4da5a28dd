// The inner loops of paged attention: rows of queries against one tile of keys and values, by online softmax (Milakov and
// Gimelshein 2018, https://arxiv.org/abs/1805.02867; tiled as in FlashAttention, https://arxiv.org/abs/2205.14135).
//
// A row is one query of one head. Up to kMaxRows rows, a panel, are computed at once, in registers.
// Only for files that are compiled once per instruction set.
#pragma once

#include <cstdint>

#include "kernels/cpu/cache_elements.hpp"
#include "kernels/cpu/vec.hpp"
#include "kernels/cpu/vec_math.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

inline constexpr int64_t kKeyTile = 64;
inline constexpr int64_t kMaxRows = kLanes == 16 ? 12 : 6;  // of two vectors each, they fill the registers
inline constexpr float kMinusInfinity = -__builtin_inff();

template <int64_t kValue>
struct Constant {
  static constexpr int64_t value = kValue;
};

// Calls body(Constant<num_rows>) for 1 <= num_rows <= kMaxRows.
template <int64_t kRows = kMaxRows, typename Body>
static inline void with_row_count(int64_t num_rows, const Body& body) {
  if constexpr (kRows == 1) {
    body(Constant<1>{});
  } else if (num_rows == kRows) {
    body(Constant<kRows>{});
  } else {
    with_row_count<kRows - 1>(num_rows, body);
  }
}

// How many vectors of T stand beside each other in registers: few rows need more of them to keep the units busy, and
// packed keys need registers to be unpacked in.
template <int64_t kRows, typename T>
inline constexpr int64_t kVectors = kRows * (kPacked<T> == 1 ? 2 : 3) <= kMaxRows ? 4 : 2;

// scores[r][...] = query row r · the keys of kVectors vectors. query: [dim][kRows]; keys[v]: the first kPacked<T>
// elements of kLanes keys, the next ones `stride` elements further; scores: rows kKeyTile apart.
template <int64_t kRows, typename T>
static inline void score_keys(const float* query, const T* const* keys, int64_t stride, int64_t dim, float* scores) {
  F32 sums[kRows][kVectors<kRows, T>] = {};
  const auto add = [&](auto place, int64_t offset, const float* weights) {
    F32 key[kVectors<kRows, T>];
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors<kRows, T>; ++v) key[v] = unpack<decltype(place)::value>(keys[v] + offset);
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
      const F32 weight = broadcast(weights[r]);
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors<kRows, T>; ++v) sums[r][v] = fma(weight, key[v], sums[r][v]);
    }
  };
  for (int64_t d = 0, offset = 0; d < dim; d += kPacked<T>, offset += stride) {
    add(Constant<0>{}, offset, query + d * kRows);
    if constexpr (kPacked<T> >= 2) add(Constant<1>{}, offset, query + (d + 1) * kRows);
    if constexpr (kPacked<T> == 4) {
      add(Constant<2>{}, offset, query + (d + 2) * kRows);
      add(Constant<3>{}, offset, query + (d + 3) * kRows);
    }
  }
#pragma GCC unroll 16
  for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors<kRows, T>; ++v) store(sums[r][v], scores + r * kKeyTile + v * kLanes);
  }
}

// out[r] += weights[r] · values over keys [begin, end), for kWidth vectors of dims. weights: rows kKeyTile apart;
// values: the row of each key, from the first of these dims on by `offset`.
template <int64_t kRows, int64_t kWidth, typename T>
static inline void add_values(const float* weights, const T* const* values, int64_t offset, int64_t begin, int64_t end,
                              float* out, int64_t out_stride) {
  F32 sums[kRows][kWidth];
#pragma GCC unroll 16
  for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kWidth; ++v) sums[r][v] = load(out + r * out_stride + v * kLanes);
  }
  for (int64_t k = begin; k < end; ++k) {
    const T* row = values[k] + offset;
    F32 value[kWidth];
#pragma GCC unroll 4
    for (int64_t v = 0; v < kWidth; ++v) value[v] = load_elements(row + v * kLanes);
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
      const F32 weight = broadcast(weights[r * kKeyTile + k]);
#pragma GCC unroll 4
      for (int64_t v = 0; v < kWidth; ++v) sums[r][v] = fma(weight, value[v], sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kWidth; ++v) store(sums[r][v], out + r * out_stride + v * kLanes);
  }
}

// Keys of a tile, [begin, end).
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// Turns one row's scores of the keys in `computed` (rounded outwards to whole vectors) into weights relative to
// `maximum`, which it brings up to date as it does `sum`. Keys outside `visible` weigh 0. Scales: of the tile's keys and
// values, or null. Returns by what all that was summed with the old maximum must be multiplied.
static inline float soften(float* scores, KeyRange computed, KeyRange visible, const float* key_scales,
                           const float* value_scales, float* maximum, float* sum) {
  const int64_t begin = computed.begin / kLanes * kLanes;
  I32 lane;
  for (int64_t i = 0; i < kLanes; ++i) lane[i] = static_cast<int32_t>(i);
  const int32_t first = static_cast<int32_t>(visible.begin), last = static_cast<int32_t>(visible.end);
  F32 most = broadcast(*maximum);
  for (int64_t k = begin; k < computed.end; k += kLanes) {
    F32 score = load(scores + k);
    if (key_scales != nullptr) score = score * load(key_scales + k);
    if (k < visible.begin || k + kLanes > visible.end) {
      const I32 key = lane + static_cast<int32_t>(k);
      score = (key >= first) & (key < last) ? score : broadcast(kMinusInfinity);
    }
    store(score, scores + k);
    most = max(score, most);
  }
  const float old = *maximum, now = max_lane(most);
  if (now == kMinusInfinity) {  // no key is visible yet; -inf - -inf would be NaN
    for (int64_t k = begin; k < computed.end; k += kLanes) store(F32{}, scores + k);
    return 1.0F;
  }
  F32 total = {};
  for (int64_t k = begin; k < computed.end; k += kLanes) {
    F32 weight = exp(load(scores + k) - now);
    total = total + weight;
    if (value_scales != nullptr) weight = weight * load(value_scales + k);
    store(weight, scores + k);
  }
  const float factor = exp(broadcast(old - now))[0];
  *maximum = now;
  *sum = *sum * factor + deepinfer::cpu::DEEPINFER_ISA::sum(total);
  return factor;
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
