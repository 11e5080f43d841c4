// What the tree is made of: blocks (per-block state) and nodes (runs of blocks without a branch).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policy.h"
#include "pool.h"
#include "runs.h"
#include "siphash.h"

namespace kvstore {

constexpr int kTierCount = 2;
constexpr uint32_t kNoSlot = 0xFFFFFFFFu;

enum class BlockState : uint8_t { kFree, kAttached, kDetached };

constexpr unsigned kHoldsBits = 18;
constexpr uint32_t kHoldsMax = (uint32_t{1} << kHoldsBits) - 1;
constexpr uint16_t kNoQueue = 0xFFFF;

enum class VictimEnd : uint8_t { kFirst, kLast };  // of a queue of victims

// The state of one block. `depth` is its index in the prefix, so that its place in a node, `depth - node.depth`,
// survives splits and merges. Match, which runs beside touches and leases, reads `slot` alone: the packed word is not its.
struct Block {
  uint32_t slot[kTierCount] = {kNoSlot, kNoSlot};
  uint32_t node = kNone;
  uint32_t depth = 0;
  uint32_t holds : kHoldsBits;
  BlockState state : 2;
  uint32_t leaving : kTierCount;  // a bit for each tier that the block was taken as a victim of

  Block() : holds(0), state(BlockState::kFree), leaving(0) {}

  uint32_t& FreeLink() { return node; }
  bool staged() const { return slot[0] == kNoSlot && slot[1] == kNoSlot; }
  bool leaves(int tier) const { return (leaving >> tier) & 1; }
  bool resident(int tier) const { return slot[tier] != kNoSlot && !leaves(tier); }
  bool in_use() const { return holds > 0 || leaving != 0; }  // by leases or an eviction under way
};
static_assert(sizeof(Block) == 20, "the budget of memory per block counts on it");

constexpr uint32_t kMarkBlocks = 32;  // so that no key within an edge is farther than that from a kept one

// A run of blocks. A root has no blocks and no parent. The children differ in their first block.
struct Node {
  std::vector<uint32_t> tokens;  // (blocks, block_tokens), contiguous
  std::vector<uint32_t> ids;     // (blocks)
  Runs runs;                     // the histories of the blocks
  std::vector<uint64_t> fingerprints;  // of some of the prefixes that end in the node; for policies with ghosts
  uint64_t start_fingerprint = 0;      // of the prefix before the node
  uint64_t linked = 0;                 // when it became a child, counted; siblings lie from the last to the first
  Key128 end_key{};              // key of the last block; of a root, the root key. Valid where has_end_key.
  std::unique_ptr<std::vector<Key128>> marks;  // keys of the blocks 31, 63, ... of this node, as far as they were needed
  uint32_t parent = kNone;
  uint32_t first_child = kNone;
  uint32_t next_sibling = kNone;
  uint32_t previous_sibling = kNone;
  uint32_t child_count = 0;
  uint32_t depth = 0;                         // index in the prefix of the first block
  uint32_t staged = 0;                        // blocks of this node without a slot
  uint32_t resident[kTierCount] = {0, 0};     // blocks of this node in the tier and not leaving it
  uint32_t below[kTierCount] = {0, 0};        // children that have a resident block in their subtree
  uint32_t resident_end[kTierCount] = {0, 0};  // no resident block lies at this depth or deeper
  uint32_t victim_place[kTierCount][2] = {{kNone, kNone}, {kNone, kNone}};  // in the heaps of its queue
  uint16_t victim_queue[kTierCount] = {kNoQueue, kNoQueue};
  bool has_end_key = false;
  bool is_live = false;  // false: the record is free

  uint32_t& FreeLink() { return parent; }
  uint32_t block_count() const { return static_cast<uint32_t>(ids.size()); }
  uint32_t end() const { return depth + block_count(); }
  bool occupied(int tier) const { return resident[tier] > 0 || below[tier] > 0; }
  uint32_t mark_count() const { return marks ? static_cast<uint32_t>(marks->size()) : 0; }
  void KeepMarks(uint32_t blocks) {
    if (marks && blocks < kMarkBlocks) marks.reset();
    if (marks && blocks / kMarkBlocks < marks->size()) marks->resize(blocks / kMarkBlocks);
  }
  size_t edge_bytes() const {
    const size_t values = (tokens.capacity() + ids.capacity()) * sizeof(uint32_t);
    const size_t histories = runs.bytes() + fingerprints.capacity() * sizeof(uint64_t);
    return values + histories + (marks ? sizeof(*marks) + marks->capacity() * sizeof(Key128) : 0);
  }
};

using BlockPool = Pool<Block, 10>;
using NodePool = Pool<Node, 8>;

}  // namespace kvstore
