#include "kernels/cpu/grouped_linear.hpp"

#include "kernels/cpu/grouped_inputs.hpp"
#include "kernels/cpu/half.hpp"
#include "kernels/cpu/int_dot.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

constexpr int64_t kWidth = kGroupedColumnWidth;
constexpr int64_t kParts = kWidth / kLanes;  // vectors of a column
constexpr int64_t kStepBytes = kWidth * 4;
constexpr int64_t kQuadInputs = 16;  // 4 steps: what is packed or unpacked at a time
constexpr int64_t kLineBytes = 64;
// How far before their use codes are fetched from memory, into the next column too: one row uses them faster than the
// processor foresees, which stops at the end of every page.
constexpr int64_t kAheadBytes = 4096;

// Rows whose products are summed together: as many as the registers hold.
#if defined(__AVX512F__)
constexpr int64_t kMaxTileRows = 8;
#else
constexpr int64_t kMaxTileRows = 4;
#endif

template <int kBits>
constexpr int64_t kQuadBytes = kWidth * kQuadInputs * kBits / 8;

thread_local Scratch scratch;  // the rounded inputs of the call that this thread makes

int64_t num_columns(int64_t num_outputs) { return (num_outputs + kWidth - 1) / kWidth; }

U32 load_codes(const uint8_t* from) {
  U32 codes;
  std::memcpy(&codes, from, sizeof(codes));
  return codes;
}

// One part (kLanes outputs) of the codes of a quad, step by step.
template <int kBits>
inline void unpack(const uint8_t* quad, int64_t part, U32 (&steps)[4]) {
  const uint8_t* from = quad + part * kLanes * 4;
  if constexpr (kBits == 8) {
    for (int step = 0; step < 4; ++step) steps[step] = load_codes(from + step * kStepBytes);
  } else {
    const U32 low = load_codes(from), next_low = load_codes(from + kStepBytes);
    steps[0] = low & 0x0F0F0F0FU;
    steps[1] = (low >> 4) & 0x0F0F0F0FU;
    steps[2] = next_low & 0x0F0F0F0FU;
    steps[3] = (next_low >> 4) & 0x0F0F0F0FU;
    if constexpr (kBits == 6) {
      const U32 high = load_codes(from + 2 * kStepBytes);
      steps[0] |= (high << 4) & 0x30303030U;
      steps[1] |= (high << 2) & 0x30303030U;
      steps[2] |= high & 0x30303030U;
      steps[3] |= (high >> 2) & 0x30303030U;
    }
  }
}

// steps: 4 inputs of one output each. The reverse of `unpack`, for one output.
template <int kBits>
inline void pack_quad(const uint32_t (&steps)[4], uint8_t* quad, int64_t output) {
  uint32_t packed[4];
  if constexpr (kBits == 8) {
    std::memcpy(packed, steps, sizeof(packed));
  } else {
    packed[0] = (steps[0] & 0x0F0F0F0FU) | (steps[1] & 0x0F0F0F0FU) << 4;
    packed[1] = (steps[2] & 0x0F0F0F0FU) | (steps[3] & 0x0F0F0F0FU) << 4;
    packed[2] = (steps[0] & 0x30303030U) >> 4 | (steps[1] & 0x30303030U) >> 2 | (steps[2] & 0x30303030U) |
                (steps[3] & 0x30303030U) << 2;
  }
  for (int64_t word = 0; word < kQuadBytes<kBits> / kStepBytes; ++word) {
    std::memcpy(quad + word * kStepBytes + output * 4, &packed[word], sizeof(uint32_t));
  }
}

template <int kBits>
void pack_codes(const uint8_t* codes, int64_t num_outputs, int64_t num_inputs, uint8_t* packed) {
  const int64_t num_quads = num_inputs / kQuadInputs;
  parallel_for(num_columns(num_outputs), 1, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; ++column) {
      uint8_t* quads = packed + column * num_quads * kQuadBytes<kBits>;
      for (int64_t output = 0; output < kWidth; ++output) {
        const int64_t row = column * kWidth + output;
        for (int64_t quad = 0; quad < num_quads; ++quad) {
          uint32_t steps[4] = {};
          if (row < num_outputs) std::memcpy(steps, codes + row * num_inputs + quad * kQuadInputs, sizeof(steps));
          pack_quad<kBits>(steps, quads + quad * kQuadBytes<kBits>, output);
        }
      }
    }
  });
}

