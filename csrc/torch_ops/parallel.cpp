#include "kernels/parallel.hpp"

#include <ATen/Parallel.h>

namespace deepinfer {

void parallel_ranges(int64_t count, int64_t grain, void (*body)(const void* context, int64_t begin, int64_t end),
                     const void* context) {
  at::parallel_for(0, count, grain, [body, context](int64_t begin, int64_t end) { body(context, begin, end); });
}

int num_threads() { return at::get_num_threads(); }

}  // namespace deepinfer
