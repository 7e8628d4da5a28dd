#include "kernels/cpu/isa.hpp"

namespace deepinfer::cpu {

namespace {

bool has(Isa isa) {
  if (isa == Isa::kPortable) return true;
#if DEEPINFER_HAS_X86_ISAS
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == Isa::kAvx2) return has_avx2;
  return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

Isa& chosen() {
  static Isa isa = best_isa();
  return isa;
}

}  // namespace

Isa best_isa() { return has(Isa::kAvx512) ? Isa::kAvx512 : has(Isa::kAvx2) ? Isa::kAvx2 : Isa::kPortable; }

Isa current_isa() { return chosen(); }

bool set_isa(Isa isa) {
  if (!has(isa)) return false;
  chosen() = isa;
  return true;
}

}  // namespace deepinfer::cpu
