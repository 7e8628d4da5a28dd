// torch.classes.deepinfer.Decoder: a whole step of a model of the Llama family in one call.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "decoder/decoder.hpp"
#include "torch_ops/classes.hpp"
#include "torch_ops/layer_cache.hpp"
#include "torch_ops/packed_linear.hpp"
#include "torch_ops/tensor_checks.hpp"

namespace deepinfer {

namespace {

using at::Tensor;
using LinearPtr = c10::intrusive_ptr<PackedLinear>;

class DecoderLinear final : public Linear {
 public:
  explicit DecoderLinear(LinearPtr linear) : linear_(std::move(linear)) {}
  int64_t num_outputs() const override { return linear_->num_outputs(); }
  int64_t num_inputs() const override { return linear_->num_inputs(); }
  void apply(const float* x, int64_t num_rows, float* y, int64_t y_stride) const override {
    linear_->apply(x, num_inputs(), num_rows, y, y_stride);
  }
  void unpack_rows(const int64_t* outputs, int64_t num_rows, float* values) const override {
    linear_->unpack_rows(outputs, num_rows, values);
  }

 private:
  LinearPtr linear_;
};

Projection projection(const char* name, const std::vector<LinearPtr>& parts, int64_t num_inputs, int64_t num_outputs) {
  Projection result;
  for (const LinearPtr& part : parts) {
    TORCH_CHECK_VALUE(part->num_inputs() == num_inputs, name, " takes ", part->num_inputs(), " inputs: must be ",
                      num_inputs);
    result.parts.push_back(std::make_shared<DecoderLinear>(part));
  }
  TORCH_CHECK_VALUE(result.num_outputs() == num_outputs, name, " has ", result.num_outputs(), " outputs: must be ",
                    num_outputs);
  return result;
}

const float* vector_data(const char* name, const Tensor& vector, int64_t size) {
  check_tensor(name, vector, at::kFloat, {size});
  return vector.const_data_ptr<float>();
}

// [num_rows, size] of a buffer that grows to the most rows asked for. Views of a smaller one keep that one alive.
Tensor first_rows(Tensor& buffer, int64_t num_rows, int64_t size) {
  if (!buffer.defined() || buffer.size(0) < num_rows) buffer = at::empty({num_rows, size}, at::kFloat);
  return buffer.narrow(0, 0, num_rows);
}

// torch.distributed's in-place sum over the ranks of the group of that name.
SumOverRanks sum_over_group(const std::string& group_name) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto all_reduce = dispatcher.findSchemaOrThrow("_c10d_functional::all_reduce_", "");
  const auto wait = dispatcher.findSchemaOrThrow("_c10d_functional::wait_tensor", "");
  return [all_reduce, wait, group_name](float* values, int64_t count) {
    // Boxed: torch does not keep the C++ types of these operators.
    torch::jit::Stack stack{at::from_blob(values, {count}, at::kFloat), "sum", group_name};
    all_reduce.callBoxed(&stack);
    wait.callBoxed(&stack);
  };
}

// Built layer by layer, then run. Keeps what it is given, whose contents do not change any more.
class DecoderModule : public torch::CustomClassHolder {
 public:
  DecoderModule(int64_t hidden_size, int64_t intermediate_size, int64_t num_heads, int64_t num_kv_heads,
                int64_t head_dim, double attention_scale, const Tensor& inv_freq, double rotary_scaling,
                double rms_norm_eps, const LinearPtr& embedding, const Tensor& final_norm,
                const std::vector<LinearPtr>& output_layer)
      : kept_{final_norm}, vocab_size_(embedding->num_outputs()) {
    for (const LinearPtr& part : output_layer) num_logit_columns_ += part->num_outputs();
    for (const auto& [name, value] : {std::pair{"hidden_size", hidden_size},
                                      {"intermediate_size", intermediate_size},
                                      {"num_heads", num_heads},
                                      {"num_kv_heads", num_kv_heads},
                                      {"head_dim", head_dim}}) {
      TORCH_CHECK_VALUE(value > 0, name, " is ", value, ": must be at least 1");
    }
    TORCH_CHECK_VALUE(num_heads % num_kv_heads == 0, "num_heads is ", num_heads,
                      ": must be a multiple of num_kv_heads, ", num_kv_heads);
    TORCH_CHECK_VALUE(2 * inv_freq.numel() <= head_dim, "inv_freq has ", inv_freq.numel(),
                      " elements: must be at most half of head_dim, ", head_dim);
    TORCH_CHECK_VALUE(embedding->num_inputs() == hidden_size, "embedding has rows of ", embedding->num_inputs(),
                      ": must be hidden_size, ", hidden_size);
    const float* frequencies = vector_data("inv_freq", inv_freq, inv_freq.numel());
    decoder_ = std::make_unique<Decoder>(
        DecoderConfig{hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim,
                      static_cast<float>(attention_scale),
                      std::vector<float>(frequencies, frequencies + inv_freq.numel()),
                      static_cast<float>(rotary_scaling), static_cast<float>(rms_norm_eps)},
        DecoderEnds{std::make_shared<DecoderLinear>(embedding), vector_data("final_norm", final_norm, hidden_size),
                    projection("output_layer", output_layer, hidden_size, num_logit_columns_)});
  }

