// Matrix products with 4-, 6- and 8-bit weights: in a group of consecutive inputs, weight = scale * code + offset.
//
// That one form holds GGUF's Q4_0, Q4_1, Q8_0, Q4_K and Q6_K as well as GPTQ and AWQ. The inputs are rounded to 8 bits
// per row and group of 32, as llama.cpp does: to the nearest multiple of (largest magnitude) / 127, ties to even;
// products are summed as integers within a group, or within 32 inputs of a larger one, and as float32 beyond.
//
// Packed, 16 outputs stand side by side (a column), and of each of them 4 consecutive inputs, a step; codes of fewer
// bits than 8 share the bytes of several steps, and are taken apart by a mask and a shift of whole vectors:
//   8 bits  [columns][num_inputs / 4][16][4]
//   4 bits  [columns][num_inputs / 8][16][4]: a step in the low halves of the bytes, the next one in the high halves
//   6 bits  for each 16 inputs the low 4 bits of their codes as above, [2][16][4], then the high 2 bits, [16][4]: 4 steps
//           from a byte's lowest bits upwards
//   scales, offsets  [columns][num_inputs / group_size][16]
// What is missing to whole columns is 0.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa.hpp"

namespace deepinfer::cpu {

struct GroupedWeight {
  int bits;  // 4, 6 or 8
  int64_t num_outputs;
  int64_t num_inputs;       // a multiple of group_size
  int64_t group_size;       // 16, or a multiple of 32
  const void* codes;        // aligned to 64 bytes
  const uint16_t* scales;   // float16
  const uint16_t* offsets;  // float16; null if offset = -2^(bits-1) * scale everywhere
  const float* bias;        // [num_outputs] or null
};

struct GroupedLinearKernels {
  // codes [num_outputs, num_inputs] of one byte each, 0 to 2^bits - 1; scales, offsets [num_outputs, num_inputs /
  // group_size] float32, below 65520 in magnitude (offsets may be null) → what GroupedWeight points to.
  void (*pack)(int bits, int64_t group_size, const uint8_t* codes, const float* scales, const float* offsets,
               int64_t num_outputs, int64_t num_inputs, void* packed_codes, uint16_t* packed_scales,
               uint16_t* packed_offsets);
  // x [num_rows, num_inputs], rows x_stride apart → y [num_rows, num_outputs], rows y_stride apart. A row's outputs do
  // not depend on the other rows; one with an input that is not finite becomes NaN.
  void (*apply)(const GroupedWeight& weight, const float* x, int64_t x_stride, int64_t num_rows, float* y,
                int64_t y_stride);
  // values[i] = scale * code + offset of weight[outputs[i]], [num_rows, num_inputs]: the product is exact, the sum
  // rounded to float32 once.
  void (*unpack_rows)(const GroupedWeight& weight, const int64_t* outputs, int64_t num_rows, float* values);
};

inline constexpr int64_t kGroupedColumnWidth = 16;

// Bytes of `packed_codes`.
[[nodiscard]] inline int64_t packed_code_bytes(int bits, int64_t num_outputs, int64_t num_inputs) {
  const int64_t columns = (num_outputs + kGroupedColumnWidth - 1) / kGroupedColumnWidth;
  return columns * kGroupedColumnWidth * num_inputs / 8 * bits;
}

// Elements of `packed_scales`, and of `packed_offsets`.
[[nodiscard]] inline int64_t packed_scale_count(int64_t group_size, int64_t num_outputs, int64_t num_inputs) {
  const int64_t columns = (num_outputs + kGroupedColumnWidth - 1) / kGroupedColumnWidth;
  return columns * kGroupedColumnWidth * (num_inputs / group_size);
}

DEEPINFER_KERNEL_TABLE(GroupedLinearKernels, grouped_linear)

}  // namespace deepinfer::cpu
