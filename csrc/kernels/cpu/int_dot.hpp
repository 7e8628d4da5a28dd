// Products of unsigned codes and signed 8-bit inputs, summed as integers: the part of the quantized kernels that each
// instruction set does in its own way, and all with the same result.
//
// Only for files that are compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/vec.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

typedef uint32_t U32 __attribute__((vector_size(kLanes * 4)));

// Lane by lane, the sum of code * input over 4 inputs at a time; the codes of 4 inputs are the bytes of a lane, below
// 2^kBits. Inputs are -127 to 127, at most 32 of them: then no sum below overflows.
template <int kBits>
class DotProducts {
 public:
  // What is subtracted from every code before it is multiplied.
  static constexpr int32_t kCodeBias =
#if defined(__AVX2__) && !defined(__AVX512F__)
      kBits == 8 ? 128 : 0;
#else
      0;
#endif

  // Adds the products of inputs 0 to 3 with `codes`, of 4 to 7 with `next_codes`, in every lane.
  inline void add(U32 codes, U32 next_codes, const int8_t* inputs);

  [[nodiscard]] inline I32 sums() const;

 private:
  I32 sums_ = {};
};

// The same 4 bytes in every lane.
static inline U32 broadcast4(const int8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return U32{} + word;
}

#if defined(__AVX512F__)

template <int kBits>
inline void DotProducts<kBits>::add(U32 codes, U32 next_codes, const int8_t* inputs) {
  __m512i sums = _mm512_dpbusd_epi32((__m512i)sums_, (__m512i)codes, (__m512i)broadcast4(inputs));
  sums = _mm512_dpbusd_epi32(sums, (__m512i)next_codes, (__m512i)broadcast4(inputs + 4));
  sums_ = (I32)sums;
}

template <int kBits>
inline I32 DotProducts<kBits>::sums() const {
  return sums_;
}

#elif defined(__AVX2__)

// maddubs adds two neighbouring products to 16 bits, with saturation at 32767, which is never reached:
//   4 bits: a pair is at most 2 * 15 * 127 = 3810, the 8 pairs that a 16-bit lane receives from 32 inputs 30480;
//   6 bits: a pair is at most 2 * 63 * 127 = 16002, two of them 32004;
//   8 bits: the code minus 128 is -128 to 127; its magnitude times the input with its sign is at most 128 * 127, a pair
//   32512.
template <int kBits>
inline void DotProducts<kBits>::add(U32 codes, U32 next_codes, const int8_t* inputs) {
  const __m256i x = (__m256i)broadcast4(inputs);
  const __m256i next_x = (__m256i)broadcast4(inputs + 4);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums = (__m256i)sums_;
  if constexpr (kBits == 8) {
    const __m256i middle = _mm256_set1_epi8(-128);
    const __m256i signed_codes = _mm256_xor_si256((__m256i)codes, middle);
    const __m256i next_signed = _mm256_xor_si256((__m256i)next_codes, middle);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signed_codes), _mm256_sign_epi8(x, signed_codes));
    const __m256i next = _mm256_maddubs_epi16(_mm256_abs_epi8(next_signed), _mm256_sign_epi8(next_x, next_signed));
    sums = _mm256_add_epi32(sums, _mm256_add_epi32(_mm256_madd_epi16(pairs, ones), _mm256_madd_epi16(next, ones)));
  } else {
    const __m256i pairs =
        _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)codes, x), _mm256_maddubs_epi16((__m256i)next_codes, next_x));
    sums = kBits == 4 ? _mm256_add_epi16(sums, pairs) : _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
  }
  // Opaque to the compiler: GCC would collect all products of a block before it adds them, and spill them meanwhile.
  asm("" : "+x"(sums));
  sums_ = (I32)sums;
}

template <int kBits>
inline I32 DotProducts<kBits>::sums() const {
  if constexpr (kBits != 4) return sums_;
  return (I32)_mm256_madd_epi16((__m256i)sums_, _mm256_set1_epi16(1));
}

#else

typedef int16_t I16 __attribute__((vector_size(kLanes * 4)));

// The inputs 0 and 2 (or 1 and 3) as 16 bits each, in every lane.
static inline I16 broadcast_pair(int8_t low, int8_t high) {
  return (I16)(U32{} + (static_cast<uint16_t>(low) | static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16));
}

// A product is at most 255 * 127 = 32385: 16 bits hold it.
static inline I32 dot4(U32 codes, const int8_t* inputs) {
  const I32 even = (I32)((I16)(codes & 0x00FF00FFU) * broadcast_pair(inputs[0], inputs[2]));
  const I32 odd = (I32)((I16)((codes >> 8) & 0x00FF00FFU) * broadcast_pair(inputs[1], inputs[3]));
  return ((even << 16) >> 16) + (even >> 16) + ((odd << 16) >> 16) + (odd >> 16);
}

template <int kBits>
inline void DotProducts<kBits>::add(U32 codes, U32 next_codes, const int8_t* inputs) {
  sums_ += dot4(codes, inputs) + dot4(next_codes, inputs + 4);
}

template <int kBits>
inline I32 DotProducts<kBits>::sums() const {
  return sums_;
}

#endif

}  // namespace deepinfer::cpu::DEEPINFER_ISA
