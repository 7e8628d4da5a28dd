#include "kernels/parallel.hpp"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace deepinfer {

namespace {

constexpr int64_t kShareChunks = 8;    // of a share, about: a late thread is waited for as long as one takes at most
constexpr int64_t kChunkMultiple = 4;  // kernels compute so many neighbours at once

// What one thread begins with and goes through from front to back, as memory is read best; threads that are done with
// theirs take chunks of it too. A cache line of its own.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

}  // namespace

void parallel_ranges(int64_t count, int64_t grain, void (*body)(const void* context, int64_t begin, int64_t end),
                     const void* context) {
  const int64_t num_shares = std::min<int64_t>(at::get_num_threads(), (count + grain - 1) / grain);
  if (num_shares <= 1 || at::in_parallel_region()) {
    if (count > 0) body(context, 0, count);
    return;
  }
  const int64_t share_chunk = (count / num_shares + kShareChunks - 1) / kShareChunks;
  const int64_t chunk = std::max(grain, (share_chunk + kChunkMultiple - 1) / kChunkMultiple * kChunkMultiple);
  static thread_local std::vector<Share> shares;
  if (static_cast<int64_t>(shares.size()) < num_shares) shares = std::vector<Share>(num_shares);
  Share* const first_share = shares.data();
  for (int64_t i = 0; i < num_shares; ++i) {
    first_share[i].next.store(count * i / num_shares, std::memory_order_relaxed);
    first_share[i].end = count * (i + 1) / num_shares;
  }
  at::parallel_for(0, num_shares, 1, [=](int64_t own, int64_t) {
    for (int64_t i = 0; i < num_shares; ++i) {
      Share& share = first_share[(own + i) % num_shares];
      while (share.next.load(std::memory_order_relaxed) < share.end) {
        const int64_t begin = share.next.fetch_add(chunk, std::memory_order_relaxed);
        if (begin >= share.end) break;
        body(context, begin, std::min(begin + chunk, share.end));
      }
    }
  });
}

int num_threads() { return at::get_num_threads(); }

}  // namespace deepinfer
