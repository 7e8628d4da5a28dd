// The small operators between the matrix products of a decoder layer. All activations are float32, row by row.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa.hpp"

namespace deepinfer::cpu {

struct ElementwiseKernels {
  // out[t] = x[t] / sqrt(mean(x[t]²) + eps) * weight, for x [num_rows, size]. Where `residual` is not null, x[t] is
  // first added to residual[t], which keeps the sum, and the sum is what is normalized. out may be x.
  void (*rms_norm)(const float* x, float* residual, const float* weight, float eps, int64_t num_rows, int64_t size,
                   float* out);
  // out[t, i] = silu(gate_up[t, i]) * gate_up[t, size + i], for gate_up [num_rows, 2 * size].
  void (*silu_mul)(const float* gate_up, int64_t num_rows, int64_t size, float* out);
  // cos, sin [num_rows, rotary_dim / 2] of positions[t] * inv_freq[i], times `scaling`; as exact as libm's in float32.
  void (*rotary_angles)(const int64_t* positions, const float* inv_freq, float scaling, int64_t num_rows,
                        int64_t rotary_dim, float* cos, float* sin);
  // token_ids[t] = the index of the largest of logits[t] [num_rows, size], the lowest among equals. NaN is never it;
  // 0 if nothing is above -infinity.
  void (*argmax)(const float* logits, int64_t num_rows, int64_t size, int64_t* token_ids);
};

DEEPINFER_KERNEL_TABLE(ElementwiseKernels, elementwise)

}  // namespace deepinfer::cpu