  void add_layer(const std::vector<LinearPtr>& qkv, const std::vector<LinearPtr>& output,
                 const std::vector<LinearPtr>& gate_up, const std::vector<LinearPtr>& down, const Tensor& input_norm,
                 const Tensor& post_attention_norm, const std::optional<Tensor>& query_norm,
                 const std::optional<Tensor>& key_norm, int64_t window) {
    TORCH_CHECK_VALUE(window >= 0, "window is ", window, ": must be at least 0");
    const DecoderConfig& config = decoder_->config();
    const auto head_norm = [&config](const char* name, const std::optional<Tensor>& weight) {
      return weight ? vector_data(name, *weight, config.head_dim) : nullptr;
    };
    decoder_->add_layer({projection("qkv", qkv, config.hidden_size, config.qkv_size()),
                         projection("output", output, config.query_size(), config.hidden_size),
                         projection("gate_up", gate_up, config.hidden_size, 2 * config.intermediate_size),
                         projection("down", down, config.intermediate_size, config.hidden_size),
                         vector_data("input_norm", input_norm, config.hidden_size),
                         vector_data("post_attention_norm", post_attention_norm, config.hidden_size),
                         head_norm("query_norm", query_norm), head_norm("key_norm", key_norm), window});
    kept_.insert(kept_.end(), {input_norm, post_attention_norm});
    for (const auto& norm : {query_norm, key_norm}) {
      if (norm) kept_.push_back(*norm);
    }
  }

  // The ranks of this group compute the model together, see SumOverRanks.
  void use_group(const std::string& group_name) { decoder_->sum_over_ranks(sum_over_group(group_name)); }

  // keys, values and their scales (empty lists unless the cache is int8), one for each layer as `layer_cache_of` takes
  // them: what every later forward writes and reads.
  void use_caches(const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
                  const std::vector<Tensor>& key_scales, const std::vector<Tensor>& value_scales) {
    const DecoderConfig& config = decoder_->config();
    const auto num_layers = static_cast<size_t>(decoder_->num_layers());
    TORCH_CHECK_VALUE(keys.size() == num_layers && values.size() == num_layers, "keys and values have ", keys.size(),
                      " and ", values.size(), " layers: must have ", num_layers);
    TORCH_CHECK_VALUE(
        key_scales.size() == value_scales.size() && (key_scales.empty() || key_scales.size() == num_layers),
        "key_scales and value_scales have ", key_scales.size(), " and ", value_scales.size(),
        " layers: must both have ", num_layers, ", or none");
    caches_.clear();
    kept_caches_.clear();
    for (size_t layer = 0; layer < num_layers; ++layer) {
      const auto scales_of = [layer](const std::vector<Tensor>& scales) {
        return scales.empty() ? std::optional<Tensor>() : scales[layer];
      };
      const cpu::LayerCache cache =
          layer_cache_of(keys[layer], values[layer], scales_of(key_scales), scales_of(value_scales));
      TORCH_CHECK_VALUE(cache.num_kv_heads == config.num_kv_heads && cache.key_dim == config.head_dim &&
                            cache.value_dim == config.head_dim,
                        "keys and values of layer ", layer, " have ", cache.num_kv_heads, " heads of ", cache.key_dim,
                        " and ", cache.value_dim, ": must have ", config.num_kv_heads, " of ", config.head_dim);
      caches_.push_back(cache);
    }
    for (const auto* tensors : {&keys, &values, &key_scales, &value_scales}) {
      kept_caches_.insert(kept_caches_.end(), tensors->begin(), tensors->end());
    }
  }

