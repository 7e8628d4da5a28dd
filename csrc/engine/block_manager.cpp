#include "engine/block_manager.hpp"

#include <algorithm>
#include <stdexcept>

namespace deepinfer {
namespace {

// The finalizer of splitmix64 (Steele, Lea, Flood 2014): every input bit changes every output bit.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(std::string("block manager: ") + what);
}

}  // namespace

BlockManager::BlockManager(int num_blocks, int block_size, bool enable_prefix_caching, uint64_t hash_seed)
    : num_blocks_(num_blocks),
      block_size_(block_size),
      enable_prefix_caching_(enable_prefix_caching),
      hash_seed_(hash_seed),
      num_free_(num_blocks),
      blocks_(static_cast<size_t>(num_blocks) + 1) {
  size_t num_buckets = 1;
  while (enable_prefix_caching && num_buckets < blocks_.size()) num_buckets *= 2;
  buckets_.assign(num_buckets, kNone);
  if (enable_prefix_caching) cached_tokens_.resize(blocks_.size() * static_cast<size_t>(block_size));
  for (int32_t block = 1; block <= num_blocks; ++block) append(plain_free_, block);
  found_.reserve(blocks_.size());
}

int BlockManager::num_blocks_for(int64_t num_tokens) const {
  return static_cast<int>((num_tokens + block_size_ - 1) / block_size_);
}

Admission BlockManager::plan(BlockTable& table, const std::vector<int32_t>& tokens, const std::string& salt,
                             bool may_reuse) {
  found_.clear();
  Admission admission{0, num_blocks_for(static_cast<int64_t>(tokens.size()))};
  if (!enable_prefix_caching_ || !may_reuse) return admission;
  const size_t max_found = (tokens.size() - 1) / static_cast<size_t>(block_size_);
  uint64_t parent_id = 0;
  for (size_t i = 0; i < max_found; ++i) {
    extend_hashes(table, tokens, salt, i + 1);
    const int32_t block = find_cached(table.hashes[i], parent_id, &tokens[i * block_size_], salt);
    if (block == kNone) break;
    found_.push_back(block);
    parent_id = blocks_[block].content_id;
    if (blocks_[block].num_references > 0) --admission.num_free_blocks;
  }
  admission.num_cached_blocks = static_cast<int>(found_.size());
  return admission;
}

void BlockManager::allocate(BlockTable& table, const std::vector<int32_t>& tokens, const Admission& admission) {
  if (!table.blocks.empty() || admission.num_free_blocks > num_free_ ||
      static_cast<size_t>(admission.num_cached_blocks) != found_.size()) {
    throw std::logic_error("allocate() without a plan that fits");
  }
  const auto num_needed = static_cast<size_t>(num_blocks_for(static_cast<int64_t>(tokens.size())));
  // Found blocks first: taking a fresh one may evict what was found.
  for (const int32_t block : found_) {
    take_cached_block(block);
    table.blocks.push_back(block);
    table.content_ids.push_back(blocks_[block].content_id);
  }
  found_.clear();
  while (table.blocks.size() < num_needed) table.blocks.push_back(take_free_block());
}

void BlockManager::free(BlockTable& table) {
  for (auto block = table.blocks.rbegin(); block != table.blocks.rend(); ++block) drop_reference(*block);
  table.blocks.clear();
  table.content_ids.clear();
}

int BlockManager::num_blocks_to_write(const BlockTable& table, int64_t begin, int64_t end) const {
  const auto num_held = static_cast<int>(table.blocks.size());
  const int end_block = num_blocks_for(end);
  int num_needed = std::max(0, end_block - num_held);
  for (auto i = static_cast<int>(begin / block_size_); i < std::min(end_block, num_held); ++i) {
    if (blocks_[table.blocks[i]].num_references > 1) ++num_needed;
  }
  return num_needed;
}

