// The random number behind a sampled token.
#pragma once

#include <cmath>
#include <cstdint>

namespace deepinfer {

// The uniform number in [0, 1) that samples output `output_index`; depends on these two only, so that a token depends
// on neither the batch nor the steps that led to it.
//
// splitmix64 (Steele, Lea, Flood 2014) as a counter-based generator: the state after `output_index` steps is known
// without taking them. The seed is scrambled first, or neighbouring seeds would share their numbers.
[[nodiscard]] inline double uniform_of(uint64_t seed, int64_t output_index) {
  const auto scramble = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  const uint64_t state = scramble(seed + kGolden) + (static_cast<uint64_t>(output_index) + 1) * kGolden;
  constexpr int kMantissaBits = 53;
  return std::ldexp(static_cast<double>(scramble(state) >> (64 - kMantissaBits)), -kMantissaBits);
}

}  // namespace deepinfer
