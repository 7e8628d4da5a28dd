// Reads memory as fast as one core can: the widest loads that the compiler has for this machine (-march=native).
#include <stddef.h>
#include <stdint.h>

enum { kUnrolled = 8 };

typedef uint64_t Line __attribute__((vector_size(64), aligned(64)));

// num_streams is a constant where this is inlined.
static inline __attribute__((always_inline)) uint64_t read_streams(const Line* data, size_t num_lines,
                                                                   size_t num_streams, size_t ahead_bytes) {
  const size_t stream_lines = num_lines / num_streams;
  Line sums[kUnrolled] = {{0}};
  for (size_t line = 0; line < stream_lines; line += kUnrolled / num_streams) {
#pragma GCC unroll 8
    for (size_t k = 0; k < kUnrolled; ++k) {
      const Line* at = &data[k % num_streams * stream_lines + line + k / num_streams];
      if (ahead_bytes > 0) __builtin_prefetch((const char*)at + ahead_bytes);
      sums[k] ^= *at;
    }
  }
  uint64_t result = 0;
  for (size_t k = 0; k < kUnrolled; ++k) {
    for (size_t i = 0; i < 8; ++i) result ^= sums[k][i];
  }
  return result;
}

// The exclusive or of all lines, so that no load can be left out. They are read as num_streams parts side by side (1, 2,
// 4 or 8), each fetched ahead_bytes before it is needed (0: as the processor itself sees fit). num_lines is a multiple
// of 8; `data` is aligned to 64.
uint64_t read_lines(const Line* data, size_t num_lines, size_t num_streams, size_t ahead_bytes) {
  switch (num_streams) {
    case 1:
      return read_streams(data, num_lines, 1, ahead_bytes);
    case 2:
      return read_streams(data, num_lines, 2, ahead_bytes);
    case 4:
      return read_streams(data, num_lines, 4, ahead_bytes);
    default:
      return read_streams(data, num_lines, 8, ahead_bytes);
  }
}
