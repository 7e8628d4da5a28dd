// torch.ops.deepinfer: the small operators of a decoder layer, one tensor of rows in, one out.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "kernels/cpu/elementwise.hpp"
#include "torch_ops/tensor_checks.hpp"

namespace deepinfer {

namespace {

using at::Tensor;

void check_rows(const Tensor& rows, const char* name) {
  TORCH_CHECK_VALUE(
      rows.dim() == 2 && rows.is_contiguous() && rows.device().is_cpu() && rows.scalar_type() == at::kFloat, name,
      " is ", rows.toString(), " ", rows.sizes(), ": must be contiguous float32 rows [num_rows, size] on CPU");
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, const std::optional<Tensor>& residual) {
  check_rows(x, "x");
  check_tensor("weight", weight, at::kFloat, {x.size(1)});
  float* kept = nullptr;
  if (residual.has_value()) {
    check_rows(*residual, "residual");
    TORCH_CHECK_VALUE(residual->sizes() == x.sizes(), "residual is ", residual->sizes(), ": must be ", x.sizes(),
                      " as x is");
    kept = residual->mutable_data_ptr<float>();
  }
  Tensor out = at::empty_like(x);
  cpu::elementwise().rms_norm(x.const_data_ptr<float>(), kept, weight.const_data_ptr<float>(), static_cast<float>(eps),
                              x.size(0), x.size(1), out.mutable_data_ptr<float>());
  return out;
}

Tensor silu_mul(const Tensor& gate_up) {
  check_rows(gate_up, "gate_up");
  TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, "gate_up has rows of ", gate_up.size(1), ": must be even");
  const int64_t size = gate_up.size(1) / 2;
  Tensor out = at::empty({gate_up.size(0), size}, gate_up.options());
  cpu::elementwise().silu_mul(gate_up.const_data_ptr<float>(), gate_up.size(0), size, out.mutable_data_ptr<float>());
  return out;
}

std::tuple<Tensor, Tensor> rotary_angles(const Tensor& positions, const Tensor& inv_freq, double scaling) {
  check_tensor("positions", positions, at::kLong, {positions.numel()});
  check_tensor("inv_freq", inv_freq, at::kFloat, {inv_freq.numel()});
  const int64_t half = inv_freq.size(0);
  Tensor cos = at::empty({positions.size(0), half}, inv_freq.options());
  Tensor sin = at::empty_like(cos);
  cpu::elementwise().rotary_angles(positions.const_data_ptr<int64_t>(), inv_freq.const_data_ptr<float>(),
                                   static_cast<float>(scaling), positions.size(0), 2 * half,
                                   cos.mutable_data_ptr<float>(), sin.mutable_data_ptr<float>());
  return {cos, sin};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!)? residual=None) -> Tensor", &rms_norm);
  m.def("silu_mul(Tensor gate_up) -> Tensor", &silu_mul);
  m.def("rotary_angles(Tensor positions, Tensor inv_freq, float scaling=1.0) -> (Tensor cos, Tensor sin)",
        &rotary_angles);
}

}  // namespace deepinfer
