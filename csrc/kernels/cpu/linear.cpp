// An output is summed in the order of the inputs, block of steps by block of steps, whatever the tile that it is
// computed in: a row's result is the same for any number of rows and threads.
#include "kernels/cpu/linear.hpp"

#include "kernels/cpu/scratch.hpp"
#include "kernels/cpu/vec.hpp"
#include "kernels/parallel.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

constexpr int kVectors = static_cast<int>(kColumnWidth / kLanes);  // of a column's sums
constexpr int64_t kStepBytes = kColumnWidth * 4;                   // what a column holds of 32 bits of inputs

// Register tiles: rows x columns of sums that stay in registers while the inputs pass by.
#if defined(__AVX512F__)
constexpr int kMaxTileRows = 6;
constexpr int kMaxSums = 24;
#elif defined(__AVX2__)
constexpr int kMaxTileRows = 6;
constexpr int kMaxSums = 12;
#else
constexpr int kMaxTileRows = 3;
constexpr int kMaxSums = 12;
#endif
constexpr int kMaxTileColumns = 4;

constexpr int64_t kBlockInputs = 256;  // at most, of a column: 16 KiB, which stay in L1 while a block's rows pass by
constexpr int64_t kBlockRows = 96;     // whose inputs in a block of inputs stay in L2
constexpr int64_t kBlockColumns = 8;   // that such a block of inputs passes by before the next one

// A format says how many inputs there are in the 32 bits of a step (kInputs), what x is made of (Input), and how a step
// is multiplied, input by input. kInputs > 1: Float32 multiplies the same when each input's `weights` are stored.
struct Float32 {
  using Input = float;
  using Operand = F32;
  static constexpr int kInputs = 1;

  static Operand weights(const char* at, int /*input*/) { return load(reinterpret_cast<const float*>(at)); }
  static Operand repeat(Input x) { return broadcast(x); }
  static F32 multiply_add(Operand weights, Operand x, F32 sums) { return fma(weights, x, sums); }
};

#if defined(__AVX512BF16__)
// x is rounded to bfloat16; a step's two inputs are multiplied at once.
struct BFloat16 {
  using Input = uint32_t;  // two bfloat16, the first one in the low half
  using Operand = __m512bh;
  static constexpr int kInputs = 1;

  static Operand weights(const char* at, int /*input*/) { return (Operand)_mm512_load_si512(at); }
  static Operand repeat(Input x) { return (Operand)_mm512_set1_epi32(static_cast<int>(x)); }
  static F32 multiply_add(Operand weights, Operand x, F32 sums) { return _mm512_dpbf16_ps(sums, weights, x); }
};
#else
struct BFloat16 {
  using Input = float;
  using Operand = F32;
  static constexpr int kInputs = 2;

  static Operand weights(const char* at, int input) {
    I32 pairs;
    std::memcpy(&pairs, at, sizeof(pairs));
    return input == 0 ? (F32)(pairs << 16) : (F32)(pairs & static_cast<int32_t>(0xFFFF0000));
  }
  static Operand repeat(Input x) { return broadcast(x); }
  static F32 multiply_add(Operand weights, Operand x, F32 sums) { return fma(weights, x, sums); }
};
#endif

template <typename Format>
struct Tile {
  const typename Format::Input* x;
  int64_t x_stride;
  const char* weight;
  int64_t column_bytes;
  int64_t num_inputs;
  const float* start;  // what the sums are added to: 0, the bias or y of the inputs before
  int64_t start_stride;
  float* y;
  int64_t y_stride;
  const char* ahead;  // of the weights that come next: each step fetches ahead_bytes of every column from memory
  int64_t ahead_bytes;
};

