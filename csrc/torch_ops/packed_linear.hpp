// y = x Wᵀ + bias with a weight that was packed for the kernels when the model was loaded.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace deepinfer {

// torch.classes.deepinfer.PackedLinear. Owns its packed weight and bias, which never change: any thread may read them.
// A subclass is one format of weights; Python sees only this class.
class PackedLinear : public torch::CustomClassHolder {
 public:
  PackedLinear(int64_t num_outputs, int64_t num_inputs) : num_outputs_(num_outputs), num_inputs_(num_inputs) {}

  [[nodiscard]] int64_t num_outputs() const { return num_outputs_; }
  [[nodiscard]] int64_t num_inputs() const { return num_inputs_; }
  // Of the packed weight, without the bias.
  [[nodiscard]] virtual int64_t num_bytes() const = 0;

  // x [num_rows, num_inputs], rows x_stride apart → y [num_rows, num_outputs], rows y_stride apart. A row's outputs do
  // not depend on the other rows of the call. Only the thread that computes for the engine calls it.
  virtual void apply(const float* x, int64_t x_stride, int64_t num_rows, float* y, int64_t y_stride) const = 0;

  // values[i] = weight[outputs[i]], contiguous [num_rows, num_inputs]: the packed numbers in float32. The same thread.
  virtual void unpack_rows(const int64_t* outputs, int64_t num_rows, float* values) const = 0;

 private:
  int64_t num_outputs_;
  int64_t num_inputs_;
};

// Packs the concatenation over outputs of weights [num_outputs_i, num_inputs], all float32 or all bfloat16, each with
// its bias [num_outputs_i] or without.
[[nodiscard]] c10::intrusive_ptr<PackedLinear> pack_dense(const std::vector<at::Tensor>& weights,
                                                          const std::vector<std::optional<at::Tensor>>& biases);

// The concatenation of biases [num_outputs of the weight] as float32, zeros where there is none; not defined if there is
// none at all.
[[nodiscard]] at::Tensor merge_biases(const std::vector<std::optional<at::Tensor>>& biases,
                                      const std::vector<at::Tensor>& weights);

// Packs the concatenation over outputs of weights of `bits` bits (cpu/grouped_linear.hpp): codes [num_outputs_i,
// num_inputs] uint8 below 2^bits, scales and offsets [num_outputs_i, num_inputs / group_size] float32, which become
// float16, and biases [num_outputs_i]; where there are no offsets they are -2^(bits-1) * scale.
[[nodiscard]] c10::intrusive_ptr<PackedLinear> pack_groups(int64_t bits, const std::vector<at::Tensor>& codes,
                                                           const std::vector<at::Tensor>& scales,
                                                           const std::vector<std::optional<at::Tensor>>& offsets,
                                                           const std::vector<std::optional<at::Tensor>>& biases);

}  // namespace deepinfer
