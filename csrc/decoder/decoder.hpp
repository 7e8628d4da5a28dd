// A model of the Llama family as one function of a step: token ids → logits, on the CPU kernels.
//
// Nothing is allocated in a step that is no larger than one before it. All activations are float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cpu/paged_attention.hpp"

namespace deepinfer {

// A packed matrix W [num_outputs, num_inputs]: y = x Wᵀ + bias.
class Linear {
 public:
  virtual ~Linear() = default;
  [[nodiscard]] virtual int64_t num_outputs() const = 0;
  [[nodiscard]] virtual int64_t num_inputs() const = 0;
  // x [num_rows, num_inputs] contiguous → y [num_rows, num_outputs], rows y_stride apart.
  virtual void apply(const float* x, int64_t num_rows, float* y, int64_t y_stride) const = 0;
  // values[i] = W[outputs[i]], [num_rows, num_inputs].
  virtual void unpack_rows(const int64_t* outputs, int64_t num_rows, float* values) const = 0;
};

// Matrices of the same inputs, outputs side by side: one, unless their weights are stored in different formats.
struct Projection {
  std::vector<std::shared_ptr<const Linear>> parts;

  [[nodiscard]] int64_t num_outputs() const;
  void apply(const float* x, int64_t num_rows, float* y) const;
};

struct DecoderConfig {
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float attention_scale;
  std::vector<float> inv_freq;  // of the rotary embedding, [rotary_dim / 2]
  float rotary_scaling;         // of its cosines and sines
  float rms_norm_eps;

  [[nodiscard]] int64_t query_size() const { return num_heads * head_dim; }
  [[nodiscard]] int64_t key_size() const { return num_kv_heads * head_dim; }
  [[nodiscard]] int64_t qkv_size() const { return query_size() + 2 * key_size(); }
  [[nodiscard]] int64_t rotary_dim() const { return 2 * static_cast<int64_t>(inv_freq.size()); }
};

struct DecoderLayer {
  Projection qkv;      // hidden_size → qkv_size
  Projection output;   // query_size → hidden_size
  Projection gate_up;  // hidden_size → 2 * intermediate_size
  Projection down;     // intermediate_size → hidden_size
  const float* input_norm;
  const float* post_attention_norm;
  const float* query_norm;  // [head_dim], null: heads are not normalized
  const float* key_norm;
  int64_t window;  // keys that a query sees, itself included; 0: all before it
};

// What comes before and after the layers.
struct DecoderEnds {
  std::shared_ptr<const Linear> embedding;  // [vocab_size, hidden_size], its rows
  const float* final_norm;
  Projection output_layer;  // hidden_size → vocab_size
};

struct DecoderStep {
  const int64_t* token_ids;  // [batch.num_tokens]; not read where there are
  const float* embeddings;   // [batch.num_tokens, hidden_size], what the first layer is given; null: those of token_ids
  const int64_t* positions;  // [batch.num_tokens]
  cpu::AttentionBatch batch;
  const cpu::LayerCache* caches;  // of each layer
  const int64_t* logits_indices;  // [num_logits] rows of token_ids, in any order
  int64_t num_logits;
};

// Floats that are kept from step to step.
class Activations {
 public:
  // At least `count` of them; what was in them is lost if there were fewer.
  float* at_least(int64_t count);

 private:
  struct Free {
    void operator()(float* data) const;
  };
  std::unique_ptr<float[], Free> data_;
  int64_t capacity_ = 0;
};

// values[i] becomes its sum over all ranks that compute the model together, each with a share of the heads and of the
// intermediate size.
using SumOverRanks = std::function<void(float* values, int64_t count)>;

// Owns the activations; norms are the caller's and outlive it. One thread at a time calls `forward`.
class Decoder {
 public:
  Decoder(DecoderConfig config, DecoderEnds ends);

  // Layers run in the order in which they are added; there is at least one before `forward`.
  void add_layer(DecoderLayer layer);
  // Called twice a layer, for all that it adds to the residual; by default this rank is the only one.
  void sum_over_ranks(SumOverRanks sum) { sum_over_ranks_ = std::move(sum); }

  [[nodiscard]] const DecoderConfig& config() const { return config_; }
  [[nodiscard]] int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }

  // Writes the step's keys and values into `caches` and, of the rows in logits_indices, what the output layer is given
  // to hidden_states [num_logits, hidden_size] and what it makes of it to logits [num_logits, vocab_size]. Unless null,
  // token_states [batch.num_tokens, hidden_size] become what it would be given of every token.
  void forward(const DecoderStep& step, float* hidden_states, float* logits, float* token_states);

 private:
  DecoderConfig config_;
  DecoderEnds ends_;
  std::vector<DecoderLayer> layers_;
  SumOverRanks sum_over_ranks_;
  Activations cos_, sin_, residual_, hidden_, qkv_, attended_, gate_up_, activated_;
};

}  // namespace deepinfer