void pack_halves(const float* values, int64_t num_outputs, int64_t num_groups, uint16_t* packed) {
  parallel_for(num_columns(num_outputs), 1, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; ++column) {
      for (int64_t group = 0; group < num_groups; ++group) {
        for (int64_t output = 0; output < kWidth; ++output) {
          const int64_t row = column * kWidth + output;
          packed[(column * num_groups + group) * kWidth + output] =
              row < num_outputs ? float_to_half(values[row * num_groups + group]) : uint16_t{0};
        }
      }
    }
  });
}

void pack(int bits, int64_t group_size, const uint8_t* codes, const float* scales, const float* offsets,
          int64_t num_outputs, int64_t num_inputs, void* packed_codes, uint16_t* packed_scales,
          uint16_t* packed_offsets) {
  const auto pack_bits = bits == 4 ? pack_codes<4> : bits == 6 ? pack_codes<6> : pack_codes<8>;
  pack_bits(codes, num_outputs, num_inputs, static_cast<uint8_t*>(packed_codes));
  pack_halves(scales, num_outputs, num_inputs / group_size, packed_scales);
  if (offsets != nullptr) pack_halves(offsets, num_outputs, num_inputs / group_size, packed_offsets);
}

// A column of a weight. kBlockInputs is min(group_size, kInputGroup).
struct Column {
  const uint8_t* codes;
  const uint16_t* scales;
  const uint16_t* offsets;  // or null
  int64_t num_groups;
  int64_t blocks_per_group;
};

// sums [kRows][kWidth]: the products of a column with rows of inputs. The order of the sums of a row is the same for
// every kRows.
template <int kBits, int64_t kBlockInputs, int64_t kRows>
[[gnu::noinline]] void multiply(const Column& column, const GroupedInputs& inputs, int64_t first_row, float* sums) {
  constexpr int64_t kQuads = kBlockInputs / kQuadInputs;
  const int8_t* values = inputs.values + first_row * inputs.num_inputs;
  const InputBlock* blocks = inputs.blocks + first_row * inputs.num_blocks;
  const uint8_t* codes = column.codes;
  F32 totals[kRows][kParts] = {};
  for (int64_t group = 0; group < column.num_groups; ++group) {
    for (int64_t block = 0; block < column.blocks_per_group; ++block) {
      for (int64_t at = 0; at < kQuads * kQuadBytes<kBits>; at += kLineBytes) {
        __builtin_prefetch(codes + kAheadBytes + at);
      }
#pragma GCC unroll 1
      for (int64_t part = 0; part < kParts; ++part) {
        DotProducts<kBits> products[kRows];
        // Opaque to the compiler: GCC would keep, and spill, the inputs that it reads in every part alike.
        const int8_t* part_values = values;
        const InputBlock* part_blocks = blocks;
        asm("" : "+r"(part_values), "+r"(part_blocks));
#pragma GCC unroll 1
        for (int64_t quad = 0; quad < kQuads; ++quad) {
          U32 steps[4];
          unpack<kBits>(codes + quad * kQuadBytes<kBits>, part, steps);
          const int8_t* quad_values = part_values + quad * kQuadInputs;
          for (int64_t row = 0; row < kRows; ++row) {
            products[row].add(steps[0], steps[1], quad_values + row * inputs.num_inputs);
            products[row].add(steps[2], steps[3], quad_values + row * inputs.num_inputs + 8);
          }
        }
        const F32 scales = load_half(column.scales + group * kWidth + part * kLanes);
        for (int64_t row = 0; row < kRows; ++row) {
          const InputBlock& input = part_blocks[row * inputs.num_blocks];
          const F32 product = __builtin_convertvector(products[row].sums() + input.start, F32);
          totals[row][part] = fma(product, scales * input.scale, totals[row][part]);
        }
        if (column.offsets != nullptr) {
          const F32 offsets = load_half(column.offsets + group * kWidth + part * kLanes);
          for (int64_t row = 0; row < kRows; ++row) {
            totals[row][part] =
                fma(offsets, broadcast(part_blocks[row * inputs.num_blocks].offset_factor), totals[row][part]);
          }
        }
      }
      codes += kQuads * kQuadBytes<kBits>;
      values += kBlockInputs;
      ++blocks;
    }
  }
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t part = 0; part < kParts; ++part) store(totals[row][part], sums + row * kWidth + part * kLanes);
  }
}

