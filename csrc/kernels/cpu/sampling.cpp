#include "kernels/cpu/sampling.hpp"

#include "kernels/cpu/last_kept.hpp"
#include "kernels/cpu/scratch.hpp"
#include "kernels/cpu/vec.hpp"
#include "kernels/cpu/vec_math.hpp"
#include "kernels/parallel.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

// Logits are looked at by blocks, and those without any that matters are passed over.
constexpr int64_t kBlock = 128;
constexpr int64_t kMinFloatsPerThread = 8192;

struct RowScratch {
  Scratch maxima;
  Scratch sums;
  Scratch values;
  Scratch narrowed;
};

RowScratch& scratch() {
  static thread_local RowScratch scratch;
  return scratch;
}

// Quotients of a row's logits and its temperature.
struct Row {
  const float* logits;
  int64_t size;
  float temperature;
  int64_t num_blocks;
  const float* maxima;  // [num_blocks]
  float largest;

  // The block's values; -infinity after the row's end.
  void read(int64_t block, float* values) const {
    const float* from = logits + block * kBlock;
    const int64_t count = size - block * kBlock;
    if (count >= kBlock) {
      for (int64_t i = 0; i < kBlock; i += kLanes) store(load(from + i) / temperature, values + i);
      return;
    }
    for (int64_t i = 0; i < kBlock; ++i) values[i] = i < count ? from[i] / temperature : -__builtin_inff();
  }
};

Row row_of(const float* logits, int64_t size, float temperature) {
  const int64_t num_blocks = (size + kBlock - 1) / kBlock;
  float* maxima = scratch().maxima.floats(num_blocks);
  float largest = -__builtin_inff();
  for (int64_t block = 0; block < num_blocks; ++block) {
    const float* from = logits + block * kBlock;
    float most = -__builtin_inff();
    if (size - block * kBlock >= kBlock) {
      F32 mosts[2] = {broadcast(most), broadcast(most)};
      for (int64_t i = 0; i < kBlock; i += 2 * kLanes) {
        mosts[0] = max(load(from + i), mosts[0]);
        mosts[1] = max(load(from + i + kLanes), mosts[1]);
      }
      most = max_lane(max(mosts[0], mosts[1]));
    } else {
      for (int64_t i = 0; i < size - block * kBlock; ++i) most = from[i] > most ? from[i] : most;
    }
    // Rounding keeps the order: the quotient of the largest is the largest quotient.
    maxima[block] = most / temperature;
    largest = maxima[block] > largest ? maxima[block] : largest;
  }
  return {logits, size, temperature, num_blocks, maxima, largest};
}

// The finite values of the row that are at least `least`: to values[0, n), for n values.
int64_t collect(const Row& row, float least, float* values) {
  least = least > -__FLT_MAX__ ? least : -__FLT_MAX__;
  int64_t n = 0;
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    if (!(row.maxima[block] >= least)) continue;
    float of_block[kBlock];
    row.read(block, of_block);
    for (int64_t i = 0; i < kBlock; ++i) {
      values[n] = of_block[i];
      n += of_block[i] >= least ? 1 : 0;
    }
  }
  return n;
}

float least_kept(const Row& row, float min_p, int64_t top_k, double top_p) {
  float least = min_p > 0.0F ? row.largest + __builtin_logf(min_p) : -__builtin_inff();
  const bool has_top_k = top_k > 0 && top_k < row.size;
  if (!(row.largest > -__builtin_inff()) || !(has_top_k || top_p < 1.0)) return least;
  float* narrowed = scratch().narrowed.floats(row.num_blocks * kBlock);
  const ByCount first_k{static_cast<double>(top_k)};
  if (has_top_k && top_k < row.num_blocks) {
    // As many blocks have a value as large as the k-th largest of their maxima.
    const float bound = last_kept(row.maxima, row.num_blocks, narrowed, first_k);
    least = bound > least ? bound : least;
  }
  float* values = scratch().values.floats(row.num_blocks * kBlock);
  int64_t n = collect(row, least, values);
  if (has_top_k && top_k < n) {
    least = last_kept(values, n, narrowed, first_k);
    if (top_p < 1.0) n = collect(row, least, values);
  }
  if (top_p < 1.0 && n > 0) least = last_kept(values, n, narrowed, ByProbability{row.largest, top_p});
  return least;
}

