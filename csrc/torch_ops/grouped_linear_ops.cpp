// PackedLinear with weights of 4, 6 or 8 bits and a scale for each group of inputs.
#include <ATen/ops/cat.h>
#include <ATen/ops/mul.h>

#include "kernels/cpu/grouped_linear.hpp"
#include "torch_ops/packed_linear.hpp"
#include "torch_ops/weight_memory.hpp"

namespace deepinfer {

namespace {

constexpr double kMostScale = 65504.0;  // float16's largest number

class GroupedLinear final : public PackedLinear {
 public:
  // All contiguous: codes [num_outputs, num_inputs] uint8, scales [num_outputs, num_groups] float32, offsets like
  // scales or not defined, bias [num_outputs] float32 or not defined.
  GroupedLinear(int bits, const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& offsets, at::Tensor bias)
      : PackedLinear(codes.size(0), codes.size(1)),
        bits_(bits),
        group_size_(codes.size(1) / scales.size(1)),
        codes_(weight_memory(cpu::packed_code_bytes(bits, num_outputs(), num_inputs()), at::kByte)),
        scales_(weight_memory(cpu::packed_scale_count(group_size_, num_outputs(), num_inputs()), at::kHalf)),
        offsets_(offsets.defined() ? weight_memory(scales_.numel(), at::kHalf) : at::Tensor()),
        bias_(std::move(bias)) {
    cpu::grouped_linear().pack(bits_, group_size_, codes.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(),
                               offsets.defined() ? offsets.const_data_ptr<float>() : nullptr, num_outputs(),
                               num_inputs(), codes_.mutable_data_ptr(),
                               static_cast<uint16_t*>(scales_.mutable_data_ptr()),
                               offsets.defined() ? static_cast<uint16_t*>(offsets_.mutable_data_ptr()) : nullptr);
  }

  [[nodiscard]] int64_t num_bytes() const override {
    return codes_.numel() + 2 * scales_.numel() + (offsets_.defined() ? 2 * offsets_.numel() : 0);
  }

  void apply(const float* x, int64_t x_stride, int64_t num_rows, float* y, int64_t y_stride) const override {
    cpu::grouped_linear().apply(weight(), x, x_stride, num_rows, y, y_stride);
  }

  void unpack_rows(const int64_t* outputs, int64_t num_rows, float* values) const override {
    cpu::grouped_linear().unpack_rows(weight(), outputs, num_rows, values);
  }

 private:
  [[nodiscard]] cpu::GroupedWeight weight() const {
    return {bits_,
            num_outputs(),
            num_inputs(),
            group_size_,
            codes_.const_data_ptr(),
            static_cast<const uint16_t*>(scales_.const_data_ptr()),
            offsets_.defined() ? static_cast<const uint16_t*>(offsets_.const_data_ptr()) : nullptr,
            bias_.defined() ? bias_.const_data_ptr<float>() : nullptr};
  }

  int bits_;
  int64_t group_size_;
  at::Tensor codes_;  // torch's allocator aligns to 64 bytes
  at::Tensor scales_;
  at::Tensor offsets_;
  at::Tensor bias_;
};

void check_halves(const char* name, size_t i, const at::Tensor& values, int64_t num_outputs, int64_t num_groups) {
  TORCH_CHECK_VALUE(values.device().is_cpu() && values.scalar_type() == at::kFloat && values.dim() == 2 &&
                        values.size(0) == num_outputs && values.size(1) == num_groups,
                    name, "[", i, "] is ", values.scalar_type(), " ", values.sizes(), " on ", values.device(),
                    ": must be float32 [", num_outputs, ", ", num_groups, "] on the CPU");
  TORCH_CHECK_VALUE(values.abs().max().item<double>() <= kMostScale, name, "[", i,
                    "] has a value that is not finite or above ", kMostScale, ", the most that float16 holds");
}

// Over outputs, contiguous; a single one is not copied.
at::Tensor merged(const std::vector<at::Tensor>& parts) {
  return (parts.size() == 1 ? parts[0] : at::cat(parts)).contiguous();
}

}  // namespace

c10::intrusive_ptr<PackedLinear> pack_groups(int64_t bits, const std::vector<at::Tensor>& codes,
                                             const std::vector<at::Tensor>& scales,
                                             const std::vector<std::optional<at::Tensor>>& offsets,
                                             const std::vector<std::optional<at::Tensor>>& biases) {
  TORCH_CHECK_VALUE(bits == 4 || bits == 6 || bits == 8, "bits is ", bits, ": must be 4, 6 or 8");
  TORCH_CHECK_VALUE(!codes.empty(), "codes is empty: needs at least 1");
  TORCH_CHECK_VALUE(scales.size() == codes.size() && offsets.size() == codes.size(), "scales has ", scales.size(),
                    " entries, offsets ", offsets.size(), ": must be the ", codes.size(), " of codes");
  const int64_t num_inputs = codes[0].dim() == 2 ? codes[0].size(1) : 0;
  const int64_t num_groups = scales[0].dim() == 2 ? scales[0].size(1) : 0;
  const int64_t group_size = num_groups > 0 && num_inputs % num_groups == 0 ? num_inputs / num_groups : 0;
  TORCH_CHECK_VALUE(group_size == 16 || (group_size > 0 && group_size % 32 == 0), "scales[0] has shape ",
                    scales[0].sizes(), " for codes of ", codes[0].sizes(),
                    ": a group must be 16 or a multiple of 32 inputs");
  bool has_offsets = false;
  for (size_t i = 0; i < codes.size(); ++i) {
    TORCH_CHECK_VALUE(codes[i].device().is_cpu() && codes[i].scalar_type() == at::kByte && codes[i].dim() == 2 &&
                          codes[i].size(0) > 0 && codes[i].size(1) == num_inputs,
                      "codes[", i, "] is ", codes[i].scalar_type(), " ", codes[i].sizes(), " on ", codes[i].device(),
                      ": must be uint8 [num_outputs, ", num_inputs, "] on the CPU");
    const int64_t num_outputs = codes[i].size(0);
    const int64_t most = codes[i].max().item<int64_t>();
    TORCH_CHECK_VALUE(most < 1 << bits, "codes[", i, "] has a code of ", most, ": must be below ", 1 << bits);
    check_halves("scales", i, scales[i], num_outputs, num_groups);
    if (offsets[i]) check_halves("offsets", i, *offsets[i], num_outputs, num_groups);
    has_offsets = has_offsets || offsets[i];
  }
  at::Tensor all_offsets;
  if (has_offsets) {
    std::vector<at::Tensor> parts;
    const at::Scalar middle = -(1 << (bits - 1));
    for (size_t i = 0; i < codes.size(); ++i) parts.push_back(offsets[i] ? *offsets[i] : at::mul(scales[i], middle));
    all_offsets = merged(parts);
  }
  return c10::make_intrusive<GroupedLinear>(static_cast<int>(bits), merged(codes), merged(scales), all_offsets,
                                            merge_biases(biases, codes));
}

}  // namespace deepinfer