// Multiplies the next `count` rows, or as many as a tile of kRows holds, and returns how many. A tile may reach beyond
// them, into the rows of zeros, but not by half: then a smaller tile does.
template <int kBits, int64_t kBlockInputs, int64_t kRows>
int64_t multiply_tile(const Column& column, const GroupedInputs& inputs, int64_t first_row, int64_t count,
                      float* sums) {
  if constexpr (kRows > 1) {
    if (count <= kRows / 2) {
      return multiply_tile<kBits, kBlockInputs, kRows / 2>(column, inputs, first_row, count, sums);
    }
  }
  multiply<kBits, kBlockInputs, kRows>(column, inputs, first_row, sums);
  return count < kRows ? count : kRows;
}

// Some rows of a call and some columns of the weight are multiplied at a time, so that a column's codes are read from
// memory once for all of these rows, and these rows' inputs stay in the cache from column to column.
int64_t rows_per_block(int64_t num_inputs) {
  constexpr int64_t kCacheBytes = 192 << 10, kMostRows = 64;
  const int64_t rows = kCacheBytes / num_inputs / kMaxTileRows * kMaxTileRows;
  return rows < kMaxTileRows ? kMaxTileRows : rows > kMostRows ? kMostRows : rows;
}

void store_outputs(const GroupedWeight& weight, int64_t column, const float* sums, float* y) {
  const int64_t first = column * kWidth;
  const int64_t count = weight.num_outputs - first < kWidth ? weight.num_outputs - first : kWidth;
  for (int64_t i = 0; i < count; ++i) y[first + i] = sums[i] + (weight.bias == nullptr ? 0.0F : weight.bias[first + i]);
}

template <int kBits, int64_t kBlockInputs>
void apply_as(const GroupedWeight& weight, const float* x, int64_t x_stride, int64_t num_rows, float* y,
              int64_t y_stride) {
  const int64_t num_inputs = weight.num_inputs;
  const int32_t middle = weight.offsets == nullptr ? 1 << (kBits - 1) : 0;
  const GroupedInputs inputs = quantize_rows(x, x_stride, num_rows, num_inputs, kBlockInputs,
                                             DotProducts<kBits>::kCodeBias - middle, kMaxTileRows, scratch);
  const int64_t num_groups = num_inputs / weight.group_size;
  const int64_t columns = num_columns(weight.num_outputs);
  const int64_t block_rows = rows_per_block(num_inputs);
  const int64_t row_blocks = (num_rows + block_rows - 1) / block_rows;
  const int64_t item_products = kWidth * num_inputs * (num_rows < block_rows ? num_rows : block_rows);
  parallel_for(row_blocks * columns, 1 + (1 << 17) / item_products, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t column = item % columns;
      const Column packed = {
          static_cast<const uint8_t*>(weight.codes) + column * num_inputs / kQuadInputs * kQuadBytes<kBits>,
          weight.scales + column * num_groups * kWidth,
          weight.offsets == nullptr ? nullptr : weight.offsets + column * num_groups * kWidth, num_groups,
          weight.group_size / kBlockInputs};
      int64_t row = item / columns * block_rows;
      const int64_t end_row = num_rows - row < block_rows ? num_rows : row + block_rows;
      while (row < end_row) {
        float sums[kMaxTileRows * kWidth];
        const int64_t count =
            multiply_tile<kBits, kBlockInputs, kMaxTileRows>(packed, inputs, row, end_row - row, sums);
        for (int64_t i = 0; i < count; ++i) {
          store_outputs(weight, column, sums + i * kWidth, y + (row + i) * y_stride);
        }
        row += count;
      }
    }
  });
}

