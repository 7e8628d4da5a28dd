// One token out of a row of logits at random: temperature, then min_p, top_k and top_p, each over what the one before
// left, then the inverse of the distribution function at the row's own random number. No row is sorted.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa.hpp"

namespace deepinfer::cpu {

// Below it a quotient of float32 logits could overflow; the likeliest token has all the probability long before.
constexpr float kMinTemperature = 1e-5F;

// All arrays but `rows` have one element for each row of the logits.
struct RandomRows {
  int64_t num_rows;
  const int64_t* rows;       // [num_rows] which of the logits' rows are sampled at random
  const float* temperature;  // above 0; below kMinTemperature counts as that
  const float* min_p;        // 0: off
  const int32_t* top_k;      // 0: off
  const float* top_p;        // 1: off
};

struct SamplingKernels {
  // token_ids[t] of each random row t, a row of logits [.., vocab_size], from that row's uniform number in [0, 1).
  // Probabilities are summed in float64. A token without probability is not drawn; 0 where no token has any.
  void (*draw)(const float* logits, int64_t vocab_size, const RandomRows& random, const double* uniforms,
               int64_t* token_ids);
  // least[t] = the smallest quotient of logit and temperature that random row t keeps: tokens as likely as the last one
  // kept are kept too. -infinity where nothing is cut off.
  void (*least_kept)(const float* logits, int64_t vocab_size, const RandomRows& random, float* least);
};

DEEPINFER_KERNEL_TABLE(SamplingKernels, sampling)

}  // namespace deepinfer::cpu