template <typename Format, int kRows, int kColumns>
__attribute__((noinline)) void multiply_tile(const Tile<Format>& tile) {
  F32 sums[kRows][kColumns][kVectors] = {};
  const typename Format::Input* x = tile.x;
  const char* weight = tile.weight;
  const auto add_input = [&](int input) __attribute__((always_inline)) {
    typename Format::Operand weights[kColumns][kVectors];
    for (int column = 0; column < kColumns; ++column) {
      for (int v = 0; v < kVectors; ++v) {
        weights[column][v] = Format::weights(weight + column * tile.column_bytes + v * kLanes * 4, input);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      const typename Format::Operand repeated = Format::repeat(x[row * tile.x_stride + input]);
      for (int column = 0; column < kColumns; ++column) {
        for (int v = 0; v < kVectors; ++v) {
          sums[row][column][v] = Format::multiply_add(weights[column][v], repeated, sums[row][column][v]);
        }
      }
    }
  };
  const char* ahead = tile.ahead;
  for (int64_t left = tile.num_inputs / Format::kInputs; left > 0; --left) {
    for (int column = 0; column < kColumns; ++column) {
      __builtin_prefetch(ahead + column * tile.column_bytes, 0, 2);  // 2: into L2, as L1 holds the block in use
    }
    ahead += tile.ahead_bytes;
    for (int input = 0; input < Format::kInputs; ++input) add_input(input);
    x += Format::kInputs;
    weight += kStepBytes;
  }
  if (tile.num_inputs % Format::kInputs != 0) add_input(0);
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = column * kColumnWidth + v * kLanes;
        const F32 start = load(tile.start + row * tile.start_stride + at);
        store(start + sums[row][column][v], tile.y + row * tile.y_stride + at);
      }
    }
  }
}

constexpr int max_tile_columns(int num_rows) {
  int columns = kMaxTileColumns;
  while (columns > 1 && columns * kVectors * num_rows > kMaxSums) columns /= 2;
  return columns;
}

template <typename Format, int kRows, int kColumns>
void multiply_tile_of(int num_rows, int num_columns, const Tile<Format>& tile) {
  if constexpr (kColumns > max_tile_columns(kRows)) {
    multiply_tile_of<Format, kRows, kColumns / 2>(num_rows, num_columns, tile);
  } else if (num_rows == kRows && num_columns == kColumns) {
    multiply_tile<Format, kRows, kColumns>(tile);
  } else if constexpr (kColumns > 1) {
    multiply_tile_of<Format, kRows, kColumns / 2>(num_rows, num_columns, tile);
  } else if constexpr (kRows > 1) {
    multiply_tile_of<Format, kRows - 1, kMaxTileColumns>(num_rows, num_columns, tile);
  }
}

// A column's steps as Float32 has them.
template <typename Format>
void unpack_steps(const char* weight, int64_t num_steps, float* to) {
  for (; num_steps > 0; --num_steps, weight += kStepBytes) {
    for (int input = 0; input < Format::kInputs; ++input) {
      for (int v = 0; v < kVectors; ++v, to += kLanes) store(Format::weights(weight + v * kLanes * 4, input), to);
    }
  }
}

template <typename Format>
Tile<Float32> unpacked_tile(const Tile<Format>& tile, const float* unpacked) {
  return {tile.x,
          tile.x_stride,
          reinterpret_cast<const char*>(unpacked),
          0,
          tile.num_inputs,
          tile.start,
          tile.start_stride,
          tile.y,
          tile.y_stride,
          tile.ahead,
          tile.ahead_bytes / Format::kInputs};
}

template <typename Format>
struct Product {
  const typename Format::Input* x;
  int64_t x_stride;
  int64_t num_inputs;  // per row of x
  const char* weight;
  int64_t column_bytes;
  const float* bias;
  float* y;
  int64_t y_stride;
};

