#include "kernels/cpu/paged_attention.hpp"

#include "kernels/cpu/attention_tile.hpp"
#include "kernels/cpu/kv_cache_write.hpp"
#include "kernels/cpu/scratch.hpp"
#include "kernels/parallel.hpp"

namespace deepinfer::cpu::DEEPINFER_ISA {

namespace {

constexpr int64_t kQueryTile = 96;     // rows
constexpr int64_t kSpan = 512;         // keys of one item of work where a sequence has few rows; whole tiles
constexpr int64_t kMinWork = 1 << 17;  // products worth another thread

struct Attend {
  const LayerCache& cache;
  const AttentionBatch& batch;
  int64_t num_heads;
  const float* query;
  int64_t query_row_stride;
  float scale;
  int64_t window;
  float* out;

  [[nodiscard]] int64_t group() const { return num_heads / cache.num_kv_heads; }  // heads that share keys
  [[nodiscard]] int64_t padded_value_dim() const { return ceil_div(cache.value_dim, kLanes) * kLanes; }
  // Up to where a token of the batch sees keys of its sequence, in which it has this position.
  [[nodiscard]] int64_t key_end(int64_t token, int64_t position) const {
    return max(position + 1, batch.key_ends == nullptr ? 0 : batch.key_ends[token]);
  }
};

// How one sequence's work is split: into tiles of queries, and spans of keys where there is but one such tile. It
// depends on nothing but the sequence, so that its result does not either.
struct Split {
  int64_t num_queries;
  int64_t first_position;  // of its first query
  int64_t tile_queries;
  int64_t num_tiles;
  int64_t first_span;
  int64_t num_spans;

  Split(const Attend& attend, int64_t seq) {
    const int64_t seq_len = attend.batch.seq_lens[seq];
    num_queries = attend.batch.query_start_loc[seq + 1] - attend.batch.query_start_loc[seq];
    first_position = seq_len - num_queries;
    tile_queries = max(1, kQueryTile / attend.group());
    num_tiles = ceil_div(num_queries, tile_queries);
    first_span = attend.window > 0 ? max(0, first_position - attend.window + 1) / kSpan : 0;
    num_spans = num_tiles == 1 ? ceil_div(seq_len, kSpan) - first_span : 1;
  }

  [[nodiscard]] int64_t num_items(int64_t num_kv_heads) const { return num_tiles * num_kv_heads * num_spans; }
};

// What a tile of queries has gathered over some of its keys; sums of values are relative to each row's maximum score.
struct Gathered {
  float* maxima;  // [rows]
  float* sums;    // [rows]
  float* values;  // [rows][padded_value_dim]

  static int64_t num_floats(const Attend& attend, int64_t num_rows) {
    return num_rows * (2 + attend.padded_value_dim());
  }
  Gathered(float* memory, int64_t num_rows) : maxima(memory), sums(memory + num_rows), values(memory + 2 * num_rows) {}
};

// Rows of one tile of queries that see keys of one KV head. They are ordered by query, then by head.
struct QueryTile {
  int64_t seq;
  int64_t kv_head;
  int64_t first_token;     // in the batch
  int64_t first_position;  // in the sequence
  int64_t num_queries;
};

void write_out(const Attend& attend, const QueryTile& tile, const Gathered& gathered) {
  const int64_t group = attend.group(), value_dim = attend.cache.value_dim;
  for (int64_t row = 0; row < tile.num_queries * group; ++row) {
    const float* values = gathered.values + row * attend.padded_value_dim();
    const int64_t token = tile.first_token + row / group, head = tile.kv_head * group + row % group;
    float* out = attend.out + (token * attend.num_heads + head) * value_dim;
    const float factor = 1.0F / gathered.sums[row];
    for (int64_t i = 0; i < value_dim; ++i) out[i] = values[i] * factor;
  }
}

// Computes tiles of queries against the cache; one per thread and call.
template <typename T>
class TileKernel {
 public:
  static int64_t num_floats(const Attend& attend) {
    const int64_t max_rows = max(1, kQueryTile / attend.group()) * attend.group();
    return max_rows * (attend.cache.key_dim + kKeyTile) + Gathered::num_floats(attend, max_rows) +
           kKeyTile * (attend.cache.key_dim + attend.padded_value_dim() + 2);
  }