void apply(const GroupedWeight& weight, const float* x, int64_t x_stride, int64_t num_rows, float* y,
           int64_t y_stride) {
  if (num_rows == 0) return;
  const bool small = weight.group_size == 16;
  const auto run = weight.bits == 4   ? (small ? apply_as<4, 16> : apply_as<4, 32>)
                   : weight.bits == 6 ? (small ? apply_as<6, 16> : apply_as<6, 32>)
                                      : (small ? apply_as<8, 16> : apply_as<8, 32>);
  run(weight, x, x_stride, num_rows, y, y_stride);
}

// The reverse of `pack_quad`: one output's inputs.
template <int kBits>
inline void unpack_quad(const uint8_t* quad, int64_t output, uint32_t (&steps)[4]) {
  uint32_t packed[kQuadBytes<kBits> / kStepBytes];
  for (int64_t word = 0; word < kQuadBytes<kBits> / kStepBytes; ++word) {
    std::memcpy(&packed[word], quad + word * kStepBytes + output * 4, sizeof(uint32_t));
  }
  if constexpr (kBits == 8) {
    std::memcpy(steps, packed, sizeof(steps));
  } else {
    for (int step = 0; step < 4; ++step) {
      steps[step] = packed[step / 2] >> step % 2 * 4 & 0x0F0F0F0FU;
      if constexpr (kBits == 6) steps[step] |= (packed[2] >> step * 2 & 0x03030303U) << 4;
    }
  }
}

template <int kBits>
void unpack_rows_of(const GroupedWeight& weight, const int64_t* outputs, int64_t num_rows, float* values) {
  constexpr int64_t kMinThreadInputs = 8192;
  const int64_t num_groups = weight.num_inputs / weight.group_size, group_quads = weight.group_size / kQuadInputs;
  parallel_for(num_rows, 1 + kMinThreadInputs / weight.num_inputs, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t column = outputs[row] / kWidth, output = outputs[row] % kWidth;
      const int64_t vector = output / kLanes * kLanes, lane = output % kLanes;
      const auto half_at = [=](const uint16_t* halves, int64_t group) {
        return load_half(halves + (column * num_groups + group) * kWidth + vector)[lane];
      };
      const uint8_t* quad =
          static_cast<const uint8_t*>(weight.codes) + column * num_groups * group_quads * kQuadBytes<kBits>;
      float* to = values + row * weight.num_inputs;
      for (int64_t group = 0; group < num_groups; ++group) {
        const float scale = half_at(weight.scales, group);
        const float offset = weight.offsets == nullptr ? scale * -(1 << (kBits - 1)) : half_at(weight.offsets, group);
        for (int64_t i = 0; i < group_quads; ++i) {
          uint32_t steps[4];
          unpack_quad<kBits>(quad, output, steps);
          uint8_t codes[kQuadInputs];
          std::memcpy(codes, steps, sizeof(codes));
          for (int64_t input = 0; input < kQuadInputs; ++input) {
            to[input] = static_cast<float>(codes[input]) * scale + offset;
          }
          quad += kQuadBytes<kBits>;
          to += kQuadInputs;
        }
      }
    }
  });
}

void unpack_rows(const GroupedWeight& weight, const int64_t* outputs, int64_t num_rows, float* values) {
  const auto unpack = weight.bits == 4 ? unpack_rows_of<4> : weight.bits == 6 ? unpack_rows_of<6> : unpack_rows_of<8>;
  unpack(weight, outputs, num_rows, values);
}

}  // namespace

extern const GroupedLinearKernels grouped_linear;
const GroupedLinearKernels grouped_linear = {pack, apply, unpack_rows};

}  // namespace deepinfer::cpu::DEEPINFER_ISA