// Rows and whole columns from the first ones on; a bias is as wide as the columns. A block of steps of a column comes
// from memory while the tiles of rows are multiplied with the one before it, each tile fetching its share.
template <typename Format>
void multiply_block(const Product<Format>& product, int64_t num_rows, int64_t num_columns) {
  static constexpr float kZeros[kMaxTileColumns * kColumnWidth] = {};
  const int64_t num_tiles = ceil_div(num_rows, kMaxTileRows);
  const int max_columns = max_tile_columns(static_cast<int>(ceil_div(num_rows, num_tiles)));
  const int64_t num_steps = ceil_div(product.num_inputs, Format::kInputs);
  const int64_t block_steps = ceil_div(num_steps, ceil_div(product.num_inputs, kBlockInputs));
  // From two whole tiles on, unpacking once costs less than in each of them.
  [[maybe_unused]] const bool unpacks = num_rows >= 2 * kMaxTileRows && max_columns == 1;
  [[maybe_unused]] alignas(64) float unpacked[Format::kInputs > 1 ? kBlockInputs * kColumnWidth : 1];
  for (int64_t first_step = 0; first_step < num_steps; first_step += block_steps) {
    const int64_t first_input = first_step * Format::kInputs;
    Tile<Format> tile;
    tile.x_stride = product.x_stride;
    tile.column_bytes = product.column_bytes;
    tile.num_inputs = min(product.num_inputs - first_input, block_steps * Format::kInputs);
    tile.y_stride = product.y_stride;
    for (int64_t column = 0; column < num_columns;) {
      int tile_columns = max_columns;
      while (tile_columns > num_columns - column) tile_columns /= 2;
      tile.weight = product.weight + column * product.column_bytes + first_step * kStepBytes;
      const char* next = tile.weight + tile_columns * product.column_bytes;
      if (column + tile_columns == num_columns && first_step + block_steps < num_steps) {
        next = product.weight + (first_step + block_steps) * kStepBytes;
      }
      tile.ahead_bytes = kStepBytes / num_tiles;
      if constexpr (Format::kInputs > 1) {
        if (unpacks) unpack_steps<Format>(tile.weight, ceil_div(tile.num_inputs, Format::kInputs), unpacked);
      }
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t row = num_rows * t / num_tiles;
        tile.x = product.x + row * product.x_stride + first_input;
        tile.y = product.y + row * product.y_stride + column * kColumnWidth;
        if (first_step > 0) {
          tile.start = tile.y;
          tile.start_stride = product.y_stride;
        } else {
          tile.start = product.bias == nullptr ? kZeros : product.bias + column * kColumnWidth;
          tile.start_stride = 0;
        }
        tile.ahead = next + t * tile.ahead_bytes * block_steps;
        const int tile_rows = static_cast<int>(num_rows * (t + 1) / num_tiles - row);
        if constexpr (Format::kInputs > 1) {
          if (unpacks) {
            multiply_tile_of<Float32, kMaxTileRows, 1>(tile_rows, 1, unpacked_tile(tile, unpacked));
            continue;
          }
        }
        multiply_tile_of<Format, kMaxTileRows, kMaxTileColumns>(tile_rows, tile_columns, tile);
      }
      column += tile_columns;
    }
  }
}

// The first `num_outputs` of a column: what is beyond them in y belongs to others.
template <typename Format>
void multiply_partial_column(Product<Format> product, int64_t num_rows, int64_t num_outputs) {
  float bias[kColumnWidth] = {};
  if (product.bias != nullptr) {
    std::memcpy(bias, product.bias, num_outputs * sizeof(float));
    product.bias = bias;
  }
  float sums[kBlockRows * kColumnWidth];
  float* const y = product.y;
  const int64_t y_stride = product.y_stride;
  product.y = sums;
  product.y_stride = kColumnWidth;
  multiply_block(product, num_rows, 1);
  for (int64_t row = 0; row < num_rows; ++row) {
    std::memcpy(y + row * y_stride, sums + row * kColumnWidth, num_outputs * sizeof(float));
  }
}

