#include "kernels/cpu/elementwise.hpp"

#include "kernels/cpu/vec.hpp"
#include "kernels/cpu/vec_math.hpp"
#include "kernels/parallel.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

// What one thread should have at least: so many floats take as long as a fork or two, some 5 to 10 microseconds.
constexpr int64_t kMinFloatsPerThread = 32768;
// The same of argmax, which only reads and compares; and into how many parts it divides one row at most.
constexpr int64_t kMinFloatsPerPart = 65536;
constexpr int64_t kMaxParts = 64;

int64_t rows_per_thread(int64_t size) { return size >= kMinFloatsPerThread ? 1 : kMinFloatsPerThread / (size + 1) + 1; }

// Adds x to the residual where there is one. Returns the sum of the squares of what is to be normalized.
float add_and_square(const float* x, float* residual, int64_t size) {
  constexpr int64_t kUnrolled = 4;  // sums that do not wait for each other
  F32 squares[kUnrolled] = {};
  int64_t i = 0;
  const auto step = [&](F32& total, F32 value) {
    if (residual != nullptr) {
      value += load(residual + i);
      store(value, residual + i);
    }
    total = fma(value, value, total);
  };
  while (i + kUnrolled * kLanes <= size) {
    for (F32& total : squares) {
      step(total, load(x + i));
      i += kLanes;
    }
  }
  for (; i + kLanes <= size; i += kLanes) step(squares[0], load(x + i));
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < size; ++i) {
    float value = x[i];
    if (residual != nullptr) value = residual[i] += value;
    total += value * value;
  }
  return total;
}

void rms_norm(const float* x, float* residual, const float* weight, float eps, int64_t num_rows, int64_t size,
              float* out) {
  parallel_for(num_rows, rows_per_thread(size), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* kept = residual == nullptr ? nullptr : residual + row * size;
      const float squares = add_and_square(x + row * size, kept, size);
      const float* from = kept == nullptr ? x + row * size : kept;
      const float scale = 1.0F / __builtin_sqrtf(squares / static_cast<float>(size) + eps);
      float* to = out + row * size;
      int64_t i = 0;
      for (; i + kLanes <= size; i += kLanes) store(load(from + i) * scale * load(weight + i), to + i);
      for (; i < size; ++i) to[i] = from[i] * scale * weight[i];
    }
  });
}

F32 silu_mul(F32 gate, F32 up) { return gate / (exp(-gate) + 1.0F) * up; }

void silu_mul(const float* gate_up, int64_t num_rows, int64_t size, float* out) {
  constexpr int64_t kWork = 4;  // times as much for a float as elsewhere
  parallel_for(num_rows, rows_per_thread(size * kWork), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* gate = gate_up + 2 * row * size;
      const float* up = gate + size;
      float* to = out + row * size;
      int64_t i = 0;
      for (; i + kLanes <= size; i += kLanes) store(silu_mul(load(gate + i), load(up + i)), to + i);
      if (i < size)
        store_first(silu_mul(load_first(gate + i, size - i), load_first(up + i, size - i)), to + i, size - i);
    }
  });
}

void rotary_angles(const int64_t* positions, const float* inv_freq, float scaling, int64_t num_rows, int64_t rotary_dim,
                   float* cos, float* sin) {
  constexpr int64_t kWork = 32;
  const int64_t half = rotary_dim / 2;
  parallel_for(num_rows, rows_per_thread(half * kWork), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float position = static_cast<float>(positions[row]);
      for (int64_t i = 0; i < half; ++i) {
        const float angle = position * inv_freq[i];
        cos[row * half + i] = __builtin_cosf(angle) * scaling;
        sin[row * half + i] = __builtin_sinf(angle) * scaling;
      }
    }
  });
}

struct Largest {
  float value;
  int64_t index;
};

// Of logits[begin, end): by blocks that stay in the nearest cache, so that only the best one is looked through for
// where it has its largest.
Largest largest_of(const float* logits, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 2048;
  Largest best{-__builtin_inff(), begin};
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t block_end = block + kBlock < end ? block + kBlock : end;
    F32 most[4];
    for (F32& each : most) each = broadcast(best.value);
    int64_t i = block;
    // A comparison with NaN is false, and leaves what is there.
    for (; i + 4 * kLanes <= block_end; i += 4 * kLanes) {
      for (int64_t j = 0; j < 4; ++j) most[j] = max(load(logits + i + j * kLanes), most[j]);
    }
    float value = max_lane(max(max(most[0], most[1]), max(most[2], most[3])));
    for (; i < block_end; ++i) value = logits[i] > value ? logits[i] : value;
    if (!(value > best.value)) continue;
    int64_t index = block;
    while (logits[index] != value) ++index;
    best = {value, index};
  }
  return best;
}

void argmax(const float* logits, int64_t num_rows, int64_t size, int64_t* token_ids) {
  // Rows are divided among the threads only where there are fewer rows than threads.
  int64_t num_parts = num_threads() / (num_rows > 0 ? num_rows : 1);
  num_parts = num_parts < size / kMinFloatsPerPart ? num_parts : size / kMinFloatsPerPart;
  if (num_parts <= 1) {
    parallel_for(num_rows, rows_per_thread(size), [=](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) token_ids[row] = largest_of(logits + row * size, 0, size).index;
    });
    return;
  }
  num_parts = num_parts < kMaxParts ? num_parts : kMaxParts;
  for (int64_t row = 0; row < num_rows; ++row) {
    Largest parts[kMaxParts];
    const float* of_row = logits + row * size;
    parallel_for(num_parts, 1, [=, &parts](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        parts[part] = largest_of(of_row, size * part / num_parts, size * (part + 1) / num_parts);
      }
    });
    Largest best = parts[0];
    for (int64_t part = 1; part < num_parts; ++part) {
      if (parts[part].value > best.value) best = parts[part];
    }
    token_ids[row] = best.index;
  }
}

}  // namespace

extern const ElementwiseKernels elementwise;
const ElementwiseKernels elementwise = {rms_norm, silu_mul, rotary_angles, argmax};

}  // namespace deepinfer::cpu::DEEPINFER_ISA
