// Matrix products with 4-, 6- and 8-bit weights: in a group of consecutive inputs, weight = scale * code + offset.
//
// That one form holds GGUF's Q4_0, Q4_1, Q8_0, Q4_K and Q6_K as well as GPTQ and AWQ. The inputs are rounded to 8 bits
// per row and group of 32, as llama.cpp does; products are summed as integers within a group, as float32 beyond it.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa.hpp"

namespace deepinfer::cpu {

// The layout of `codes`, `scales` and `offsets` is grouped_linear.cpp's own: `pack` makes it.
struct GroupedWeight {
  int bits;  // 4, 6 or 8
  int64_t num_outputs;
  int64_t num_inputs;  // a multiple of group_size
  int64_t group_size;  // 16, or a multiple of 32
  const void* codes;
  const uint16_t* scales;   // float16
  const uint16_t* offsets;  // float16; null if offset = -2^(bits-1) * scale everywhere
  const float* bias;        // [num_outputs] or null
};

struct GroupedLinearKernels {
  // codes [num_outputs, num_inputs] of one byte each, 0 to 2^bits - 1; scales, offsets [num_outputs, num_inputs /
  // group_size] float32 (offsets may be null) → what GroupedWeight points to.
  void (*pack)(int bits, int64_t group_size, const uint8_t* codes, const float* scales, const float* offsets,
               int64_t num_outputs, int64_t num_inputs, void* packed_codes, uint16_t* packed_scales,
               uint16_t* packed_offsets);
  // x [num_rows, num_inputs], rows x_stride apart → y [num_rows, num_outputs], rows y_stride apart.
  void (*apply)(const GroupedWeight& weight, const float* x, int64_t x_stride, int64_t num_rows, float* y,
                int64_t y_stride);
};

DEEPINFER_KERNEL_TABLE(GroupedLinearKernels, grouped_linear)

}  // namespace deepinfer::cpu
