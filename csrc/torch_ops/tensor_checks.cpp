#include "torch_ops/tensor_checks.hpp"

namespace deepinfer {

void check_tensor(const char* name, const at::Tensor& tensor, at::ScalarType dtype, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == dtype && tensor.sizes() == shape && tensor.is_contiguous() && tensor.device().is_cpu(),
      name, " is ", tensor.toString(), " ", tensor.sizes(), ": must be contiguous ", dtype, " ", shape, " on the CPU");
}

const int64_t* checked_indices(const char* name, const at::Tensor& tensor, int64_t limit) {
  const int64_t count = tensor.numel();
  check_tensor(name, tensor, at::kLong, {count});
  const int64_t* data = tensor.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_VALUE(data[i] >= 0 && data[i] < limit, name, " has ", data[i], ": must be 0 to ", limit - 1);
  }
  return data;
}

}  // namespace deepinfer