  // memory: num_floats, aligned.
  TileKernel(const Attend& attend, float* memory)
      : attend_(attend),
        padded_value_dim_(attend.padded_value_dim()),
        max_rows_(max(1, kQueryTile / attend.group()) * attend.group()) {
    key_scales_ = memory;
    value_scales_ = key_scales_ + kKeyTile;
    staged_keys_ = value_scales_ + kKeyTile;
    staged_values_ = staged_keys_ + kKeyTile * attend.cache.key_dim;
    scores_ = staged_values_ + kKeyTile * padded_value_dim_;
    query_ = scores_ + max_rows_ * kKeyTile;
    gathered_ = query_ + max_rows_ * attend.cache.key_dim;
  }

  // Where a tile of queries may gather what no other thread needs.
  [[nodiscard]] Gathered own_gathered(int64_t num_rows) const { return Gathered(gathered_, num_rows); }

  // Gathers over the keys [begin, end) that the tile sees; begin is a multiple of kKeyTile.
  void gather(const QueryTile& tile, int64_t begin, int64_t end, const Gathered& gathered) {
    tile_ = tile;
    num_rows_ = tile.num_queries * attend_.group();
    pack_query();
    for (int64_t row = 0; row < num_rows_; ++row) gathered.maxima[row] = kMinusInfinity;
    std::memset(gathered.sums, 0, static_cast<size_t>(num_rows_) * sizeof(float));
    std::memset(gathered.values, 0, static_cast<size_t>(num_rows_ * padded_value_dim_) * sizeof(float));

    // What does not lie in whole vectors is laid out anew, as is what many rows would convert again and again.
    const bool many_rows = sizeof(T) < 4 && num_rows_ > kMaxRows;
    const bool stage_keys = attend_.cache.block_size % kLanes != 0 || many_rows;
    const bool stage_values = attend_.cache.value_dim % kLanes != 0 || many_rows;
    const int64_t key_stride = attend_.cache.block_size * kPacked<T>;
    for (; begin < end; begin += kKeyTile) {
      first_key_ = begin;
      num_keys_ = min(kKeyTile, end - begin);
      if (attend_.cache.key_scales != nullptr) locate_scales();
      if (stage_keys) {
        this->stage_keys();
        score(staged_key_vectors_, kKeyTile);
      } else {
        locate_keys();
        score(key_vectors_, key_stride);
      }
      soften_rows(gathered);
      if (stage_values) {
        this->stage_values();
        sum_values(staged_value_rows_, gathered);
      } else {
        locate_values();
        sum_values(value_rows_, gathered);
      }
    }
  }

 private:
  const Attend& attend_;
  const int64_t padded_value_dim_;
  const int64_t max_rows_;
  QueryTile tile_{};
  int64_t num_rows_ = 0;
  int64_t first_key_ = 0;
  int64_t num_keys_ = 0;

  float* query_;   // [panels][key_dim][rows of the panel], scaled
  float* scores_;  // [rows][kKeyTile]
  float* gathered_;
  float* key_scales_;  // [kKeyTile]
  float* value_scales_;
  float* staged_keys_;    // [key_dim][kKeyTile]
  float* staged_values_;  // [kKeyTile][padded_value_dim]
  const T* key_vectors_[kKeyTile / kLanes];
  const float* staged_key_vectors_[kKeyTile / kLanes];
  const T* value_rows_[kKeyTile];
  const float* staged_value_rows_[kKeyTile];

  // Calls body(first row, number of rows, keys of this tile that at least one of them sees) for each panel.
  template <typename Body>
  void for_each_panel(const Body& body) const {
    for (int64_t row = 0; row < num_rows_; row += kMaxRows) {
      const int64_t count = min(kMaxRows, num_rows_ - row);
      const KeyRange range = {visible(row).begin, visible(row + count - 1).end};
      if (range.begin < range.end) body(row, count, range);
    }
  }

  // Of this tile's keys; begin > end where there are none.
  [[nodiscard]] KeyRange visible(int64_t row) const {
    const int64_t query = row / attend_.group(), position = tile_.first_position + query;
    return {attend_.window > 0 ? max(0, position + 1 - attend_.window - first_key_) : 0,
            min(attend_.key_end(tile_.first_token + query, position) - first_key_, num_keys_)};
  }

  void pack_query() {
    const int64_t key_dim = attend_.cache.key_dim, group = attend_.group();
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t panel = row / kMaxRows * kMaxRows, count = min(kMaxRows, num_rows_ - panel);
      const float* from = attend_.query + (tile_.first_token + row / group) * attend_.query_row_stride +
                          (tile_.kv_head * group + row % group) * key_dim;
      float* to = query_ + panel * key_dim + (row - panel);
      for (int64_t d = 0; d < key_dim; ++d) to[d * count] = from[d] * attend_.scale;
    }
  }