template <typename Format>
void multiply(const Product<Format>& product, int64_t begin_row, int64_t end_row, int64_t begin_column,
              int64_t end_column, int64_t num_outputs) {
  // Few rows pass by all inputs of a column at once, as the weights lie in memory.
  const int64_t max_block_columns =
      end_row - begin_row <= kMaxTileRows ? max_tile_columns(static_cast<int>(end_row - begin_row)) : kBlockColumns;
  for (int64_t column = begin_column; column < end_column;) {
    const int64_t outputs_left = num_outputs - column * kColumnWidth;
    const int64_t block_columns = min(min(end_column - column, max_block_columns), outputs_left / kColumnWidth);
    for (int64_t row = begin_row; row < end_row; row += kBlockRows) {
      const int64_t block_rows = min(end_row - row, kBlockRows);
      Product<Format> block = product;
      block.x += row * product.x_stride;
      block.weight += column * product.column_bytes;
      if (product.bias != nullptr) block.bias += column * kColumnWidth;
      block.y += row * product.y_stride + column * kColumnWidth;
      if (block_columns > 0) {
        multiply_block(block, block_rows, block_columns);
      } else {
        multiply_partial_column(block, block_rows, outputs_left);
      }
    }
    column += block_columns > 0 ? block_columns : 1;
  }
}

// The threads share whole columns, and where there are few of them also the rows.
template <typename Format>
void multiply_parallel(const Product<Format>& product, int64_t num_rows, int64_t num_outputs) {
  constexpr int64_t kMinThreadBytes = 32768;  // of weights, times rows: less is done before another thread has begun
  constexpr int64_t kMinThreadColumns = 8;    // the threads' shares differ by an eighth of that at most
  const int64_t num_columns = ceil_div(num_outputs, kColumnWidth);
  const int64_t num_parts =
      min(ceil_div(num_threads() * kMinThreadColumns, num_columns), ceil_div(num_rows, kBlockRows));
  const int64_t grain = 1 + kMinThreadBytes * num_parts / (product.column_bytes * num_rows);
  parallel_for(num_parts * num_columns, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t part = begin / num_columns;
      const int64_t part_end = min((part + 1) * num_columns, end);
      multiply(product, num_rows * part / num_parts, num_rows * (part + 1) / num_parts, begin - part * num_columns,
               part_end - part * num_columns, num_outputs);
      begin = part_end;
    }
  });
}

#if defined(__AVX512BF16__)
// Rounds a row to bfloat16; what is missing to a whole pair is 0.
void round_row(const float* x, int64_t num_inputs, uint32_t* pairs) {
  for (int64_t i = 0; i < num_inputs; i += kLanes) {
    const int64_t left = num_inputs - i;
    const __mmask16 present = left < kLanes ? (1U << left) - 1 : 0xFFFF;
    const __mmask16 stored = left < kLanes ? (1U << ((left + 1) / 2 * 2)) - 1 : 0xFFFF;
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(present, x + i));
    _mm256_mask_storeu_epi16(pairs + i / 2, stored, (__m256i)rounded);
  }
}

void apply_bfloat16(Product<BFloat16> product, const float* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs,
                    int64_t num_outputs) {
  static thread_local Scratch scratch;
  product.num_inputs = (num_inputs + 1) / 2;
  product.x_stride = product.num_inputs;
  uint32_t* pairs = reinterpret_cast<uint32_t*>(scratch.floats(num_rows * product.x_stride));
  parallel_for(num_rows, 32, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      round_row(x + row * x_stride, num_inputs, pairs + row * product.x_stride);
    }
  });
  product.x = pairs;
  multiply_parallel(product, num_rows, num_outputs);
}
#else
void apply_bfloat16(Product<BFloat16> product, const float* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs,
                    int64_t num_outputs) {
  product.x = x;
  product.x_stride = x_stride;
  product.num_inputs = num_inputs;
  multiply_parallel(product, num_rows, num_outputs);
}
#endif

