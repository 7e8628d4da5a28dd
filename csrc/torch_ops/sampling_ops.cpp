// torch.ops.deepinfer: the random choice of tokens.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "kernels/cpu/sampling.hpp"

namespace deepinfer {

namespace {

using at::Tensor;

template <typename T>
const T* column(const Tensor& tensor, const char* name, int64_t size) {
  constexpr at::ScalarType kDType = c10::CppTypeToScalarType<T>::value;
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.size(0) == size && tensor.is_contiguous() && tensor.device().is_cpu() &&
                        tensor.scalar_type() == kDType,
                    name, " is ", tensor.toString(), " ", tensor.sizes(), ": must be contiguous ", at::toString(kDType),
                    " [", size, "] on CPU");
  return tensor.const_data_ptr<T>();
}

cpu::RandomRows random_rows(const Tensor& logits, const Tensor& rows, const Tensor& temperature, const Tensor& min_p,
                            const Tensor& top_k, const Tensor& top_p) {
  TORCH_CHECK_VALUE(
      logits.dim() == 2 && logits.is_contiguous() && logits.device().is_cpu() && logits.scalar_type() == at::kFloat,
      "logits is ", logits.toString(), " ", logits.sizes(),
      ": must be contiguous float32 [num_rows, vocab_size] on CPU");
  const int64_t num_rows = logits.size(0);
  const cpu::RandomRows random{rows.size(0),
                               column<int64_t>(rows, "rows", rows.numel()),
                               column<float>(temperature, "temperature", num_rows),
                               column<float>(min_p, "min_p", num_rows),
                               column<int32_t>(top_k, "top_k", num_rows),
                               column<float>(top_p, "top_p", num_rows)};
  for (int64_t i = 0; i < random.num_rows; ++i) {
    const int64_t row = random.rows[i];
    TORCH_CHECK_VALUE(row >= 0 && row < num_rows, "rows[", i, "] is ", row, ": must be 0 to ", num_rows - 1);
    TORCH_CHECK_VALUE(random.temperature[row] > 0.0F, "temperature[", row, "] is ", random.temperature[row],
                      ": must be above 0");
  }
  return random;
}

Tensor draw(const Tensor& logits, const Tensor& rows, const Tensor& temperature, const Tensor& min_p,
            const Tensor& top_k, const Tensor& top_p, const Tensor& uniforms) {
  const cpu::RandomRows random = random_rows(logits, rows, temperature, min_p, top_k, top_p);
  Tensor token_ids = at::empty({random.num_rows}, rows.options());
  cpu::sampling().draw(logits.const_data_ptr<float>(), logits.size(1), random,
                       column<double>(uniforms, "uniforms", logits.size(0)), token_ids.mutable_data_ptr<int64_t>());
  return token_ids;
}

Tensor least_kept(const Tensor& logits, const Tensor& rows, const Tensor& temperature, const Tensor& min_p,
                  const Tensor& top_k, const Tensor& top_p) {
  const cpu::RandomRows random = random_rows(logits, rows, temperature, min_p, top_k, top_p);
  Tensor least = at::empty({random.num_rows}, logits.options());
  cpu::sampling().least_kept(logits.const_data_ptr<float>(), logits.size(1), random, least.mutable_data_ptr<float>());
  return least;
}

}  // namespace

// All columns have an element for each row of the logits; `rows` are those that are sampled at random, and the result
// has an element for each of them.
TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "draw(Tensor logits, Tensor rows, Tensor temperature, Tensor min_p, Tensor top_k, Tensor top_p, Tensor uniforms) "
      "-> Tensor",
      &draw);
  m.def(
      "least_kept(Tensor logits, Tensor rows, Tensor temperature, Tensor min_p, Tensor top_k, Tensor top_p) -> Tensor",
      &least_kept);
}

}  // namespace deepinfer
