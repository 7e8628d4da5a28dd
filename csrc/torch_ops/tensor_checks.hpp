// What the operators require of tensors before they take pointers to them. All raise ValueError, naming the tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace deepinfer {

// Contiguous, on the CPU, of this type and shape.
void check_tensor(const char* name, const at::Tensor& tensor, at::ScalarType dtype, at::IntArrayRef shape);

// Of a contiguous int64 vector whose elements must be 0 to limit - 1.
[[nodiscard]] const int64_t* checked_indices(const char* name, const at::Tensor& tensor, int64_t limit);

}  // namespace deepinfer