// The weights of a block's tokens that are kept. Returns their sum.
double weigh(const Row& row, int64_t block, float least, float* weights) {
  row.read(block, weights);
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const F32 values = load(weights + i);
    store(values >= least ? exp(values - row.largest) : F32{}, weights + i);
  }
  typedef float Floats __attribute__((vector_size(kLanes * 2)));
  typedef double Doubles __attribute__((vector_size(kLanes * 4)));
  Doubles sums[2] = {};
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    Floats halves[2];
    std::memcpy(halves, weights + i, sizeof(halves));
    for (int64_t half = 0; half < 2; ++half) sums[half] += __builtin_convertvector(halves[half], Doubles);
  }
  const Doubles both = sums[0] + sums[1];
  double sum = 0.0;
  for (int64_t lane = 0; lane < kLanes / 2; ++lane) sum += both[lane];
  return sum;
}

// Where the running sum of the weights first exceeds the target, of which the sum before that is then taken. Where
// rounding made the target as large as the whole sum: the last one with a weight. -1: there is none.
template <typename Weight>
int64_t first_beyond(const Weight* weights, int64_t n, double& target) {
  int64_t found = -1;
  double reached = 0.0;
  double before = 0.0;
  for (int64_t i = 0; i < n && reached <= target; ++i) {
    if (!(weights[i] > 0)) continue;
    found = i;
    before = reached;
    reached += weights[i];
  }
  target -= before;
  return found;
}

int64_t draw(const Row& row, float least, double uniform) {
  if (!(row.largest > -__builtin_inff())) return 0;
  float weights[kBlock];
  double* sums = static_cast<double*>(static_cast<void*>(scratch().sums.floats(2 * row.num_blocks)));
  double total = 0.0;
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    sums[block] = row.maxima[block] >= least ? weigh(row, block, least, weights) : 0.0;
    total += sums[block];
  }
  double target = uniform * total;
  const int64_t block = first_beyond(sums, row.num_blocks, target);
  if (block < 0) return 0;
  weigh(row, block, least, weights);
  const int64_t inside = first_beyond(weights, kBlock, target);
  return inside < 0 ? 0 : block * kBlock + inside;
}

// body(t, row, least) for every random row t.
template <typename Body>
void for_rows(const float* logits, int64_t size, const RandomRows& random, const Body& body) {
  const int64_t grain = size >= kMinFloatsPerThread ? 1 : kMinFloatsPerThread / (size + 1) + 1;
  parallel_for(random.num_rows, grain, [&, logits, size](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = random.rows[i];
      const float temperature = random.temperature[t] > kMinTemperature ? random.temperature[t] : kMinTemperature;
      const Row row = row_of(logits + t * size, size, temperature);
      body(t, row, least_kept(row, random.min_p[t], random.top_k[t], static_cast<double>(random.top_p[t])));
    }
  });
}

void draw_rows(const float* logits, int64_t vocab_size, const RandomRows& random, const double* uniforms,
               int64_t* token_ids) {
  for_rows(logits, vocab_size, random,
           [&](int64_t t, const Row& row, float least) { token_ids[t] = draw(row, least, uniforms[t]); });
}

void least_kept_of_rows(const float* logits, int64_t vocab_size, const RandomRows& random, float* least_kept) {
  for_rows(logits, vocab_size, random, [&](int64_t t, const Row&, float least) { least_kept[t] = least; });
}

}  // namespace

extern const SamplingKernels sampling;
const SamplingKernels sampling = {draw_rows, least_kept_of_rows};

}  // namespace deepinfer::cpu::DEEPINFER_ISA