void BlockManager::make_writable(BlockTable& table, int64_t begin, int64_t end, std::vector<BlockCopy>& copies) {
  const auto end_block = static_cast<size_t>(num_blocks_for(end));
  const auto begin_block = static_cast<size_t>(begin / block_size_);
  for (size_t i = begin_block; i < std::min(end_block, table.blocks.size()); ++i) {
    const int32_t shared = table.blocks[i];
    if (blocks_[shared].num_references > 1) {
      table.blocks[i] = take_free_block();
      copies.push_back({shared, table.blocks[i]});
      drop_reference(shared);
    } else if (blocks_[shared].content_id != 0) {
      // A full block is written again only when a step gave no token. Should this write fail, nobody may find it.
      forget_cached(shared);
    }
  }
  if (table.content_ids.size() > begin_block) table.content_ids.resize(begin_block);
  while (table.blocks.size() < end_block) table.blocks.push_back(take_free_block());
}

BlockTable BlockManager::fork(const BlockTable& table) {
  for (const int32_t block : table.blocks) ++blocks_[block].num_references;
  return table;
}

void BlockManager::cache_computed(BlockTable& table, const std::vector<int32_t>& tokens, const std::string& salt,
                                  int64_t num_computed_tokens) {
  if (!enable_prefix_caching_) return;
  const auto num_full = static_cast<size_t>(num_computed_tokens / block_size_);
  if (num_full <= table.content_ids.size()) return;
  extend_hashes(table, tokens, salt, num_full);
  for (size_t i = table.content_ids.size(); i < num_full; ++i) {
    const uint64_t parent_id = i == 0 ? 0 : table.content_ids[i - 1];
    const int32_t* block_tokens = &tokens[i * block_size_];
    int32_t holder = find_cached(table.hashes[i], parent_id, block_tokens, salt);
    // Someone else may have computed the same content meanwhile. Theirs stays the one that is found; ours continues the
    // same chain.
    if (holder == kNone) {
      holder = table.blocks[i];
      if (blocks_[holder].content_id != 0) forget_cached(holder);
      insert_cached(holder, table.hashes[i], parent_id, block_tokens, salt);
    }
    table.content_ids.push_back(blocks_[holder].content_id);
  }
}

int32_t BlockManager::take_free_block() {
  const int32_t block = plain_free_.first != kNone ? plain_free_.first : cached_free_.first;
  if (block == kNone) throw std::logic_error("took a block when none is free");
  remove(free_list_of(blocks_[block]), block);
  if (blocks_[block].content_id != 0) forget_cached(block);
  blocks_[block].num_references = 1;
  --num_free_;
  return block;
}

void BlockManager::take_cached_block(int32_t block) {
  if (blocks_[block].num_references++ > 0) return;
  remove(cached_free_, block);
  --num_free_;
}

void BlockManager::drop_reference(int32_t block) {
  if (blocks_[block].num_references <= 0) throw std::logic_error("freed a block that nobody holds");
  if (--blocks_[block].num_references > 0) return;
  append(free_list_of(blocks_[block]), block);
  ++num_free_;
}

void BlockManager::append(FreeList& list, int32_t block) {
  blocks_[block].previous_free = list.last;
  blocks_[block].next_free = kNone;
  (list.last == kNone ? list.first : blocks_[list.last].next_free) = block;
  list.last = block;
}

void BlockManager::remove(FreeList& list, int32_t block) {
  const Block& removed = blocks_[block];
  (removed.previous_free == kNone ? list.first : blocks_[removed.previous_free].next_free) = removed.next_free;
  (removed.next_free == kNone ? list.last : blocks_[removed.next_free].previous_free) = removed.previous_free;
}

void BlockManager::extend_hashes(BlockTable& table, const std::vector<int32_t>& tokens, const std::string& salt,
                                 size_t num_full_blocks) const {
  while (table.hashes.size() < num_full_blocks) {
    uint64_t hash = hash_seed_;
    if (!table.hashes.empty()) {
      hash = mix(hash ^ table.hashes.back());
    } else {
      for (const char byte : salt) hash = mix(hash * 3 + static_cast<unsigned char>(byte) + 1);
    }
    const int32_t* begin = &tokens[table.hashes.size() * block_size_];
    for (const int32_t* token = begin; token != begin + block_size_; ++token) {
      hash = mix(hash + 0x9e3779b97f4a7c15u + static_cast<uint32_t>(*token));
    }
    table.hashes.push_back(hash);
  }
}

