// PackedLinear with float32 or bfloat16 weights.
#include <ATen/ops/cat.h>

#include "kernels/cpu/linear.hpp"
#include "torch_ops/packed_linear.hpp"
#include "torch_ops/weight_memory.hpp"

namespace deepinfer {

namespace {

using cpu::WeightFormat;

class DenseLinear final : public PackedLinear {
 public:
  // weight [num_outputs, num_inputs], contiguous; bias [num_outputs] float32 or not defined
  DenseLinear(const at::Tensor& weight, at::Tensor bias)
      : PackedLinear(weight.size(0), weight.size(1)),
        format_(weight.scalar_type() == at::kFloat ? WeightFormat::kFloat32 : WeightFormat::kBFloat16),
        packed_(weight_memory(cpu::packed_bytes(format_, num_outputs(), num_inputs()), at::kByte)),
        bias_(std::move(bias)) {
    cpu::dense_linear().pack(format_, weight.const_data_ptr(), num_outputs(), num_inputs(), packed_.mutable_data_ptr());
  }

  [[nodiscard]] int64_t num_bytes() const override { return packed_.numel(); }

  void apply(const float* x, int64_t x_stride, int64_t num_rows, float* y, int64_t y_stride) const override {
    cpu::dense_linear().apply(weight(), x, x_stride, num_rows, y, y_stride);
  }

  void unpack_rows(const int64_t* outputs, int64_t num_rows, float* values) const override {
    cpu::dense_linear().unpack_rows(weight(), outputs, num_rows, values);
  }

 private:
  [[nodiscard]] cpu::DenseWeight weight() const {
    return {format_, num_outputs(), num_inputs(), packed_.const_data_ptr(),
            bias_.defined() ? bias_.const_data_ptr<float>() : nullptr};
  }

  WeightFormat format_;
  at::Tensor packed_;
  at::Tensor bias_;
};

}  // namespace

c10::intrusive_ptr<PackedLinear> pack_dense(const std::vector<at::Tensor>& weights,
                                            const std::vector<std::optional<at::Tensor>>& biases) {
  TORCH_CHECK_VALUE(!weights.empty(), "weights is empty: needs at least 1");
  const at::ScalarType dtype = weights[0].scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, "weights[0] is ", dtype,
                    ": must be float32 or bfloat16");
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& weight = weights[i];
    TORCH_CHECK_VALUE(weight.device().is_cpu() && weight.scalar_type() == dtype, "weights[", i, "] is ",
                      weight.scalar_type(), " on ", weight.device(), ": must be ", dtype, " on the CPU");
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.numel() > 0 && weight.size(1) == weights[0].size(1), "weights[", i,
                      "] has shape ", weight.sizes(), ": must be [num_outputs, num_inputs], num_inputs as weights[0]");
  }
  const at::Tensor weight = weights.size() == 1 ? weights[0].contiguous() : at::cat(weights);
  return c10::make_intrusive<DenseLinear>(weight, merge_biases(biases, weights));
}

}  // namespace deepinfer