  // token_ids, positions, slot_mapping [num_tokens] int64; block_tables [num_seqs, max_blocks], seq_lens [num_seqs],
  // query_start_loc [num_seqs + 1] int32; logits_indices [num_logits] int64; embeddings [num_tokens, hidden_size], if the
  // first layer is given others than those of the tokens → logits [num_logits, outputs of the output layer],
  // hidden_states [num_logits, hidden_size], what that was given, and, if wants_token_states, what it would be given of
  // every token [num_tokens, hidden_size]; all float32.
  //
  // All are views of memory that the next forward writes again: whoever reads them is done by then.
  std::tuple<Tensor, Tensor, std::optional<Tensor>> forward(const Tensor& token_ids, const Tensor& positions,
                                                            const Tensor& block_tables, const Tensor& seq_lens,
                                                            const Tensor& query_start_loc, const Tensor& slot_mapping,
                                                            const Tensor& logits_indices,
                                                            const std::optional<Tensor>& embeddings,
                                                            bool wants_token_states) {
    TORCH_CHECK_VALUE(!caches_.empty(), "use_caches comes before the first forward");
    const int64_t num_tokens = token_ids.numel(), num_seqs = seq_lens.numel(), num_logits = logits_indices.numel();
    check_tensor("positions", positions, at::kLong, {num_tokens});
    check_tensor("slot_mapping", slot_mapping, at::kLong, {num_tokens});
    check_tensor("seq_lens", seq_lens, at::kInt, {num_seqs});
    check_tensor("query_start_loc", query_start_loc, at::kInt, {num_seqs + 1});
    TORCH_CHECK_VALUE(block_tables.scalar_type() == at::kInt && block_tables.dim() == 2 &&
                          block_tables.size(0) == num_seqs && block_tables.stride(1) == 1,
                      "block_tables is ", block_tables.toString(), " ", block_tables.sizes(), ": must be int32 [",
                      num_seqs, ", max_blocks], rows contiguous");
    const int64_t hidden_size = decoder_->config().hidden_size;
    if (embeddings) check_tensor("embeddings", *embeddings, at::kFloat, {num_tokens, hidden_size});
    const DecoderStep step{checked_indices("token_ids", token_ids, vocab_size_),
                           embeddings ? embeddings->const_data_ptr<float>() : nullptr,
                           positions.const_data_ptr<int64_t>(),
                           {num_seqs, num_tokens, block_tables.const_data_ptr<int32_t>(), block_tables.stride(0),
                            seq_lens.const_data_ptr<int32_t>(), query_start_loc.const_data_ptr<int32_t>(),
                            slot_mapping.const_data_ptr<int64_t>()},
                           caches_.data(),
                           checked_indices("logits_indices", logits_indices, num_tokens),
                           num_logits};
    const Tensor logits = first_rows(logits_, num_logits, num_logit_columns_);
    const Tensor hidden_states = first_rows(hidden_states_, num_logits, hidden_size);
    std::optional<Tensor> token_states;
    if (wants_token_states) token_states = first_rows(token_states_, num_tokens, hidden_size);
    decoder_->forward(step, hidden_states.mutable_data_ptr<float>(), logits.mutable_data_ptr<float>(),
                      token_states ? token_states->mutable_data_ptr<float>() : nullptr);
    return {logits, hidden_states, token_states};
  }

 private:
  std::vector<Tensor> kept_;  // what the decoder points to
  int64_t vocab_size_;
  int64_t num_logit_columns_ = 0;  // fewer, if the output layer knows a part of the vocabulary
  std::unique_ptr<Decoder> decoder_;
  std::vector<cpu::LayerCache> caches_;
  std::vector<Tensor> kept_caches_;  // whose memory caches_ points to
  Tensor logits_, hidden_states_, token_states_;
};

}  // namespace

void define_decoder(torch::Library& library) {
  library.class_<DecoderModule>("Decoder")
      .def(torch::init<int64_t, int64_t, int64_t, int64_t, int64_t, double, const Tensor&, double, double,
                       const LinearPtr&, const Tensor&, const std::vector<LinearPtr>&>(),
           "",
           {torch::arg("hidden_size"), torch::arg("intermediate_size"), torch::arg("num_heads"),
            torch::arg("num_kv_heads"), torch::arg("head_dim"), torch::arg("attention_scale"), torch::arg("inv_freq"),
            torch::arg("rotary_scaling"), torch::arg("rms_norm_eps"), torch::arg("embedding"), torch::arg("final_norm"),
            torch::arg("output_layer")})
      .def(
          "add_layer", &DecoderModule::add_layer, "",
          {torch::arg("qkv"), torch::arg("output"), torch::arg("gate_up"), torch::arg("down"), torch::arg("input_norm"),
           torch::arg("post_attention_norm"), torch::arg("query_norm"), torch::arg("key_norm"), torch::arg("window")})
      .def("use_group", &DecoderModule::use_group)
      .def("use_caches", &DecoderModule::use_caches)
      .def("forward", &DecoderModule::forward);
}

}  // namespace deepinfer
