// torch.ops.deepinfer.isa / set_isa: which instruction set the kernels run on.
#include <torch/library.h>

#include <string>

#include "kernels/cpu/isa.hpp"

namespace deepinfer {

namespace {

using cpu::Isa;

constexpr const char* kNames[] = {"portable", "avx2", "avx512"};

std::string isa() { return kNames[static_cast<int>(cpu::current_isa())]; }

// False for one that this machine does not have.
bool set_isa(const std::string& name) {
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (name == kNames[static_cast<int>(isa)]) return cpu::set_isa(isa);
  }
  TORCH_CHECK_VALUE(false, "isa is '", name, "': must be portable, avx2 or avx512");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def("isa() -> str", &isa);
  m.def("set_isa(str name) -> bool", &set_isa);
}

}  // namespace deepinfer
