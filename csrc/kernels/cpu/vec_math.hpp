// Functions of whole vectors. Only for files that are compiled once per instruction set.
#pragma once

#include "kernels/cpu/vec.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

typedef uint32_t U32 __attribute__((vector_size(kLanes * 4)));

// 2^n, for n from -126 to 127 as unsigned 32 bits.
static inline F32 power_of_two(U32 n) {
  const U32 bits = (n + 127U) << 23;
  F32 power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

// e^x, at most 1.01 units in the last place from the true value (tried with all of float32). From 88.73 on it is
// infinite, below -103.98 it is 0, and in between it may be below FLT_MIN; NaN stays NaN.
//
// Cody and Waite's way: x = n ln 2 + r with |r| <= ln 2 / 2, and e^x = 2^n e^r. The polynomial is the one of degree 6,
// beginning with 1 + r, whose largest relative error on that interval is least (Remez's exchange: 3.1e-9).
static inline F32 exp(F32 x) {
  constexpr float kLog2E = 1.44269504F;
  constexpr float kLn2High = 0.693359375F;  // 9 bits: its product with any n is exact, with or without fma
  constexpr float kLn2Low = -2.12194440e-4F;
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  x = x > 89.0F ? broadcast(89.0F) : x;
  x = x < -104.0F ? broadcast(-104.0F) : x;
  const F32 shifted = fma(x, broadcast(kLog2E), broadcast(kRound));
  const F32 n = shifted - kRound;
  const F32 r = fma(n, broadcast(-kLn2Low), fma(n, broadcast(-kLn2High), x));
  F32 q = broadcast(1.38145986e-3F);
  q = fma(q, r, broadcast(8.36871688e-3F));
  q = fma(q, r, broadcast(4.16683880e-2F));
  q = fma(q, r, broadcast(1.66665206e-1F));
  q = fma(q, r, broadcast(4.99999934e-1F));
  const F32 power = fma(q, r * r, r) + 1.0F;
  // 2^n may be beyond float32 where 2^n e^r isn't: half of n at a time.
  I32 exponent;
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  U32 whole = (U32)exponent - 0x4B400000U;
  U32 half = (U32)((I32)whole >> 1);
  return power * power_of_two(half) * power_of_two(whole - half);
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
