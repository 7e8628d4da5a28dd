// A vector of float32, as wide as the instruction set's registers, and what the kernels do with it.
//
// Only for files that are compiled once per instruction set. Arithmetic on F32 is GCC's and Clang's own for vector types
// (+, *, comparisons); a * b + c becomes one fused operation where the instruction set has it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace deepinfer::cpu::DEEPINFER_ISA {

#if defined(__AVX512F__)
inline constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int64_t kLanes = 8;
#else
inline constexpr int64_t kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(kLanes * 4)));
typedef int32_t I32 __attribute__((vector_size(kLanes * 4)));

static inline F32 load(const float* from) {
  F32 vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

static inline void store(F32 vector, float* to) { std::memcpy(to, &vector, sizeof(vector)); }

// value - 0.0 is value, -0.0 too: one broadcast, where a loop over the lanes is as many insertions.
static inline F32 broadcast(float value) { return value - F32{}; }

static inline F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }

static inline F32 max(F32 a, F32 b) { return a > b ? a : b; }

// Of counts; the standard library's would break the rule of isa.hpp.
static inline constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The first `count` < kLanes lanes, the others 0; and the way back.
static inline F32 load_first(const float* from, int64_t count) {
  F32 vector = {};
  std::memcpy(&vector, from, count * sizeof(float));
  return vector;
}

static inline void store_first(F32 vector, float* to, int64_t count) {
  std::memcpy(to, &vector, count * sizeof(float));
}

static inline float max_lane(F32 vector) {
  float largest = vector[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) largest = vector[lane] > largest ? vector[lane] : largest;
  return largest;
}

static inline float sum(F32 vector) {
  float total = 0.0F;
  for (int64_t lane = 0; lane < kLanes; ++lane) total += vector[lane];
  return total;
}

static inline float bfloat16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
static inline uint16_t float_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