int32_t BlockManager::find_cached(uint64_t hash, uint64_t parent_id, const int32_t* tokens,
                                  const std::string& salt) const {
  for (int32_t block = buckets_[bucket_of(hash)]; block != kNone; block = blocks_[block].next_in_bucket) {
    const Block& candidate = blocks_[block];
    if (candidate.hash != hash || candidate.parent_id != parent_id) continue;
    if (!std::equal(tokens, tokens + block_size_, &cached_tokens_[static_cast<size_t>(block) * block_size_])) continue;
    if (parent_id == 0 && candidate.salt != salt) continue;
    return block;
  }
  return kNone;
}

void BlockManager::insert_cached(int32_t block, uint64_t hash, uint64_t parent_id, const int32_t* tokens,
                                 const std::string& salt) {
  Block& inserted = blocks_[block];
  inserted.hash = hash;
  inserted.content_id = next_content_id_++;
  inserted.parent_id = parent_id;
  if (parent_id == 0) inserted.salt = salt;
  std::copy(tokens, tokens + block_size_, &cached_tokens_[static_cast<size_t>(block) * block_size_]);
  inserted.next_in_bucket = buckets_[bucket_of(hash)];
  buckets_[bucket_of(hash)] = block;
}

void BlockManager::forget_cached(int32_t block) {
  int32_t* link = &buckets_[bucket_of(blocks_[block].hash)];
  while (*link != block) link = &blocks_[*link].next_in_bucket;
  *link = blocks_[block].next_in_bucket;
  blocks_[block].content_id = 0;
}

void BlockManager::check_invariants(const std::vector<const BlockTable*>& tables) const {
  std::vector<int> num_references(blocks_.size(), 0);
  for (const BlockTable* table : tables) {
    expect(table->content_ids.size() <= table->blocks.size(), "a table knows contents of blocks it does not hold");
    for (const int32_t block : table->blocks) {
      expect(block >= 1 && block <= num_blocks_, "a table holds a block that does not exist");
      ++num_references[block];
    }
  }
  std::vector<int> num_free_entries(blocks_.size(), 0);
  int num_free = 0;
  for (const FreeList* list : {&plain_free_, &cached_free_}) {
    int32_t previous = kNone;
    for (int32_t block = list->first; block != kNone; previous = block, block = blocks_[block].next_free) {
      expect(++num_free_entries[block] == 1, "a block is on a free list twice");
      expect(blocks_[block].previous_free == previous, "a free list's links disagree");
      expect((blocks_[block].content_id != 0) == (list == &cached_free_), "a block is on the wrong free list");
      ++num_free;
    }
    expect(list->last == previous, "a free list does not end at its last block");
  }
  expect(num_free == num_free_, "free blocks do not add up");
  int num_cached = 0;
  for (int32_t block = 1; block <= num_blocks_; ++block) {
    expect(blocks_[block].num_references == num_references[block], "a reference count differs from its tables");
    expect((num_references[block] == 0) == (num_free_entries[block] == 1), "a block is neither free nor used");
    if (blocks_[block].content_id != 0) ++num_cached;
  }
  int num_mapped = 0;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    for (int32_t block = buckets_[bucket]; block != kNone; block = blocks_[block].next_in_bucket) {
      expect(blocks_[block].content_id != 0, "the hash map holds a block that is not cached");
      expect(bucket_of(blocks_[block].hash) == bucket, "a cached block is in the wrong bucket");
      expect(++num_mapped <= num_cached, "the hash map holds more blocks than are cached");
    }
  }
  expect(num_mapped == num_cached, "a cached block is missing from the hash map");
}

}  // namespace deepinfer
