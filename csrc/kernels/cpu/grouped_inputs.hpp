// The inputs of a product with grouped weights, rounded to 8 bits.
//
// Only for files that are compiled once per instruction set.
#pragma once

#include <cstdint>

#include "kernels/cpu/scratch.hpp"
#include "kernels/cpu/vec.hpp"
#include "kernels/parallel.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

// Inputs that have one scale.
inline constexpr int64_t kInputGroup = 32;

// What the products with one block of a row's inputs need besides the inputs.
struct InputBlock {
  float scale;
  float offset_factor;  // scale * the sum of the inputs as integers: what the weight's offset is multiplied by
  int32_t start;        // where the sum of code * input starts: what code bias and implied offset add to it
};

// Rows of 8-bit inputs, and of their blocks.
struct GroupedInputs {
  const int8_t* values;      // [num_rows][num_inputs]
  const InputBlock* blocks;  // [num_rows][num_blocks]
  int64_t num_inputs;
  int64_t num_blocks;
};

static inline I32 round_to_int(F32 vector) {
#if defined(__AVX512F__)
  return (I32)_mm512_maskz_cvtps_epi32(0xFFFF, (__m512)vector);  // maskz: as in half.hpp
#elif defined(__AVX2__)
  return (I32)_mm256_cvtps_epi32((__m256)vector);
#else
  const float round = 12582912.0F;  // 1.5 * 2^23: what is added to it loses its fraction
  return __builtin_convertvector((vector + round) - round, I32);
#endif
}

// Rounds `size` inputs (a multiple of 16, at most kInputGroup) and returns their scale; a scale that is not finite if
// one of the inputs is not.
static inline float quantize(const float* x, int64_t size, int8_t* values) {
  F32 most = {}, not_finite = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const F32 inputs = load(x + i);
    most = max((F32)((I32)inputs & 0x7FFFFFFF), most);
    not_finite += inputs * 0.0F;
  }
  const float largest = max_lane(most);
  // Of numbers that are all below 1e-30 the quotient could overflow: they become 0.
  const float inverse = largest < 1e-30F ? 0.0F : 127.0F / largest;
  typedef int8_t Values __attribute__((vector_size(kLanes)));
  for (int64_t i = 0; i < size; i += kLanes) {
    const Values rounded = __builtin_convertvector(round_to_int(load(x + i) * inverse), Values);
    std::memcpy(values + i, &rounded, sizeof(rounded));
  }
  return largest / 127.0F + sum(not_finite);
}

// Rounds rows of x, in parallel, into `scratch`, where they stay until it is used again; rows of zeros follow up to a
// multiple of `row_multiple`. A block is `block_size` inputs, 16 or kInputGroup; its start is `start_factor` times the
// sum of its inputs.
inline GroupedInputs quantize_rows(const float* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs,
                                   int64_t block_size, int32_t start_factor, int64_t row_multiple, Scratch& scratch) {
  const int64_t padded_rows = (num_rows + row_multiple - 1) / row_multiple * row_multiple;
  const int64_t num_blocks = num_inputs / block_size;
  const int64_t block_floats = static_cast<int64_t>(sizeof(InputBlock) / sizeof(float));
  float* memory = scratch.floats(padded_rows * (num_inputs / 4 + num_blocks * block_floats));
  int8_t* all_values = reinterpret_cast<int8_t*>(memory);
  InputBlock* all_blocks = reinterpret_cast<InputBlock*>(memory + padded_rows * num_inputs / 4);
  parallel_for(num_rows, 1 + 16384 / num_inputs, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int8_t* values = all_values + row * num_inputs;
      InputBlock* blocks = all_blocks + row * num_blocks;
      for (int64_t first = 0; first < num_inputs; first += kInputGroup) {
        const int64_t size = num_inputs - first < kInputGroup ? num_inputs - first : kInputGroup;
        const float scale = quantize(x + row * x_stride + first, size, values + first);
        for (int64_t block = first; block < first + size; block += block_size) {
          int32_t total = 0;
          for (int64_t i = 0; i < block_size; ++i) total += values[block + i];
          *blocks++ = {scale, scale * static_cast<float>(total), start_factor * total};
        }
      }
    }
  });
  std::memset(all_values + num_rows * num_inputs, 0, (padded_rows - num_rows) * num_inputs);
  std::memset(static_cast<void*>(all_blocks + num_rows * num_blocks), 0,
              (padded_rows - num_rows) * num_blocks * sizeof(InputBlock));
  return {all_values, all_blocks, num_inputs, num_blocks};
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
