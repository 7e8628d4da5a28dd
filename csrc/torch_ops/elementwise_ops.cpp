// torch.ops.deepinfer: the small operators of a decoder layer, one tensor of rows in, one out.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "kernels/cpu/elementwise.hpp"

namespace deepinfer {

namespace {

using at::Tensor;

void check_rows(const Tensor& rows, const char* name) {
  TORCH_CHECK_VALUE(
      rows.dim() == 2 && rows.is_contiguous() && rows.device().is_cpu() && rows.scalar_type() == at::kFloat, name,
      " is ", rows.toString(), " ", rows.sizes(), ": must be contiguous float32 rows [num_rows, size] on CPU");
}

void check_vector(const Tensor& vector, const char* name, at::ScalarType dtype, int64_t size) {
  TORCH_CHECK_VALUE(vector.dim() == 1 && vector.is_contiguous() && vector.device().is_cpu() &&
                        vector.scalar_type() == dtype && vector.size(0) == size,
                    name, " is ", vector.toString(), " ", vector.sizes(), ": must be contiguous ", at::toString(dtype),
                    " [", size, "] on CPU");
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, const std::optional<Tensor>& residual) {
  check_rows(x, "x");
  check_vector(weight, "weight", at::kFloat, x.size(1));
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

Tensor embed(const Tensor& table, const Tensor& token_ids) {
  const bool is_float = table.scalar_type() == at::kFloat;
  TORCH_CHECK_VALUE(table.dim() == 2 && table.is_contiguous() && table.device().is_cpu() &&
                        (is_float || table.scalar_type() == at::kBFloat16),
                    "table is ", table.toString(), " ", table.sizes(),
                    ": must be contiguous float32 or bfloat16 [vocab_size, size] on CPU");
  check_vector(token_ids, "token_ids", at::kLong, token_ids.numel());
  const int64_t* ids = token_ids.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < token_ids.size(0); ++row) {
    TORCH_CHECK_VALUE(ids[row] >= 0 && ids[row] < table.size(0), "token_ids[", row, "] is ", ids[row],
                      ": must be 0 to ", table.size(0) - 1);
  }
  Tensor out = at::empty({token_ids.size(0), table.size(1)}, table.options().dtype(at::kFloat));
  cpu::elementwise().embed(table.const_data_ptr(), is_float ? cpu::DType::kFloat32 : cpu::DType::kBFloat16, ids,
                           token_ids.size(0), table.size(1), out.mutable_data_ptr<float>());
  return out;
}

std::tuple<Tensor, Tensor> rotary_angles(const Tensor& positions, const Tensor& inv_freq, double scaling) {
  check_vector(positions, "positions", at::kLong, positions.numel());
  check_vector(inv_freq, "inv_freq", at::kFloat, inv_freq.numel());
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
  m.def("embed(Tensor table, Tensor token_ids) -> Tensor", &embed);
  m.def("rotary_angles(Tensor positions, Tensor inv_freq, float scaling=1.0) -> (Tensor cos, Tensor sin)",
        &rotary_angles);
}

}  // namespace deepinfer
