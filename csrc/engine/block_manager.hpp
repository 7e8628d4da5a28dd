// Who holds which block of the KV cache, and which content a free block still has.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace deepinfer {

// The blocks of one sequence, first token first. Filled and emptied by the BlockManager alone.
struct BlockTable {
  std::vector<int32_t> blocks;
  // One entry per leading block whose content is known to the prefix cache: the id of that content.
  std::vector<uint64_t> content_ids;
  // Chained hashes of the leading full blocks of tokens, computed when first asked for. They depend on tokens and salt
  // only, so they outlive a preemption.
  std::vector<uint64_t> hashes;
};

struct BlockCopy {
  int32_t source;
  int32_t target;
};

// What a prefix of known tokens would take out of the cache; good until the BlockManager changes.
struct Admission {
  int num_cached_blocks;  // leading blocks found in the prefix cache
  int num_free_blocks;    // how many free blocks it takes, found ones that are free included
};

// Owns the state of every block: numbers 1 to num_blocks; block 0 is the dummy and never given out.
//
// 1. num_free + num_used == num_blocks. A block is used while at least one table holds it (its reference count).
// 2. A block with more than one reference is never written: `make_writable` replaces it by a copy.
// 3. A block in the prefix cache is full and its content confirmed. Its content is named by an id that is never used
//    again; a hit is believed only after hash, parent's content id, tokens and, at the root, the salt are equal.
// 4. Free blocks without cached content are given out first, then cached ones, the least recently used first. Within
//    one table the tail goes before the head, so that a chain is not cut at its root.
// 5. Nothing here allocates memory after the constructor, but for growing tables.
class BlockManager {
 public:
  BlockManager(int num_blocks, int block_size, bool enable_prefix_caching, uint64_t hash_seed);

  [[nodiscard]] int num_blocks() const { return num_blocks_; }
  [[nodiscard]] int block_size() const { return block_size_; }
  [[nodiscard]] int num_free_blocks() const { return num_free_; }
  [[nodiscard]] int num_used_blocks() const { return num_blocks_ - num_free_; }
  [[nodiscard]] int num_blocks_for(int64_t num_tokens) const;

  // What `allocate` would do for a table without blocks. At least one token is never found: it must be computed. With
  // `may_reuse` false, all must.
  [[nodiscard]] Admission plan(BlockTable& table, const std::vector<int32_t>& tokens, const std::string& salt,
                               bool may_reuse);
  // Blocks for all of `tokens`, cached ones first. Call it right after the `plan` that showed that they are there.
  void allocate(BlockTable& table, const std::vector<int32_t>& tokens, const Admission& admission);
  // Gives all of them back; what is cached stays findable.
  void free(BlockTable& table);

  // Free blocks that writing tokens [begin, end) takes: missing ones, and copies of shared ones.
  [[nodiscard]] int num_blocks_to_write(const BlockTable& table, int64_t begin, int64_t end) const;
  // Makes the table hold blocks of its own for tokens [begin, end); appends the copies the device must make first.
  void make_writable(BlockTable& table, int64_t begin, int64_t end, std::vector<BlockCopy>& copies);

  // A table with the same blocks; all of them are shared from now on.
  [[nodiscard]] BlockTable fork(const BlockTable& table);

  // Puts the full blocks among the first `num_computed_tokens` into the prefix cache. The device has written them.
  void cache_computed(BlockTable& table, const std::vector<int32_t>& tokens, const std::string& salt,
                      int64_t num_computed_tokens);

  // Recounts everything; throws std::runtime_error with the first thing that does not add up.
  void check_invariants(const std::vector<const BlockTable*>& tables) const;

 private:
  static constexpr int32_t kNone = -1;

  struct Block {
    int num_references = 0;
    uint64_t hash = 0;
    uint64_t content_id = 0;  // 0: not in the prefix cache
    uint64_t parent_id = 0;   // content id of the block before; 0 at the root
    int32_t previous_free = kNone, next_free = kNone;
    int32_t next_in_bucket = kNone;
    std::string salt;  // of a root block
  };

  // Doubly linked through the blocks themselves: one can be taken out of the middle.
  struct FreeList {
    int32_t first = kNone, last = kNone;
  };

  [[nodiscard]] int32_t take_free_block();
  void take_cached_block(int32_t block);
  void drop_reference(int32_t block);

  void append(FreeList& list, int32_t block);
  void remove(FreeList& list, int32_t block);
  FreeList& free_list_of(const Block& block) { return block.content_id ? cached_free_ : plain_free_; }

  void extend_hashes(BlockTable& table, const std::vector<int32_t>& tokens, const std::string& salt,
                     size_t num_full_blocks) const;
  [[nodiscard]] int32_t find_cached(uint64_t hash, uint64_t parent_id, const int32_t* tokens,
                                    const std::string& salt) const;
  void insert_cached(int32_t block, uint64_t hash, uint64_t parent_id, const int32_t* tokens, const std::string& salt);
  void forget_cached(int32_t block);
  [[nodiscard]] size_t bucket_of(uint64_t hash) const { return hash & (buckets_.size() - 1); }

  int num_blocks_;
  int block_size_;
  bool enable_prefix_caching_;
  uint64_t hash_seed_;
  int num_free_;
  uint64_t next_content_id_ = 1;
  std::vector<Block> blocks_;           // [num_blocks + 1], by number
  std::vector<int32_t> cached_tokens_;  // [num_blocks + 1, block_size] tokens of the cached blocks
  std::vector<int32_t> buckets_;        // first block of each bucket of the hash map
  FreeList plain_free_, cached_free_;
  std::vector<int32_t> found_;  // blocks that the last `plan` found
};

}  // namespace deepinfer