  // Calls body(index in the tile, index of the cached (block, head), offset in the block, number of keys) for each part
  // of the tile's keys that lies in one block.
  template <typename Body>
  void for_each_run(const Body& body) const {
    const int64_t block_size = attend_.cache.block_size;
    const int32_t* table = attend_.batch.block_tables + tile_.seq * attend_.batch.block_table_stride;
    int64_t block = first_key_ / block_size, offset = first_key_ % block_size;
    for (int64_t key = 0; key < num_keys_; ++block, offset = 0) {
      const int64_t count = min(block_size - offset, num_keys_ - key);
      body(key, table[block] * attend_.cache.num_kv_heads + tile_.kv_head, offset, count);
      key += count;
    }
  }

  void locate_scales() {
    for_each_run([&](int64_t key, int64_t block, int64_t offset, int64_t count) {
      const int64_t from = block * attend_.cache.block_size + offset;
      std::memcpy(key_scales_ + key, attend_.cache.key_scales + from, static_cast<size_t>(count) * sizeof(float));
      std::memcpy(value_scales_ + key, attend_.cache.value_scales + from, static_cast<size_t>(count) * sizeof(float));
    });
  }

  void locate_keys() {
    const int64_t block_elements = attend_.cache.key_dim * attend_.cache.block_size;
    int64_t num_vectors = 0;
    for_each_run([&](int64_t, int64_t block, int64_t offset, int64_t count) {
      const T* keys = static_cast<const T*>(attend_.cache.keys) + block * block_elements;
      for (int64_t i = 0; i < count; i += kLanes) key_vectors_[num_vectors++] = keys + (offset + i) * kPacked<T>;
    });
    // Whole groups of vectors are computed; what is beyond the last key is not looked at.
    for (; num_vectors < kKeyTile / kLanes; ++num_vectors) key_vectors_[num_vectors] = key_vectors_[num_vectors - 1];
  }

  void locate_values() {
    const int64_t value_dim = attend_.cache.value_dim;
    for_each_run([&](int64_t key, int64_t block, int64_t offset, int64_t count) {
      const T* values =
          static_cast<const T*>(attend_.cache.values) + (block * attend_.cache.block_size + offset) * value_dim;
      for (int64_t i = 0; i < count; ++i) value_rows_[key + i] = values + i * value_dim;
    });
  }

  void stage_keys() {
    const int64_t block_size = attend_.cache.block_size, key_dim = attend_.cache.key_dim;
    for_each_run([&](int64_t key, int64_t block, int64_t offset, int64_t count) {
      const T* keys = static_cast<const T*>(attend_.cache.keys) + (block * key_dim * block_size) + offset * kPacked<T>;
      for (int64_t d = 0; d < key_dim; d += kPacked<T>, keys += block_size * kPacked<T>) {
        float* to = staged_keys_ + d * kKeyTile + key;
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) {
          const T* words = keys + i * kPacked<T>;
          store(unpack<0>(words), to + i);
          if constexpr (kPacked<T> >= 2) store(unpack<1>(words), to + kKeyTile + i);
          if constexpr (kPacked<T> == 4) {
            store(unpack<2>(words), to + 2 * kKeyTile + i);
            store(unpack<3>(words), to + 3 * kKeyTile + i);
          }
        }
        for (; i < count; ++i) {
          for (int64_t e = 0; e < kPacked<T>; ++e) to[e * kKeyTile + i] = to_float(keys[i * kPacked<T> + e]);
        }
      }
    });
    for (int64_t v = 0; v < kKeyTile / kLanes; ++v) staged_key_vectors_[v] = staged_keys_ + v * kLanes;
  }

  void stage_values() {
    locate_values();
    const int64_t value_dim = attend_.cache.value_dim;
    for (int64_t key = 0; key < num_keys_; ++key) {
      float* to = staged_values_ + key * padded_value_dim_;
      int64_t d = 0;
      for (; d + kLanes <= value_dim; d += kLanes) store(load_elements(value_rows_[key] + d), to + d);
      for (; d < value_dim; ++d) to[d] = to_float(value_rows_[key][d]);
      for (; d < padded_value_dim_; ++d) to[d] = 0.0F;
      staged_value_rows_[key] = to;
    }
  }

