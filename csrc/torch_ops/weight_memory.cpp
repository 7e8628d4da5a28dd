#include "torch_ops/weight_memory.hpp"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>

namespace deepinfer {

namespace {

constexpr int64_t kAlignmentBytes = 64;
constexpr int64_t kLargePageBytes = int64_t{2} << 20;
constexpr int64_t kArenaBytes = int64_t{64}
                                << 20;  // of addresses: memory is taken a page at a time, when it is written

int64_t round_up(int64_t num_bytes, int64_t multiple) { return (num_bytes + multiple - 1) / multiple * multiple; }

// Owns a range of addresses that begins at a large page; given back when the last tensor in it is gone.
class Arena {
 public:
  explicit Arena(int64_t num_bytes) : num_mapped_(num_bytes + kLargePageBytes), num_left_(num_bytes) {
    mapped_ = mmap(nullptr, static_cast<size_t>(num_mapped_), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    next_ = reinterpret_cast<char*>(round_up(reinterpret_cast<intptr_t>(mapped_), kLargePageBytes));
    // A system without large pages refuses, and small ones do.
    madvise(next_, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);
  }
  ~Arena() { munmap(mapped_, static_cast<size_t>(num_mapped_)); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  [[nodiscard]] bool has_room_for(int64_t num_bytes) const { return num_bytes <= num_left_; }
  [[nodiscard]] void* take(int64_t num_bytes) {
    void* taken = next_;
    next_ += num_bytes;
    num_left_ -= num_bytes;
    return taken;
  }

 private:
  void* mapped_;
  int64_t num_mapped_;
  char* next_;
  int64_t num_left_;
};

}  // namespace

at::Tensor weight_memory(int64_t count, at::ScalarType dtype) {
  static std::mutex mutex;  // guards `newest`
  static std::weak_ptr<Arena> newest;
  const int64_t num_bytes = round_up(count * static_cast<int64_t>(at::elementSize(dtype)), kAlignmentBytes);
  const std::lock_guard lock(mutex);
  std::shared_ptr<Arena> arena = newest.lock();
  if (arena == nullptr || !arena->has_room_for(num_bytes)) {
    arena = std::make_shared<Arena>(round_up(std::max(num_bytes, kArenaBytes), kLargePageBytes));
    newest = arena;
  }
  void* data = arena->take(num_bytes);
  return at::from_blob(data, {count}, [arena](void*) {}, at::TensorOptions(dtype));
}

}  // namespace deepinfer
