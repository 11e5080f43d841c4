// How blocks leave the tree: cut off at once, taken apart in slices.
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "radix_tree.h"

namespace kvstore {

namespace {

void ShrinkTo(Ids* values, size_t size) {
  values->resize(size);
  if (values->capacity() > size + size / 8 + 64) values->shrink_to_fit();
}

}  // namespace

// ---- what callers ask for ----

Removed RadixTree::Drop(IdSpan ids) {
  CheckIds(ids);
  Removed removed;
  const std::unique_lock lock(shape_mutex_);
  CutAll(Ids(ids.begin(), ids.end()), &removed);
  steps_ += ids.size;
  return removed;
}

Removed RadixTree::DropUnheld(const Key128& root, TokenSpan tokens, int64_t from_block, std::optional<Resume> resume) {
  if (from_block < 0) throw std::invalid_argument("from_block is negative");
  Removed removed;
  Cursor cursor = StartAt(FindRoot(root), tokens);
  while (cursor.depth <= from_block && Descend(&cursor)) continue;
  if (cursor.depth <= from_block) return removed;
  const auto from = static_cast<uint32_t>(from_block);
  const Node& top = nodes_[cursor.node];
  uint32_t block_id = top.ids[from - top.depth];
  if (resume && resume->removals == removals() && LiesBelow(resume->block, block_id)) block_id = resume->block;
  const std::unique_lock lock(shape_mutex_);
  const bool was_condemned = condemned();
  const uint64_t steps_max = steps_ + limits_.slice_blocks;
  while (block_id != kNone && steps_ < steps_max) block_id = DropBelow(block_id, from, &removed);
  if (block_id != kNone) {
    removed.resume = Resume{block_id, removals()};
  } else if (!was_condemned) {
    ReapSome(limits_.slice_blocks, &removed);
  }
  return removed;
}

Removed RadixTree::Clear() {
  Removed removed;
  const std::unique_lock lock(shape_mutex_);
  removals_.fetch_add(1, std::memory_order_relaxed);
  if (!roots_.empty()) cleared_.push_back(std::exchange(roots_, RootMap(0, KeyHash{hash_seed_})));
  ReapSome(limits_.slice_blocks, &removed);
  return removed;
}

Removed RadixTree::Reap() {
  Removed removed;
  const std::unique_lock lock(shape_mutex_);
  ReapSome(limits_.slice_blocks, &removed);
  return removed;
}

// ---- cutting off ----

// Cuts what is still in the tree of `ids`, and reaps what fits into one slice.
void RadixTree::CutAll(const Ids& ids, Removed* removed) {
  const bool was_condemned = condemned();
  for (uint32_t id : ids) {
    const Block* block = FindUsed(id);
    if (block == nullptr || block->state != BlockState::kAttached || IsCondemned(block->node)) continue;
    Cut(id, removed);
  }
  if (!was_condemned) ReapSome(limits_.slice_blocks, removed);  // else there is somebody who reaps
}

// Removes an attached block and the rest of its edge, condemns what lies below, and mends the shape above.
void RadixTree::Cut(uint32_t block_id, Removed* removed) {
  removals_.fetch_add(1, std::memory_order_relaxed);
  const uint32_t node_id = blocks_[block_id].node;
  const uint32_t kept_count = blocks_[block_id].depth - nodes_[node_id].depth;
  const Key128 root = RootKeyOf(node_id);
  const Key128 key = KeyAfter(node_id, kept_count);
  if (kept_count == 0 || nodes_[node_id].child_count > 0) {
    uint32_t parent_id = nodes_[node_id].parent;
    if (kept_count > 0) {
      parent_id = Split(node_id, kept_count);
      nodes_[parent_id].end_key = key;
      nodes_[parent_id].has_end_key = true;
    }
    Uproot(node_id, key, root, removed);
    Mend(parent_id);
    return;
  }
  Node& node = nodes_[node_id];
  const bool was_occupied[kTierCount] = {node.occupied(0), node.occupied(1)};
  Describe(node, kept_count, key, root, removed);
  Truncate(node_id, kept_count, removed);
  for (int tier = 0; tier < kTierCount; ++tier) Propagate(node_id, tier, was_occupied[tier]);
  node.end_key = key;
  node.has_end_key = true;
  Refresh(node_id);
  Mend(node_id);
}

// Takes a node out of the tree of its parent and removes its blocks. Where it has children it becomes their condemned
// root.
void RadixTree::Uproot(uint32_t node_id, const Key128& key_before, const Key128& root, Removed* removed) {
  Disown(node_id);
  Node& node = nodes_[node_id];
  const uint32_t end = node.end();
  const Key128 end_key = Describe(node, 0, key_before, root, removed);
  Truncate(node_id, 0, removed);
  if (node.child_count == 0) {
    FreeNode(node_id);
    return;
  }
  for (VictimQueues& queues : victims_) queues.Remove(node_id);
  node.depth = end;
  node.end_key = end_key;
  node.has_end_key = true;
  condemned_.emplace(node_id, root);
  NodeChanged(node_id);
}

// Unlinks a node from its parent, whose ancestors count nothing of it any more.
void RadixTree::Disown(uint32_t node_id) {
  UnlinkChild(node_id);
  Node& node = nodes_[node_id];
  const uint32_t parent_id = std::exchange(node.parent, kNone);
  for (int tier = 0; tier < kTierCount; ++tier) {
    if (!node.occupied(tier)) continue;
    --nodes_[parent_id].below[tier];
    RefreshTier(parent_id, tier);
    Propagate(parent_id, tier, true);
  }
}

// Names the blocks of the node from `from` on before they go: committed ones by their keys, for those who follow
// events; ones in use by all that they are. `key` is the key before them; returns the one of the last.
Key128 RadixTree::Describe(const Node& node, uint32_t from, Key128 key, const Key128& root, Removed* removed) {
  for (uint32_t at = from; at < node.block_count(); ++at) {
    const uint32_t id = node.ids[at];
    const Block& block = blocks_[id];
    const Key128 parent_key = key;
    key = ChainThrough(node, at, at + 1, key);
    if (!block.staged()) removed->dropped_keys.push_back(key);
    if (block.in_use()) {
      const auto tokens = node.tokens.begin() + static_cast<std::ptrdiff_t>(at) * block_tokens_;
      detached_.emplace(id, Identity{root, parent_key, key, Ids(tokens, tokens + block_tokens_)});
    }
  }
  return key;
}

// Retires the blocks of the node from `count` on. REQUIRES: they were described.
void RadixTree::Truncate(uint32_t node_id, uint32_t count, Removed* removed) {
  Node& node = nodes_[node_id];
  for (uint32_t at = count; at < node.block_count(); ++at) {
    const Block& block = blocks_[node.ids[at]];
    node.staged -= block.staged();
    for (int tier = 0; tier < kTierCount; ++tier) node.resident[tier] -= block.resident(tier);
    Retire(node.ids[at], removed);
  }
  AccountEdge(node_id, -1);
  DropHistories(&node, count);
  ShrinkTo(&node.ids, count);
  ShrinkTo(&node.tokens, static_cast<size_t>(count) * block_tokens_);
  node.KeepMarks(count);
  AccountEdge(node_id, 1);
  for (uint32_t& end : node.resident_end) end = std::min(end, node.end());
}

// A node that lost a child or its last blocks: an empty root vanishes, and what fits into one node becomes one.
void RadixTree::Mend(uint32_t node_id) {
  const Node& node = nodes_[node_id];
  if (node.child_count == 1) {
    MergeIfFits(node_id);
  } else if (node.child_count > 1) {
    return;
  } else if (node.parent != kNone) {
    MergeIfFits(node.parent);
  } else {
    roots_.erase(node.end_key);
    FreeNode(node_id);
  }
}

// Takes the block out of the counts of the tree. In use, it stays as a detached record until its last user lets go.
// REQUIRES: it was described.
void RadixTree::Retire(uint32_t id, Removed* removed) {
  Block& block = blocks_[id];
  ++removed->blocks;
  ++steps_;
  for (int tier = 0; tier < kTierCount; ++tier) tier_blocks_[tier] -= block.slot[tier] != kNoSlot;
  if (block.in_use()) {
    block.state = BlockState::kDetached;
    block.node = kNone;
    BlockChanged(id);
  } else {
    FreeBlock(id, removed);
  }
}

void RadixTree::FreeDetached(uint32_t id, Removed* removed) {
  detached_.erase(id);
  FreeBlock(id, removed);
}

void RadixTree::FreeBlock(uint32_t id, Removed* removed) {
  for (int tier = 0; tier < kTierCount; ++tier) {
    if (blocks_[id].slot[tier] != kNoSlot) removed->slots[tier].push_back(blocks_[id].slot[tier]);
  }
  blocks_.Free(id);
  BlockChanged(id);
}

// ---- what is condemned ----

// Takes nodes out from the top of condemned trees until `removed` has `block_count` blocks or nothing is left.
void RadixTree::ReapSome(uint32_t block_count, Removed* removed) {
  while (removed->blocks < block_count && (!condemned_.empty() || CondemnClearedRoot())) {
    const auto [root_node, root] = *condemned_.begin();
    Uproot(nodes_[root_node].first_child, nodes_[root_node].end_key, root, removed);
    if (nodes_[root_node].child_count > 0) continue;
    condemned_.erase(root_node);
    FreeNode(root_node);
  }
}

// Enters one more of the roots that were cleared. False where there is none.
bool RadixTree::CondemnClearedRoot() {
  if (cleared_.empty()) return false;
  const auto [key, root_node] = *cleared_.back().begin();
  condemned_.emplace(root_node, key);
  cleared_.back().erase(key);
  if (cleared_.back().empty()) cleared_.pop_back();
  return true;
}

// Whether the node lies below a condemned root. O(nodes above it), and O(1) while nothing is condemned.
bool RadixTree::IsCondemned(uint32_t node_id) const {
  if (!condemned()) return false;
  const uint32_t top = RootNodeOf(node_id);
  return FindRoot(nodes_[top].end_key) != top;
}

uint32_t RadixTree::condemned_root_count() const {
  size_t count = condemned_.size();
  for (const RootMap& roots : cleared_) count += roots.size();
  return static_cast<uint32_t>(count);
}

// ---- walking through what is held ----

// One step of the way through a subtree, parents first: cuts the first unheld block from this one on in its node, with
// all below it, or goes on to the children. Returns the block to go on with; kNone when the subtree of the block at
// depth `from_block` was walked through. Holds never grow from the root down, so in each node the unheld blocks are a
// tail with an unheld subtree.
uint32_t RadixTree::DropBelow(uint32_t block_id, uint32_t from_block, Removed* removed) {
  ++steps_;
  const uint32_t node_id = blocks_[block_id].node;
  const Node& node = nodes_[node_id];
  const auto held = [this](uint32_t id) { return blocks_[id].holds > 0; };
  const auto begin = node.ids.begin() + (blocks_[block_id].depth - node.depth);
  const auto first_unheld = std::partition_point(begin, node.ids.end(), held);
  if (first_unheld == node.ids.end() && node.first_child != kNone) return nodes_[node.first_child].ids.front();
  const uint32_t next = NextBeside(node_id, from_block);
  if (first_unheld != node.ids.end()) Cut(*first_unheld, removed);
  return next;
}

// Whether a block is in the subtree of `top_id`, itself included.
bool RadixTree::LiesBelow(uint32_t block_id, uint32_t top_id) const {
  const Block* block = FindUsed(block_id);
  const Block& top = blocks_[top_id];
  if (block == nullptr || block->state != BlockState::kAttached || block->depth < top.depth) return false;
  uint32_t node_id = block->node;
  while (nodes_[node_id].depth > top.depth) node_id = nodes_[node_id].parent;
  return node_id == top.node;
}

// The first block of the next subtree beside this node or beside one above it, below the block at depth `from_block`.
uint32_t RadixTree::NextBeside(uint32_t node_id, uint32_t from_block) const {
  while (nodes_[node_id].depth > from_block) {
    const uint32_t sibling = nodes_[node_id].next_sibling;
    if (sibling != kNone) return nodes_[sibling].ids.front();
    node_id = nodes_[node_id].parent;
  }
  return kNone;
}

}  // namespace kvstore
