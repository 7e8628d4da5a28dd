// Which instruction set the kernels run on: chosen once, when the library is loaded; tests choose others.
//
// Every kernel is written once, in a .cpp of this folder, and compiled once per instruction set: CMake compiles the
// file with that set's flags and defines DEEPINFER_ISA as the namespace that it lives in. What such a file includes
// must not bring in inline functions that other files use too (containers, algorithms, iostreams): the linker keeps one
// copy of each, perhaps the one that the oldest machine cannot run.
#pragma once

namespace deepinfer::cpu {

enum class Isa { kPortable, kAvx2, kAvx512 };  // kAvx512: with BW, DQ, VL, VNNI and the dot products of bfloat16

// The best one that this machine runs and this build has.
[[nodiscard]] Isa best_isa();
[[nodiscard]] Isa current_isa();
// For tests, while no kernel runs. False if this machine or build does not have it.
[[nodiscard]] bool set_isa(Isa isa);

#if defined(__x86_64__)
#define DEEPINFER_HAS_X86_ISAS 1
#else
#define DEEPINFER_HAS_X86_ISAS 0
#endif

// Declares `name()`, the table of function pointers (a struct `Type`) for the current instruction set. A kernel's .cpp
// defines it, in each of the namespaces: `const Type name = {...}` (with extern before it).
#if DEEPINFER_HAS_X86_ISAS
#define DEEPINFER_KERNEL_TABLE(Type, name)                                                       \
  namespace portable {                                                                           \
  extern const Type name;                                                                        \
  }                                                                                              \
  namespace avx2 {                                                                               \
  extern const Type name;                                                                        \
  }                                                                                              \
  namespace avx512 {                                                                             \
  extern const Type name;                                                                        \
  }                                                                                              \
  [[nodiscard]] inline const Type& name() {                                                      \
    const Isa isa = current_isa();                                                               \
    return isa == Isa::kAvx512 ? avx512::name : isa == Isa::kAvx2 ? avx2::name : portable::name; \
  }
#else
#define DEEPINFER_KERNEL_TABLE(Type, name) \
  namespace portable {                     \
  extern const Type name;                  \
  }                                        \
  [[nodiscard]] inline const Type& name() { return portable::name; }
#endif

}  // namespace deepinfer::cpu