template <typename Format>
Product<Format> product_of(const DenseWeight& weight, float* y, int64_t y_stride) {
  Product<Format> product = {};
  product.weight = static_cast<const char*>(weight.packed);
  product.column_bytes = packed_bytes(weight.format, kColumnWidth, weight.num_inputs);
  product.bias = weight.bias;
  product.y = y;
  product.y_stride = y_stride;
  return product;
}

void apply(const DenseWeight& weight, const float* x, int64_t x_stride, int64_t num_rows, float* y, int64_t y_stride) {
  if (num_rows == 0) return;
  if (weight.format == WeightFormat::kBFloat16) {
    apply_bfloat16(product_of<BFloat16>(weight, y, y_stride), x, x_stride, num_rows, weight.num_inputs,
                   weight.num_outputs);
    return;
  }
  Product<Float32> product = product_of<Float32>(weight, y, y_stride);
  product.x = x;
  product.x_stride = x_stride;
  product.num_inputs = weight.num_inputs;
  multiply_parallel(product, num_rows, weight.num_outputs);
}

template <typename Element, int kPerStep>
void pack_columns(const Element* weight, int64_t num_outputs, int64_t num_inputs, Element* packed) {
  const int64_t num_columns = ceil_div(num_outputs, kColumnWidth);
  const int64_t num_steps = ceil_div(num_inputs, kPerStep);
  parallel_for(num_columns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; ++column) {
      Element* to = packed + column * num_steps * kColumnWidth * kPerStep;
      for (int64_t step = 0; step < num_steps; ++step) {
        for (int64_t i = 0; i < kColumnWidth; ++i) {
          const int64_t output = column * kColumnWidth + i;
          for (int64_t input = step * kPerStep; input < (step + 1) * kPerStep; ++input) {
            *to++ = output < num_outputs && input < num_inputs ? weight[output * num_inputs + input] : Element{0};
          }
        }
      }
    }
  });
}

void pack(WeightFormat format, const void* weight, int64_t num_outputs, int64_t num_inputs, void* packed) {
  if (format == WeightFormat::kBFloat16) {
    pack_columns<uint16_t, 2>(static_cast<const uint16_t*>(weight), num_outputs, num_inputs,
                              static_cast<uint16_t*>(packed));
  } else {
    pack_columns<float, 1>(static_cast<const float*>(weight), num_outputs, num_inputs, static_cast<float*>(packed));
  }
}

float to_float(float element) { return element; }
float to_float(uint16_t element) { return bfloat16_to_float(element); }

template <typename Element, int kPerStep>
void unpack_rows_as(const DenseWeight& weight, const int64_t* outputs, int64_t num_rows, float* values) {
  constexpr int64_t kMinThreadBytes = 65536;  // read in some microseconds, as long as a thread takes to begin
  const int64_t num_inputs = weight.num_inputs;
  const int64_t column_elements = ceil_div(num_inputs, kPerStep) * kPerStep * kColumnWidth;
  const int64_t grain = 1 + kMinThreadBytes / (column_elements * static_cast<int64_t>(sizeof(Element)));
  parallel_for(num_rows, grain, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Element* from = static_cast<const Element*>(weight.packed) + outputs[row] / kColumnWidth * column_elements +
                            outputs[row] % kColumnWidth * kPerStep;
      float* to = values + row * num_inputs;
      for (int64_t input = 0; input < num_inputs; ++input) {
        to[input] = to_float(from[input / kPerStep * kPerStep * kColumnWidth + input % kPerStep]);
      }
    }
  });
}

void unpack_rows(const DenseWeight& weight, const int64_t* outputs, int64_t num_rows, float* values) {
  const auto unpack = weight.format == WeightFormat::kBFloat16 ? unpack_rows_as<uint16_t, 2> : unpack_rows_as<float, 1>;
  unpack(weight, outputs, num_rows, values);
}

}  // namespace

extern const DenseLinearKernels dense_linear = {pack, apply, unpack_rows};

}  // namespace deepinfer::cpu::DEEPINFER_ISA
