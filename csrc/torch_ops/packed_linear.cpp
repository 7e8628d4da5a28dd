#include "torch_ops/packed_linear.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "torch_ops/classes.hpp"
#include "torch_ops/tensor_checks.hpp"

namespace deepinfer {

namespace {

void check_rows(const char* name, const at::Tensor& rows, int64_t size) {
  TORCH_CHECK_VALUE(rows.device().is_cpu() && rows.scalar_type() == at::kFloat, name, " is ", rows.scalar_type(),
                    " on ", rows.device(), ": must be float32 on the CPU");
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(1) == size, name, " has shape ", rows.sizes(), ": must be [num_rows, ",
                    size, "]");
  TORCH_CHECK_VALUE(rows.stride(1) == 1 || size == 1, name, " has strides ", rows.strides(),
                    ": the values of a row must be contiguous");
}

// y [num_rows, num_outputs] is written; rows of x and y may be any distance apart.
void apply_to(const c10::intrusive_ptr<PackedLinear>& linear, const at::Tensor& x, const at::Tensor& y) {
  check_rows("x", x, linear->num_inputs());
  check_rows("y", y, linear->num_outputs());
  TORCH_CHECK_VALUE(y.size(0) == x.size(0), "y has ", y.size(0), " rows: must be the ", x.size(0), " of x");
  linear->apply(x.const_data_ptr<float>(), x.stride(0), x.size(0), y.mutable_data_ptr<float>(), y.stride(0));
}

// x [.., num_inputs] → [.., num_outputs]
at::Tensor forward(const c10::intrusive_ptr<PackedLinear>& linear, const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == linear->num_inputs(), "x has shape ", x.sizes(),
                    ": its last size must be ", linear->num_inputs());
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = linear->num_outputs();
  const at::Tensor y = at::empty(shape, at::kFloat);
  apply_to(linear, x.contiguous().view({-1, linear->num_inputs()}), y.view({-1, linear->num_outputs()}));
  return y;
}

// outputs [num_rows] int64 → [num_rows, num_inputs]
at::Tensor unpack_rows(const c10::intrusive_ptr<PackedLinear>& linear, const at::Tensor& outputs) {
  const int64_t* rows = checked_indices("outputs", outputs, linear->num_outputs());
  const at::Tensor values = at::empty({outputs.numel(), linear->num_inputs()}, at::kFloat);
  linear->unpack_rows(rows, outputs.numel(), values.mutable_data_ptr<float>());
  return values;
}

}  // namespace

at::Tensor merge_biases(const std::vector<std::optional<at::Tensor>>& biases, const std::vector<at::Tensor>& weights) {
  TORCH_CHECK_VALUE(biases.size() == weights.size(), "biases has ", biases.size(), " entries: must be the ",
                    weights.size(), " of weights");
  bool has_bias = false;
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t num_outputs = weights[i].size(0);
    TORCH_CHECK_VALUE(!biases[i] || (biases[i]->device().is_cpu() && biases[i]->sizes().equals({num_outputs})),
                      "biases[", i, "] has shape ", biases[i]->sizes(), ": must be [", num_outputs, "] on the CPU");
    has_bias = has_bias || biases[i];
    parts.push_back(biases[i] ? biases[i]->to(at::kFloat) : at::zeros({num_outputs}, at::kFloat));
  }
  return has_bias ? at::cat(parts) : at::Tensor();
}

void define_packed_linear(torch::Library& library) {
  library.class_<PackedLinear>("PackedLinear")
      .def(torch::init(&pack_dense), "", {torch::arg("weights"), torch::arg("biases")})
      .def_static("from_groups", &pack_groups)
      .def("forward", &forward)
      .def("apply_to", &apply_to)
      .def("unpack_rows", &unpack_rows)
      .def_property("num_outputs", &PackedLinear::num_outputs)
      .def_property("num_inputs", &PackedLinear::num_inputs)
      .def_property("num_bytes", &PackedLinear::num_bytes);
}

}  // namespace deepinfer
