// Where a row ends that is cut off by count (top_k) or by probability (top_p). Only for files that are compiled once
// per instruction set.
//
// The values fall into buckets by size, the largest first; the bucket in which the sum of the weights reaches its limit
// is divided again, until so few values are left that they can be put in order.
#pragma once

#include "kernels/cpu/vec.hpp"
#include "kernels/cpu/vec_math.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

// How much a value counts, and where the sum ends.
struct ByCount {
  double num_kept;
  F32 weights(F32) const { return broadcast(1.0F); }
  double limit(double /*sum_of_all*/) const { return num_kept; }
};

struct ByProbability {
  float largest;  // of the row: weights are those of a softmax but for a factor
  double share;
  F32 weights(F32 values) const { return exp(values - largest); }
  double limit(double sum_of_all) const { return share * sum_of_all; }
};

// Buckets of one width, from `highest` downward; the last one has all that is lower.
struct Buckets {
  static constexpr int32_t kCount = 1024;
  float highest;
  float per_unit;

  static Buckets spanning(float lowest, float highest) {
    // Further below there is hardly any probability: e^-32.
    constexpr float kWidest = 32.0F;
    const float width = highest - lowest < kWidest ? highest - lowest : kWidest;
    return {highest, static_cast<float>(kCount) / width};
  }
  I32 of(F32 values) const {
    const F32 last = broadcast(static_cast<float>(kCount - 1));
    const F32 place = (highest - values) * per_unit;
    return __builtin_convertvector(place < last ? place : last, I32);
  }
};

// body(vector, first, count): the vectors of values[0, n), of the last one perhaps only a few lanes.
template <typename Body>
static inline void for_vectors(const float* values, int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(load(values + i), kLanes);
  if (i < n) body(load_first(values + i, n - i), n - i);
}

static inline void sift_down(float* heap, int64_t root, int64_t n) {
  const float value = heap[root];
  for (int64_t child; (child = 2 * root + 1) < n; root = child) {
    if (child + 1 < n && heap[child + 1] < heap[child]) ++child;
    if (!(heap[child] < value)) break;
    heap[root] = heap[child];
  }
  heap[root] = value;
}

// The largest first. A heap's sort: its time has a bound whatever the values are.
static inline void sort_downward(float* values, int64_t n) {
  for (int64_t root = n / 2; root-- > 0;) sift_down(values, root, n);
  for (int64_t last = n; last-- > 1;) {
    const float least = values[0];
    values[0] = values[last];
    values[last] = least;
    sift_down(values, 0, last);
  }
}

// Of finite values[0, n), n > 0, in the order of their size: the first with which the sum of the weights reaches its
// limit, or the smallest. `narrowed` has room for n values.
template <typename Weighing>
static float last_kept(const float* values, int64_t n, float* narrowed, const Weighing& weighing) {
  constexpr int64_t kFew = 48;
  constexpr int kMaxRounds = 4;  // a thousandth of the range remains each time
  double reached = 0.0;
  double limit = 0.0;
  for (int round = 0; round == 0 || (n > kFew && round < kMaxRounds); ++round) {
    float lowest = values[0];
    float highest = values[0];
    for (int64_t i = 1; i < n; ++i) {
      lowest = values[i] < lowest ? values[i] : lowest;
      highest = values[i] > highest ? values[i] : highest;
    }
    if (lowest == highest) return highest;
    const Buckets buckets = Buckets::spanning(lowest, highest);
    double sums[Buckets::kCount] = {};
    for_vectors(values, n, [&](F32 vector, int64_t count) {
      const I32 bucket = buckets.of(vector);
      const F32 weight = weighing.weights(vector);
      for (int64_t lane = 0; lane < count; ++lane) sums[bucket[lane]] += static_cast<double>(weight[lane]);
    });
    if (round == 0) {
      double sum_of_all = 0.0;
      for (const double each : sums) sum_of_all += each;
      limit = weighing.limit(sum_of_all);
    }
    int32_t last = 0;
    while (last < Buckets::kCount && reached + sums[last] < limit) reached += sums[last++];
    if (last == Buckets::kCount) return lowest;
    int64_t num_narrowed = 0;
    for_vectors(values, n, [&](F32 vector, int64_t count) {
      const I32 bucket = buckets.of(vector);
      for (int64_t lane = 0; lane < count; ++lane) {
        narrowed[num_narrowed] = vector[lane];
        num_narrowed += bucket[lane] == last ? 1 : 0;
      }
    });
    values = narrowed;
    n = num_narrowed;
  }
  sort_downward(narrowed, n);
  for (int64_t i = 0; i < n; ++i) {
    reached += static_cast<double>(weighing.weights(broadcast(narrowed[i]))[0]);
    if (reached >= limit) return narrowed[i];
  }
  return narrowed[n - 1];
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
