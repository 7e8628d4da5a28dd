// torch.ops.deepinfer: logits → tokens.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <vector>

#include "kernels/cpu/elementwise.hpp"
#include "kernels/cpu/sampling.hpp"

namespace deepinfer {

namespace {

using at::Tensor;

template <typename T>
void check_column(const Tensor& tensor, const char* name, int64_t size) {
  constexpr at::ScalarType kDType = c10::CppTypeToScalarType<T>::value;
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.size(0) == size && tensor.is_contiguous() && tensor.device().is_cpu() &&
                        tensor.scalar_type() == kDType,
                    name, " is ", tensor.toString(), " ", tensor.sizes(), ": must be contiguous ", at::toString(kDType),
                    " [", size, "] on CPU");
}

template <typename T>
const T* column(const Tensor& tensor, const char* name, int64_t size) {
  check_column<T>(tensor, name, size);
  return tensor.const_data_ptr<T>();
}

void check_logits(const Tensor& logits) {
  TORCH_CHECK_VALUE(
      logits.dim() == 2 && logits.is_contiguous() && logits.device().is_cpu() && logits.scalar_type() == at::kFloat,
      "logits is ", logits.toString(), " ", logits.sizes(),
      ": must be contiguous float32 [num_rows, vocab_size] on CPU");
  TORCH_CHECK_VALUE(logits.size(1) > 0, "logits is ", logits.sizes(), ": rows must not be empty");
}

// Those with a temperature above 0. Valid until the thread's next call: the numbers stand in memory that is kept.
cpu::RandomRows random_rows(int64_t num_rows, const Tensor& temperature, const Tensor& min_p, const Tensor& top_k,
                            const Tensor& top_p) {
  static thread_local std::vector<int64_t> rows;
  const float* temperatures = column<float>(temperature, "temperature", num_rows);
  rows.clear();
  for (int64_t row = 0; row < num_rows; ++row) {
    if (temperatures[row] > 0.0F) rows.push_back(row);
  }
  return {static_cast<int64_t>(rows.size()),
          rows.data(),
          temperatures,
          column<float>(min_p, "min_p", num_rows),
          column<int32_t>(top_k, "top_k", num_rows),
          column<float>(top_p, "top_p", num_rows)};
}

void sample_tokens(const Tensor& logits, const Tensor& temperature, const Tensor& min_p, const Tensor& top_k,
                   const Tensor& top_p, const Tensor& uniforms, const Tensor& token_ids) {
  check_logits(logits);
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  const cpu::RandomRows random = random_rows(num_rows, temperature, min_p, top_k, top_p);
  const double* uniform = column<double>(uniforms, "uniforms", num_rows);
  check_column<int64_t>(token_ids, "token_ids", num_rows);
  const float* data = logits.const_data_ptr<float>();
  int64_t* sampled = token_ids.mutable_data_ptr<int64_t>();
  if (random.num_rows < num_rows) cpu::elementwise().argmax(data, num_rows, vocab_size, sampled);
  if (random.num_rows > 0) cpu::sampling().draw(data, vocab_size, random, uniform, sampled);
}

Tensor least_kept(const Tensor& logits, const Tensor& temperature, const Tensor& min_p, const Tensor& top_k,
                  const Tensor& top_p) {
  check_logits(logits);
  const cpu::RandomRows random = random_rows(logits.size(0), temperature, min_p, top_k, top_p);
  Tensor least = at::full({logits.size(0)}, -std::numeric_limits<double>::infinity(), logits.options());
  cpu::sampling().least_kept(logits.const_data_ptr<float>(), logits.size(1), random, least.mutable_data_ptr<float>());
  return least;
}

}  // namespace

// All have an element for each row of the logits. A temperature of 0 is greedy.
TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "sample_tokens(Tensor logits, Tensor temperature, Tensor min_p, Tensor top_k, Tensor top_p, Tensor uniforms, "
      "Tensor(a!) token_ids) -> ()",
      &sample_tokens);
  m.def("least_kept(Tensor logits, Tensor temperature, Tensor min_p, Tensor top_k, Tensor top_p) -> Tensor",
        &least_kept);
}

}  // namespace deepinfer
