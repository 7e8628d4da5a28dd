#include "kernels/cpu/kv_cache_write.hpp"

#include "kernels/cpu/scratch.hpp"
#include "kernels/cpu/vec.hpp"
#include "kernels/parallel.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

constexpr int64_t kMinElements = 1 << 14;  // of a step's rows, worth another thread

// x may be `from`.
void normalize(const float* from, const float* weight, float eps, int64_t dim, float* x) {
  F32 squares = {};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) squares = fma(load(from + i), load(from + i), squares);
  float total = sum(squares);
  for (; i < dim; ++i) total += from[i] * from[i];
  const float factor = 1.0F / __builtin_sqrtf(total / static_cast<float>(dim) + eps);
  for (i = 0; i < dim; ++i) x[i] = from[i] * factor * weight[i];
}

void turn(const float* cos, const float* sin, int64_t half, float* x) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32 a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(a * c - b * s, x + i);
    store(b * c + a * s, x + half + i);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

float largest_magnitude(const float* row, int64_t dim) {
  float most = 0.0F;
  for (int64_t i = 0; i < dim; ++i) {
    const float magnitude = __builtin_fabsf(row[i]);
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

// How the elements of a row are stored. AsInt8 writes the row's scale to scales[index]; the others have none.
struct AsFloat {
  using Element = float;
  AsFloat(const float*, int64_t, float*, int64_t) {}
  [[nodiscard]] float operator()(float value) const { return value; }
};

struct AsBFloat16 {
  using Element = uint16_t;
  AsBFloat16(const float*, int64_t, float*, int64_t) {}
  [[nodiscard]] uint16_t operator()(float value) const { return float_to_bfloat16(value); }
};

struct AsInt8 {
  using Element = int8_t;
  AsInt8(const float* row, int64_t dim, float* scales, int64_t index) {
    const float most = largest_magnitude(row, dim);
    scales[index] = most / 127.0F;
    inverse_ = most > 0.0F ? 127.0F / most : 0.0F;
  }
  [[nodiscard]] int8_t operator()(float value) const { return static_cast<int8_t>(__builtin_rintf(value * inverse_)); }

 private:
  float inverse_;
};

template <typename As>
void store_key(const LayerCache& cache, int64_t block, int64_t offset, const float* key) {
  constexpr int64_t kPacked = 4 / static_cast<int64_t>(sizeof(typename As::Element));
  const As convert(key, cache.key_dim, cache.key_scales, block * cache.block_size + offset);
  auto* to =
      static_cast<typename As::Element*>(cache.keys) + block * cache.key_dim * cache.block_size + offset * kPacked;
  for (int64_t d = 0; d < cache.key_dim; d += kPacked, to += cache.block_size * kPacked) {
    for (int64_t e = 0; e < kPacked; ++e) to[e] = convert(key[d + e]);
  }
}

template <typename As>
void store_value(const LayerCache& cache, int64_t block, int64_t offset, const float* value) {
  const As convert(value, cache.value_dim, cache.value_scales, block * cache.block_size + offset);
  auto* to = static_cast<typename As::Element*>(cache.values) + (block * cache.block_size + offset) * cache.value_dim;
  for (int64_t d = 0; d < cache.value_dim; ++d) to[d] = convert(value[d]);
}

template <typename As>
void write_as(const LayerCache& cache, const AttentionBatch& batch, const Rotary& rotary, const HeadNorms& norms,
              int64_t num_heads, float* query, const float* key, const float* value, int64_t row_stride) {
  const int64_t half = rotary.rotary_dim / 2, key_dim = cache.key_dim;
  const int64_t grain = kMinElements / ((num_heads + 2 * cache.num_kv_heads) * key_dim) + 1;
  parallel_for(batch.num_tokens, grain, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* ready = scratch.floats(key_dim);
    for (int64_t token = begin; token < end; ++token) {
      const float* cos = rotary.cos + token * half;
      const float* sin = rotary.sin + token * half;
      for (int64_t head = 0; query != nullptr && head < num_heads; ++head) {
        float* row = query + token * row_stride + head * key_dim;
        if (norms.query != nullptr) normalize(row, norms.query, norms.eps, key_dim, row);
        turn(cos, sin, half, row);
      }
      const int64_t block = batch.slot_mapping[token] / cache.block_size;
      const int64_t offset = batch.slot_mapping[token] % cache.block_size;
      for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
        const float* row = key + token * row_stride + head * key_dim;
        if (norms.key != nullptr) {
          normalize(row, norms.key, norms.eps, key_dim, ready);
        } else {
          std::memcpy(ready, row, static_cast<size_t>(key_dim) * sizeof(float));
        }
        turn(cos, sin, half, ready);
        const int64_t block_of_head = block * cache.num_kv_heads + head;
        store_key<As>(cache, block_of_head, offset, ready);
        store_value<As>(cache, block_of_head, offset, value + token * row_stride + head * cache.value_dim);
      }
    }
  });
}

}  // namespace

void write_kv_cache(const LayerCache& cache, const AttentionBatch& batch, const Rotary& rotary, const HeadNorms& norms,
                    int64_t num_heads, float* query, const float* key, const float* value, int64_t row_stride) {
  const auto write = cache.dtype == DType::kFloat32    ? write_as<AsFloat>
                     : cache.dtype == DType::kBFloat16 ? write_as<AsBFloat16>
                                                       : write_as<AsInt8>;
  write(cache, batch, rotary, norms, num_heads, query, key, value, row_stride);
}

}  // namespace deepinfer::cpu::DEEPINFER_ISA
