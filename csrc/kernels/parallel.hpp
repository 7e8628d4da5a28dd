// Loops over torch's own threads: a second OpenMP runtime would fight with torch's for the cores.
#pragma once

#include <cstdint>

namespace deepinfer {

// Calls body(context, begin, end) for parts of [0, count) and returns when all are done. A thread gets several parts, one
// after another, and which ones differs from call to call: one that another program keeps from its core does less, and
// the others more. No more threads take part than there are `grain`s in `count`. Only the thread that computes for the
// engine calls it. The body throws nothing, and what it writes does not depend on the parts.
void parallel_ranges(int64_t count, int64_t grain, void (*body)(const void* context, int64_t begin, int64_t end),
                     const void* context);

[[nodiscard]] int num_threads();

// The same for a callable body(begin, end).
template <typename Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
  parallel_ranges(
      count, grain,
      [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); }, &body);
}

}  // namespace deepinfer
