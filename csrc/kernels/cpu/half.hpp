// float16, as scales of quantized weights are kept. Finite numbers only.
//
// Only for files that are compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/vec.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

static inline F32 load_half(const uint16_t* from) {
#if defined(__AVX512F__)
  // maskz: GCC 12 takes the plain form's undefined lanes for a mistake of ours.
  return (F32)_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (F32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  // The exponent and fraction moved into float32's places are the value times 2^-112, also where it is subnormal.
  I32 bits;
  for (int64_t lane = 0; lane < kLanes; ++lane) bits[lane] = from[lane];
  const F32 magnitude = (F32)((bits & 0x7FFF) << 13) * 0x1p112F;
  return (F32)((I32)magnitude | ((bits & 0x8000) << 16));
#endif
}

// Rounds to nearest, ties to even. |value| must be below 65520.
static inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000U;
  bits &= 0x7FFFFFFFU;
  if (bits < 0x38800000U) {
    // Below float16's normal numbers, 2^-14, its unit is that of float32 between 0.5 and 1: the addition rounds.
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(magnitude));
    magnitude += 0.5F;
    std::memcpy(&bits, &magnitude, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3F000000U));
  }
  return static_cast<uint16_t>(sign | ((bits - 0x38000000U + 0xFFFU + (bits >> 13 & 1U)) >> 13));
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
