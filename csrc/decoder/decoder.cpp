#include "decoder/decoder.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "kernels/cpu/elementwise.hpp"

namespace deepinfer {

namespace {

constexpr int64_t kAlignmentBytes = 64;

// to[i] = from[rows[i]], for rows of `size`; `to` and `from` do not overlap.
void gather_rows(const float* from, const int64_t* rows, int64_t num_rows, int64_t size, float* to) {
  for (int64_t row = 0; row < num_rows; ++row) {
    std::memcpy(to + row * size, from + rows[row] * size, static_cast<size_t>(size) * sizeof(float));
  }
}

}  // namespace

int64_t Projection::num_outputs() const {
  int64_t total = 0;
  for (const auto& part : parts) total += part->num_outputs();
  return total;
}

void Projection::apply(const float* x, int64_t num_rows, float* y) const {
  const int64_t y_stride = num_outputs();
  for (const auto& part : parts) {
    part->apply(x, num_rows, y, y_stride);
    y += part->num_outputs();
  }
}

void Activations::Free::operator()(float* data) const { std::free(data); }

float* Activations::at_least(int64_t count) {
  if (count > capacity_) {
    const int64_t num_bytes = count * static_cast<int64_t>(sizeof(float));
    const int64_t padded = (num_bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
    data_.reset();
    capacity_ = 0;
    data_.reset(static_cast<float*>(std::aligned_alloc(kAlignmentBytes, static_cast<size_t>(padded))));
    if (data_ == nullptr) throw std::bad_alloc();
    capacity_ = count;
  }
  return data_.get();
}

Decoder::Decoder(DecoderConfig config, DecoderEnds ends) : config_(std::move(config)), ends_(std::move(ends)) {}

void Decoder::add_layer(DecoderLayer layer) { layers_.push_back(std::move(layer)); }

void Decoder::forward(const DecoderStep& step, float* hidden_states, float* logits, float* token_states) {
  const cpu::ElementwiseKernels& elementwise = cpu::elementwise();
  const cpu::PagedAttentionKernels& attention = cpu::paged_attention();
  const DecoderConfig& config = config_;
  int64_t num_rows = step.batch.num_tokens;
  const int64_t most_rows = std::max(num_rows, step.num_logits);
  const int64_t num_angles = num_rows * config.rotary_dim() / 2;
  float* residual = residual_.at_least(most_rows * config.hidden_size);
  float* hidden = hidden_.at_least(most_rows * config.hidden_size);
  float* qkv = qkv_.at_least(most_rows * config.qkv_size());
  float* attended = attended_.at_least(most_rows * config.query_size());
  float* gate_up = gate_up_.at_least(most_rows * 2 * config.intermediate_size);
  float* activated = activated_.at_least(most_rows * config.intermediate_size);
  float* cos = cos_.at_least(num_angles);
  float* sin = sin_.at_least(num_angles);
  const cpu::Rotary rotary{config.rotary_dim(), cos, sin};

  const auto sum_over_ranks = [&](int64_t rows) {
    if (sum_over_ranks_) sum_over_ranks_(hidden, rows * config.hidden_size);
  };

  if (step.embeddings == nullptr) {
    ends_.embedding->unpack_rows(step.token_ids, num_rows, residual);
  } else {
    std::copy_n(step.embeddings, num_rows * config.hidden_size, residual);
  }
  elementwise.rotary_angles(step.positions, config.inv_freq.data(), config.rotary_scaling, num_rows,
                            config.rotary_dim(), cos, sin);
  for (size_t index = 0; index < layers_.size(); ++index) {
    const DecoderLayer& layer = layers_[index];
    const cpu::LayerCache& cache = step.caches[index];
    const auto norm = [&](const float* x, float* added_to, const float* weight) {
      elementwise.rms_norm(x, added_to, weight, config.rms_norm_eps, num_rows, config.hidden_size, hidden);
    };
    // The embeddings are the first residual; there is nothing to add to them yet.
    if (index == 0) {
      norm(residual, nullptr, layer.input_norm);
    } else {
      norm(hidden, residual, layer.input_norm);
    }
    layer.qkv.apply(hidden, num_rows, qkv);
    const float* key = qkv + config.query_size();
    attention.write(cache, step.batch, rotary, {layer.query_norm, layer.key_norm, config.rms_norm_eps},
                    config.num_heads, qkv, key, key + config.key_size(), config.qkv_size());
    const bool is_last = index + 1 == layers_.size() && token_states == nullptr;
    if (is_last && step.num_logits == 0) return;
    attention.attend(cache, step.batch, config.num_heads, qkv, config.qkv_size(), config.attention_scale, layer.window,
                     attended);
    if (is_last) {
      // From here on nothing passes between rows: those that nobody asked for end here.
      num_rows = step.num_logits;
      gather_rows(attended, step.logits_indices, num_rows, config.query_size(), qkv);
      gather_rows(residual, step.logits_indices, num_rows, config.hidden_size, hidden);
      std::swap(attended, qkv);
      std::swap(residual, hidden);
    }
    layer.output.apply(attended, num_rows, hidden);
    sum_over_ranks(num_rows);
    norm(hidden, residual, layer.post_attention_norm);
    layer.gate_up.apply(hidden, num_rows, gate_up);
    elementwise.silu_mul(gate_up, num_rows, config.intermediate_size, activated);
    layer.down.apply(activated, num_rows, hidden);
    sum_over_ranks(num_rows);
  }
  float* final_states = token_states == nullptr ? hidden_states : token_states;
  elementwise.rms_norm(hidden, residual, ends_.final_norm, config.rms_norm_eps, num_rows, config.hidden_size,
                       final_states);
  if (token_states != nullptr) {
    gather_rows(token_states, step.logits_indices, step.num_logits, config.hidden_size, hidden_states);
  }
  ends_.output_layer.apply(hidden_states, step.num_logits, logits);
}

}  // namespace deepinfer
