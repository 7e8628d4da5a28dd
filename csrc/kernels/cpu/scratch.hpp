// Memory that a kernel works in: it grows to what was needed most and is kept, so that a steady step allocates nothing.
//
// Only for files that are compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace deepinfer::cpu::DEEPINFER_ISA {

// Owned by one thread: declare it `static thread_local`.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  // `count` floats, aligned for every vector; what an earlier call gave is gone.
  [[nodiscard]] float* floats(int64_t count) {
    if (count > capacity_) {
      std::free(memory_);
      capacity_ = (count + 15) / 16 * 16;
      memory_ = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(capacity_) * sizeof(float)));
      if (memory_ == nullptr) std::abort();  // no exception may leave a thread of a kernel
    }
    return memory_;
  }

 private:
  float* memory_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace deepinfer::cpu::DEEPINFER_ISA