  template <typename Element>
  void score(const Element* const* keys, int64_t stride) {
    for_each_panel([&](int64_t row, int64_t count, KeyRange range) {
      with_row_count(count, [&](auto rows) {
        constexpr int64_t kRows = decltype(rows)::value, kWidth = kVectors<kRows, Element> * kLanes;
        for (int64_t key = range.begin / kWidth * kWidth; key < range.end; key += kWidth) {
          score_keys<kRows>(query_ + row * attend_.cache.key_dim, keys + key / kLanes, stride, attend_.cache.key_dim,
                            scores_ + row * kKeyTile + key);
        }
      });
    });
  }

  void soften_rows(const Gathered& gathered) {
    const bool has_scales = attend_.cache.key_scales != nullptr;
    for_each_panel([&](int64_t row, int64_t count, KeyRange range) {
      for (int64_t end = row + count; row < end; ++row) {
        const float factor = soften(scores_ + row * kKeyTile, range, visible(row), has_scales ? key_scales_ : nullptr,
                                    has_scales ? value_scales_ : nullptr, gathered.maxima + row, gathered.sums + row);
        if (factor == 1.0F) continue;
        float* values = gathered.values + row * padded_value_dim_;
        for (int64_t d = 0; d < padded_value_dim_; d += kLanes) store(load(values + d) * factor, values + d);
      }
    });
  }

  template <typename Element>
  void sum_values(const Element* const* values, const Gathered& gathered) {
    for_each_panel([&](int64_t row, int64_t count, KeyRange range) {
      with_row_count(count, [&](auto rows) {
        constexpr int64_t kRows = decltype(rows)::value, kWidth = kVectors<kRows, Element>;
        const float* weights = scores_ + row * kKeyTile;
        float* out = gathered.values + row * padded_value_dim_;
        int64_t d = 0;
        for (; d + kWidth * kLanes <= padded_value_dim_; d += kWidth * kLanes) {
          add_values<kRows, kWidth>(weights, values, d, range.begin, range.end, out + d, padded_value_dim_);
        }
        for (; d < padded_value_dim_; d += kLanes) {
          add_values<kRows, 1>(weights, values, d, range.begin, range.end, out + d, padded_value_dim_);
        }
      });
    });
  }
};

// Brings the spans of a tile together, in their order, and writes the result. partials: those of the first span; the
// next span's follow.
void merge_spans(const Attend& attend, const QueryTile& tile, int64_t num_spans, float* partials) {
  const int64_t num_rows = tile.num_queries * attend.group(), padded = attend.padded_value_dim();
  const Gathered total(partials, num_rows);
  for (int64_t span = 1; span < num_spans; ++span) {
    const Gathered next(partials + span * Gathered::num_floats(attend, num_rows), num_rows);
    for (int64_t row = 0; row < num_rows; ++row) {
      const float most = total.maxima[row] > next.maxima[row] ? total.maxima[row] : next.maxima[row];
      if (most == kMinusInfinity) continue;
      const float ours = exp(broadcast(total.maxima[row] - most))[0],
                  theirs = exp(broadcast(next.maxima[row] - most))[0];
      total.maxima[row] = most;
      total.sums[row] = total.sums[row] * ours + next.sums[row] * theirs;
      for (int64_t d = row * padded; d < (row + 1) * padded; d += kLanes) {
        store(load(total.values + d) * ours + load(next.values + d) * theirs, total.values + d);
      }
    }
  }
  write_out(attend, tile, total);
}

// Where each sequence's items and partial results begin; one more at the end.
struct Plan {
  int64_t num_items;
  int64_t num_partial_floats;
  int64_t num_products;
  const int64_t* first_item;           // [num_seqs + 1]
  const int64_t* first_partial_float;  // [num_seqs + 1]
};

Plan plan_work(const Attend& attend) {
  static thread_local Scratch scratch;
  const int64_t num_seqs = attend.batch.num_seqs, num_kv_heads = attend.cache.num_kv_heads;
  int64_t* items = reinterpret_cast<int64_t*>(scratch.floats(4 * (num_seqs + 1)));
  int64_t* floats = items + num_seqs + 1;
  Plan plan = {0, 0, 0, items, floats};
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    items[seq] = plan.num_items;
    floats[seq] = plan.num_partial_floats;
    const Split split(attend, seq);
    plan.num_items += split.num_items(num_kv_heads);
    if (split.num_spans > 1) {
      plan.num_partial_floats +=
          num_kv_heads * split.num_spans * Gathered::num_floats(attend, split.num_queries * attend.group());
    }
    plan.num_products += split.num_queries * attend.batch.seq_lens[seq] * attend.num_heads * attend.cache.key_dim;
  }
  items[num_seqs] = plan.num_items;
  floats[num_seqs] = plan.num_partial_floats;
  return plan;
}

