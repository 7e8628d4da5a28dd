// Matrix products with weights that were packed once: y = x Wᵀ + bias, for any number of rows.
//
// Packed, 16 outputs stand side by side (a column), and of each of them as many consecutive inputs as fit into 32 bits:
//   kFloat32   [columns][num_inputs][16]
//   kBFloat16  [columns][num_inputs / 2][16][2]
// so that one stream through the weights feeds a vector of 16 sums. What is missing to whole columns is 0.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa.hpp"

namespace deepinfer::cpu {

inline constexpr int64_t kColumnWidth = 16;

enum class WeightFormat : uint8_t { kFloat32, kBFloat16 };

struct DenseWeight {
  WeightFormat format;
  int64_t num_outputs;
  int64_t num_inputs;
  const void* packed;  // aligned to 64 bytes
  const float* bias;   // [num_outputs] or null
};

struct DenseLinearKernels {
  // Packs weight [num_outputs, num_inputs] (float32 or bfloat16, as `format` says) into `packed`.
  void (*pack)(WeightFormat format, const void* weight, int64_t num_outputs, int64_t num_inputs, void* packed);
  // x [num_rows, num_inputs], rows x_stride apart → y [num_rows, num_outputs], rows y_stride apart. With bfloat16
  // weights x is rounded to bfloat16 where the instruction set multiplies that; sums are float32, in the order of the
  // inputs: a row's outputs do not depend on the other rows. Only the thread that computes for the engine calls it.
  void (*apply)(const DenseWeight& weight, const float* x, int64_t x_stride, int64_t num_rows, float* y,
                int64_t y_stride);
  // values[i] = weight[outputs[i]], the numbers that were packed: [num_rows, num_inputs].
  void (*unpack_rows)(const DenseWeight& weight, const int64_t* outputs, int64_t num_rows, float* values);
};

// Bytes of `packed`.
[[nodiscard]] inline int64_t packed_bytes(WeightFormat format, int64_t num_outputs, int64_t num_inputs) {
  const int64_t columns = (num_outputs + kColumnWidth - 1) / kColumnWidth;
  const int64_t padded_inputs = format == WeightFormat::kBFloat16 ? (num_inputs + 1) / 2 * 2 : num_inputs;
  return columns * kColumnWidth * padded_inputs * (format == WeightFormat::kBFloat16 ? 2 : 4);
}

DEEPINFER_KERNEL_TABLE(DenseLinearKernels, dense_linear)

}  // namespace deepinfer::cpu
