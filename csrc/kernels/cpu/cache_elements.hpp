// Elements of the KV cache, float32, bfloat16 (as its bits) or int8 (without its scale), as vectors of float32.
//
// Only for files that are compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/vec.hpp"
#include "kernels/cpu/vec_math.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

// How many elements share 32 bits.
template <typename T>
inline constexpr int64_t kPacked = 4 / static_cast<int64_t>(sizeof(T));

typedef uint16_t U16 __attribute__((vector_size(kLanes * 2)));

// Of kLanes words of packed elements, the one in place `kPlace` of each word.
template <int64_t kPlace>
static inline F32 unpack(const float* words) {
  return load(words);
}

template <int64_t kPlace>
static inline F32 unpack(const uint16_t* words) {
  U32 bits;
  std::memcpy(&bits, words, sizeof(bits));
  return (F32)(kPlace == 0 ? bits << 16 : bits & 0xFFFF0000U);
}

template <int64_t kPlace>
static inline F32 unpack(const int8_t* words) {
  I32 bits;
  std::memcpy(&bits, words, sizeof(bits));
  return __builtin_convertvector((bits << (24 - 8 * kPlace)) >> 24, F32);
}

// kLanes elements that lie one after another.
static inline F32 load_elements(const float* from) { return load(from); }

static inline F32 load_elements(const uint16_t* from) {
  U16 bits;
  std::memcpy(&bits, from, sizeof(bits));
  return (F32)(__builtin_convertvector(bits, U32) << 16);
}

// GCC 12 widens bytes one by one where it isn't told the instruction, and warns of its own header but for `maskz`.
static inline F32 load_elements(const int8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return __builtin_convertvector((I32)_mm512_maskz_cvtepi8_epi32(0xFFFF, bytes), F32);
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return __builtin_convertvector((I32)_mm256_cvtepi8_epi32(bytes), F32);
#else
  F32 elements;
  for (int64_t lane = 0; lane < kLanes; ++lane) elements[lane] = static_cast<float>(from[lane]);
  return elements;
#endif
}

static inline float to_float(float element) { return element; }
static inline float to_float(uint16_t element) { return bfloat16_to_float(element); }
static inline float to_float(int8_t element) { return static_cast<float>(element); }

}  // namespace deepinfer::cpu::DEEPINFER_ISA
