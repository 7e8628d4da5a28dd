// torch.ops.deepinfer: a step's inputs that the host does not know yet.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>

namespace deepinfer {

namespace {

using at::Tensor;

void check_vector(const Tensor& vector, const char* name, at::ScalarType dtype, int64_t size) {
  TORCH_CHECK_VALUE(vector.dim() == 1 && vector.is_contiguous() && vector.device().is_cpu() &&
                        vector.scalar_type() == dtype && vector.size(0) == size,
                    name, " is ", vector.toString(), " ", vector.sizes(), ": must be contiguous ", at::toString(dtype),
                    " [", size, "] on CPU");
}

void take_inflight_tokens(const Tensor& token_ids, const Tensor& inflight_rows, const Tensor& sampled) {
  const int64_t num_tokens = token_ids.numel(), num_sampled = sampled.numel();
  check_vector(token_ids, "token_ids", at::kLong, num_tokens);
  check_vector(inflight_rows, "inflight_rows", at::kInt, num_tokens);
  check_vector(sampled, "sampled", at::kLong, num_sampled);
  int64_t* inputs = token_ids.mutable_data_ptr<int64_t>();
  const int32_t* rows = inflight_rows.const_data_ptr<int32_t>();
  const int64_t* tokens = sampled.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int32_t row = rows[i];
    if (row < 0) continue;
    TORCH_CHECK_VALUE(row < num_sampled, "inflight_rows[", i, "] is ", row, ": must be less than ", num_sampled);
    inputs[i] = std::max<int64_t>(tokens[row], 0);
  }
}

}  // namespace

// deepinfer_backend/ops/inflight_tokens.py has the contract.
TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("take_inflight_tokens(Tensor(a!) token_ids, Tensor inflight_rows, Tensor sampled) -> ()",
        &take_inflight_tokens);
}

}  // namespace deepinfer