int64_t find_seq(const Plan& plan, int64_t num_seqs, int64_t item) {
  int64_t first = 0, last = num_seqs;  // its items begin at or before this one; they begin after it
  while (last - first > 1) {
    const int64_t middle = (first + last) / 2;
    (plan.first_item[middle] <= item ? first : last) = middle;
  }
  return first;
}

template <typename T>
void attend_as(const Attend& attend) {
  static thread_local Scratch partials_scratch;
  const int64_t num_seqs = attend.batch.num_seqs, num_kv_heads = attend.cache.num_kv_heads;
  const Plan plan = plan_work(attend);
  float* partials = partials_scratch.floats(plan.num_partial_floats);
  const int64_t num_workers = max(1, min(min(num_threads(), plan.num_items), plan.num_products / kMinWork));

  // Items differ in size: each thread takes the next one when it is done with its last.
  int64_t next_item = 0;
  parallel_for(num_workers, 1, [&](int64_t, int64_t) {
    static thread_local Scratch scratch;
    TileKernel<T> kernel(attend, scratch.floats(TileKernel<T>::num_floats(attend)));
    for (;;) {
      const int64_t item = __atomic_fetch_add(&next_item, 1, __ATOMIC_RELAXED);
      if (item >= plan.num_items) break;
      const int64_t seq = find_seq(plan, num_seqs, item);
      const Split split(attend, seq);
      const int64_t local = item - plan.first_item[seq];
      const int64_t span = local % split.num_spans, kv_head = local / split.num_spans % num_kv_heads;
      // The last queries see the most keys: they come first.
      const int64_t first_query = (split.num_tiles - 1 - local / split.num_spans / num_kv_heads) * split.tile_queries;
      const QueryTile tile = {seq, kv_head, attend.batch.query_start_loc[seq] + first_query,
                              split.first_position + first_query,
                              min(split.tile_queries, split.num_queries - first_query)};
      const int64_t num_rows = tile.num_queries * attend.group();
      const int64_t last_query = tile.num_queries - 1;
      const int64_t num_keys = attend.key_end(tile.first_token + last_query, tile.first_position + last_query);
      const int64_t first_key =
          attend.window > 0 ? max(0, tile.first_position - attend.window + 1) / kKeyTile * kKeyTile : 0;
      if (split.num_spans == 1) {
        const Gathered gathered = kernel.own_gathered(num_rows);
        kernel.gather(tile, first_key, num_keys, gathered);
        write_out(attend, tile, gathered);
      } else {
        const int64_t begin = (split.first_span + span) * kSpan;
        float* memory = partials + plan.first_partial_float[seq] + local * Gathered::num_floats(attend, num_rows);
        kernel.gather(tile, max(first_key, begin), min(num_keys, begin + kSpan), Gathered(memory, num_rows));
      }
    }
  });
  if (plan.num_partial_floats == 0) return;
  parallel_for(num_seqs * num_kv_heads, ceil_div(num_seqs * num_kv_heads, num_workers),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t seq = i / num_kv_heads, kv_head = i % num_kv_heads;
                   const Split split(attend, seq);
                   if (split.num_spans == 1) continue;
                   const QueryTile tile = {seq, kv_head, attend.batch.query_start_loc[seq], split.first_position,
                                           split.num_queries};
                   const int64_t span_floats = Gathered::num_floats(attend, split.num_queries * attend.group());
                   merge_spans(attend, tile, split.num_spans,
                               partials + plan.first_partial_float[seq] + kv_head * split.num_spans * span_floats);
                 }
               });
}

void attend(const LayerCache& cache, const AttentionBatch& batch, int64_t num_heads, const float* query,
            int64_t query_row_stride, float scale, int64_t window, float* out) {
  const Attend attend = {cache, batch, num_heads, query, query_row_stride, scale, window, out};
  switch (cache.dtype) {
    case DType::kFloat32:
      return attend_as<float>(attend);
    case DType::kBFloat16:
      return attend_as<uint16_t>(attend);
    case DType::kInt8:
      return attend_as<int8_t>(attend);
  }
}

}  // namespace

extern const PagedAttentionKernels paged_attention;
const PagedAttentionKernels paged_attention = {write_kv_cache, attend};

}  // namespace deepinfer::cpu::DEEPINFER_ISA
