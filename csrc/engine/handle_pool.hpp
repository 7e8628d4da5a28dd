// A pool of one type whose objects are named by generation-checked handles instead of pointers.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <vector>

namespace deepinfer {

// Something was looked up that does not exist (any more). Python sees LookupError.
class NotFound : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Owns objects of type T and gives out uint64 handles to them: pool id (16 bits), generation (28), index (20).
//
// 1. A handle is good from `acquire` until its `release`; afterwards every use of it throws NotFound.
// 2. No handle is 0, and none is good in two pools of one process.
// 3. References stay good while the pool grows. It never shrinks: an object that is acquired again is as its last user
//    left it, so that its strings and vectors keep their capacity. Whoever acquires it fills all of it.
//
// A slot's generation wraps after 2^28 uses of it, a pool id after 2^16 pools; a handle kept that long may be mistaken
// for a new one. One thread at a time owns a pool.
template <typename T>
class HandlePool {
 public:
  HandlePool() {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (all.pools.size() >= kMaxPools) throw std::length_error("too many pools in one process");
    do {
      id_ = all.next_id++;
    } while (id_ == 0 || all.pools.count(id_) > 0);
    all.pools.emplace(id_, this);
  }

  ~HandlePool() {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.pools.erase(id_);
  }

  HandlePool(const HandlePool&) = delete;
  HandlePool& operator=(const HandlePool&) = delete;

  [[nodiscard]] uint64_t acquire() {
    if (free_.empty()) {
      if (slots_.size() > kMaxIndex) throw std::length_error("the pool is full");
      // The free list must hold every slot at once, or a release could have to allocate.
      free_.reserve(slots_.size() + 1);
      slots_.emplace_back();
      free_.push_back(static_cast<uint32_t>(slots_.size() - 1));
    }
    const uint32_t index = free_.back();
    free_.pop_back();
    slots_[index].in_use = true;
    ++num_in_use_;
    return make_handle(index);
  }

  [[nodiscard]] T& get(uint64_t handle) { return slot(handle).value; }
  [[nodiscard]] const T& get(uint64_t handle) const { return const_cast<HandlePool*>(this)->slot(handle).value; }

  void release(uint64_t handle) {
    Slot& released = slot(handle);
    released.in_use = false;
    released.generation = released.generation == kMaxGeneration ? 1 : released.generation + 1;
    free_.push_back(static_cast<uint32_t>(handle & kMaxIndex));
    --num_in_use_;
  }

  [[nodiscard]] bool contains(uint64_t handle) const {
    const uint64_t index = handle & kMaxIndex;
    if (index >= slots_.size() || !slots_[index].in_use) return false;
    return handle == make_handle(static_cast<uint32_t>(index));
  }

  [[nodiscard]] size_t num_in_use() const { return num_in_use_; }

  // A copy of the object behind `handle`, whichever pool of this process gave it out. Call it on the thread that owns
  // that pool.
  [[nodiscard]] static T copy_from_any(uint64_t handle) {
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.pools.find(static_cast<uint16_t>(handle >> kPoolShift));
    if (found == all.pools.end()) throw NotFound("the handle belongs to no pool of this process");
    return found->second->get(handle);
  }

 private:
  static constexpr int kIndexBits = 20;
  static constexpr int kGenerationBits = 28;
  static constexpr int kPoolShift = kIndexBits + kGenerationBits;
  static constexpr uint64_t kMaxIndex = (uint64_t{1} << kIndexBits) - 1;
  static constexpr uint64_t kMaxGeneration = (uint64_t{1} << kGenerationBits) - 1;
  static constexpr size_t kMaxPools = 60000;

  struct Slot {
    T value{};
    uint64_t generation = 1;
    bool in_use = false;
  };

  struct Registry {
    std::mutex mutex;  // guards both fields: pools come and go on any thread
    std::unordered_map<uint16_t, HandlePool*> pools;
    uint16_t next_id = 1;
  };

  static Registry& registry() {
    static Registry all;
    return all;
  }

  [[nodiscard]] uint64_t make_handle(uint32_t index) const {
    return uint64_t{id_} << kPoolShift | slots_[index].generation << kIndexBits | index;
  }

  Slot& slot(uint64_t handle) {
    if (!contains(handle)) throw NotFound("the handle is stale or was never given out by this pool");
    return slots_[handle & kMaxIndex];
  }

  uint16_t id_ = 0;
  std::deque<Slot> slots_;
  std::vector<uint32_t> free_;  // indices of the slots that nobody uses
  size_t num_in_use_ = 0;
};

}  // namespace deepinfer
