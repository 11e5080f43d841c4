// How the tree changes: inserting, splitting, merging, cutting, and who may leave a tier next.
#include <algorithm>
#include <utility>

#include "radix_tree.h"

namespace kvstore {

namespace {

// Edges that grow or shrink step by step keep at most an eighth of slack; new ones have none.
void ReserveFor(Ids* values, size_t added) {
  const size_t size = values->size();
  if (values->capacity() < size + added) values->reserve(size + std::max(added, size / 8));
}

void ShrinkTo(Ids* values, size_t size) {
  values->resize(size);
  if (values->capacity() > size + size / 8 + 64) values->shrink_to_fit();
}

void Prepend(const Ids& front, Ids* values) {
  Ids joined;
  joined.reserve(front.size() + values->size());
  joined.insert(joined.end(), front.begin(), front.end());
  joined.insert(joined.end(), values->begin(), values->end());
  values->swap(joined);
}

}  // namespace

// ---- growing ----

uint32_t RadixTree::NewRoot(const Key128& root) {
  const uint32_t node_id = nodes_.Allocate();
  nodes_[node_id].end_key = root;
  nodes_[node_id].has_end_key = true;
  roots_.emplace(root, node_id);
  return node_id;
}

// Adds the rest of the prompt behind the cursor as staged blocks with one hold each.
// REQUIRES: some of the prompt is left, and no child of the node continues it.
void RadixTree::Insert(const Cursor& cursor, uint64_t tick, Ids* ids) {
  const uint32_t count = cursor.block_count - cursor.depth;
  const uint32_t* tokens = cursor.tokens + static_cast<size_t>(cursor.depth) * block_tokens_;
  uint32_t node_id = cursor.node;
  if (cursor.taken < nodes_[node_id].block_count()) node_id = Split(node_id, cursor.taken);
  const bool is_leaf = nodes_[node_id].parent != kNone && nodes_[node_id].child_count == 0;
  if (!is_leaf) node_id = NewChild(node_id, tokens, cursor.depth);
  Append(node_id, tokens, count, tick);
  const Ids& edge = nodes_[node_id].ids;
  ids->insert(ids->end(), edge.end() - count, edge.end());
}

// A child that holds no id yet, found by the block at `first_block`.
uint32_t RadixTree::NewChild(uint32_t parent, const uint32_t* first_block, uint32_t depth) {
  const uint32_t node_id = nodes_.Allocate();
  nodes_[node_id].depth = depth;
  LinkChild(parent, node_id, first_block);
  return node_id;
}

void RadixTree::Append(uint32_t node_id, const uint32_t* tokens, uint32_t count, uint64_t tick) {
  Node& node = nodes_[node_id];
  AccountEdge(node, -1);
  ReserveFor(&node.tokens, static_cast<size_t>(count) * block_tokens_);
  ReserveFor(&node.ids, count);
  node.tokens.insert(node.tokens.end(), tokens, tokens + static_cast<size_t>(count) * block_tokens_);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t id = blocks_.Allocate();
    Block& block = blocks_[id];
    block.tick = tick;
    block.node = node_id;
    block.depth = node.end();
    block.holds = 1;
    block.state = BlockState::kAttached;
    node.ids.push_back(id);
  }
  node.staged += count;
  node.has_end_key = false;
  AccountEdge(node, 1);
}

// ---- splitting and merging ----

// Makes the first `at` blocks of the node a parent of the rest, and returns that parent. The rest keeps the node, so
// that its children need not be found anew. O(blocks of the node).
uint32_t RadixTree::Split(uint32_t node_id, uint32_t at) {
  const uint32_t head_id = nodes_.Allocate();
  Node& head = nodes_[head_id];
  Node& tail = nodes_[node_id];
  AccountEdge(tail, -1);
  ReplaceChild(node_id, head_id);
  const size_t head_tokens = static_cast<size_t>(at) * block_tokens_;
  head.tokens.assign(tail.tokens.begin(), tail.tokens.begin() + head_tokens);
  head.ids.assign(tail.ids.begin(), tail.ids.begin() + at);
  tail.tokens = Ids(tail.tokens.begin() + head_tokens, tail.tokens.end());
  tail.ids = Ids(tail.ids.begin() + at, tail.ids.end());
  head.depth = tail.depth;
  tail.depth += at;
  for (uint32_t id : head.ids) {
    Block& block = blocks_[id];
    block.node = head_id;
    head.staged += block.staged();
    for (int tier = 0; tier < kTierCount; ++tier) head.resident[tier] += block.resident(tier);
  }
  tail.staged -= head.staged;
  for (int tier = 0; tier < kTierCount; ++tier) {
    tail.resident[tier] -= head.resident[tier];
    head.below[tier] = tail.occupied(tier);
    head.resident_end[tier] = std::min(tail.resident_end[tier], head.end());
  }
  LinkChild(head_id, node_id, tail.tokens.data());
  AccountEdge(head, 1);
  AccountEdge(tail, 1);
  Refresh(head_id);
  Refresh(node_id);
  return head_id;
}

// The inverse of Split. REQUIRES: the node is no root and has one child.
void RadixTree::MergeWithOnlyChild(uint32_t node_id) {
  const uint32_t child_id = nodes_[node_id].first_child;
  Node& head = nodes_[node_id];
  Node& tail = nodes_[child_id];
  UnlinkChild(child_id);
  ReplaceChild(node_id, child_id);
  AccountEdge(tail, -1);
  Prepend(head.tokens, &tail.tokens);
  Prepend(head.ids, &tail.ids);
  AccountEdge(tail, 1);
  tail.depth = head.depth;
  tail.staged += head.staged;
  for (uint32_t id : head.ids) blocks_[id].node = child_id;
  for (int tier = 0; tier < kTierCount; ++tier) {
    if (tail.resident[tier] == 0) tail.resident_end[tier] = head.resident_end[tier];
    tail.resident[tier] += head.resident[tier];
  }
  FreeNode(node_id);
  Refresh(child_id);
}

void RadixTree::LinkChild(uint32_t parent_id, uint32_t child_id, const uint32_t* first_block) {
  Node& parent = nodes_[parent_id];
  Node& child = nodes_[child_id];
  child.parent = parent_id;
  child.previous_sibling = kNone;
  child.next_sibling = parent.first_child;
  if (parent.first_child != kNone) nodes_[parent.first_child].previous_sibling = child_id;
  parent.first_child = child_id;
  ++parent.child_count;
  children_.Insert(Tag(parent_id, first_block), child_id);
}

// Takes the child out of its parent's list and out of the table; `child.parent` stays.
void RadixTree::UnlinkChild(uint32_t child_id) {
  const Node& child = nodes_[child_id];
  Node& parent = nodes_[child.parent];
  children_.Erase(Tag(child.parent, child.tokens.data()), child_id);
  if (child.previous_sibling == kNone) {
    parent.first_child = child.next_sibling;
  } else {
    nodes_[child.previous_sibling].next_sibling = child.next_sibling;
  }
  if (child.next_sibling != kNone) nodes_[child.next_sibling].previous_sibling = child.previous_sibling;
  --parent.child_count;
}

// Puts `new_child` where `old_child` is: same parent, same place in the list, same first block.
void RadixTree::ReplaceChild(uint32_t old_child, uint32_t new_child) {
  const Node& before = nodes_[old_child];
  const uint32_t tag = Tag(before.parent, before.tokens.data());
  children_.Erase(tag, old_child);
  children_.Insert(tag, new_child);
  Node& after = nodes_[new_child];
  after.parent = before.parent;
  after.previous_sibling = before.previous_sibling;
  after.next_sibling = before.next_sibling;
  if (after.next_sibling != kNone) nodes_[after.next_sibling].previous_sibling = new_child;
  if (after.previous_sibling == kNone) {
    nodes_[after.parent].first_child = new_child;
  } else {
    nodes_[after.previous_sibling].next_sibling = new_child;
  }
}

// REQUIRES: the node is not linked any more.
void RadixTree::FreeNode(uint32_t node_id) {
  for (VictimHeap& heap : heaps_) heap.Remove(node_id);
  AccountEdge(nodes_[node_id], -1);
  nodes_.Free(node_id);
}

void RadixTree::AccountEdge(const Node& node, int sign) {
  const size_t bytes = (node.tokens.capacity() + node.ids.capacity()) * sizeof(uint32_t);
  edge_bytes_ += sign > 0 ? bytes : 0 - bytes;
}

// ---- leaving the tree ----

// Cuts what is still in the tree of `ids`.
void RadixTree::CutAll(const Ids& ids, Removed* removed) {
  for (uint32_t id : ids) {
    const Block* block = FindUsed(id);
    if (block != nullptr && block->state == BlockState::kAttached) Cut(id, removed);
  }
}

// Removes an attached block and its subtree, then mends the shape above.
void RadixTree::Cut(uint32_t block_id, Removed* removed) {
  removals_.fetch_add(1, std::memory_order_relaxed);
  const uint32_t node_id = blocks_[block_id].node;
  Node& node = nodes_[node_id];
  const uint32_t kept_count = blocks_[block_id].depth - node.depth;
  const bool was_occupied[kTierCount] = {node.occupied(0), node.occupied(1)};
  const Key128 root = nodes_[RootNodeOf(node_id)].end_key;
  const Key128 key = ChainThrough(node, 0, kept_count, KeyBefore(node_id));
  RemoveChildren(node_id, Describe(node, kept_count, key, root, removed), root, removed);
  if (kept_count == 0) UnlinkChild(node_id);
  Truncate(node_id, kept_count, removed);
  for (int tier = 0; tier < kTierCount; ++tier) Propagate(node_id, tier, was_occupied[tier]);
  if (kept_count > 0) {
    node.end_key = key;
    node.has_end_key = true;
    Refresh(node_id);
  } else {
    const uint32_t parent = node.parent;
    FreeNode(node_id);
    Mend(parent);
  }
}

// Removes all that lies below the node; what the node's ancestors count is left to the caller.
void RadixTree::RemoveChildren(uint32_t node_id, const Key128& end_key, const Key128& root, Removed* removed) {
  std::vector<std::pair<uint32_t, Key128>> stack;  // a node, and the key before it
  const auto push_children = [&](const Node& node, const Key128& key) {
    for (uint32_t at = node.first_child; at != kNone; at = nodes_[at].next_sibling) stack.emplace_back(at, key);
  };
  Node& top = nodes_[node_id];
  push_children(top, end_key);
  top.first_child = kNone;
  top.child_count = 0;
  for (uint32_t& count : top.below) count = 0;
  while (!stack.empty()) {
    const auto [child_id, key] = stack.back();
    stack.pop_back();
    const Node& child = nodes_[child_id];
    push_children(child, Describe(child, 0, key, root, removed));
    children_.Erase(Tag(child.parent, child.tokens.data()), child_id);
    for (uint32_t id : child.ids) Retire(id, removed);
    FreeNode(child_id);
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

// REQUIRES: the node has no children.
void RadixTree::Truncate(uint32_t node_id, uint32_t count, Removed* removed) {
  Node& node = nodes_[node_id];
  for (uint32_t at = count; at < node.block_count(); ++at) {
    const Block& block = blocks_[node.ids[at]];
    node.staged -= block.staged();
    for (int tier = 0; tier < kTierCount; ++tier) node.resident[tier] -= block.resident(tier);
    Retire(node.ids[at], removed);
  }
  AccountEdge(node, -1);
  ShrinkTo(&node.ids, count);
  ShrinkTo(&node.tokens, static_cast<size_t>(count) * block_tokens_);
  AccountEdge(node, 1);
  for (uint32_t& end : node.resident_end) end = std::min(end, node.end());
}

// A node that lost a child: an empty root vanishes, a single child merges with its parent.
void RadixTree::Mend(uint32_t node_id) {
  const Node& node = nodes_[node_id];
  if (node.parent != kNone) {
    if (node.child_count == 1) MergeWithOnlyChild(node_id);
  } else if (node.child_count == 0) {
    roots_.erase(node.end_key);
    FreeNode(node_id);
  }
}

// Takes the block out of the counts of the tree. In use, it stays as a detached record until its last user lets go.
// REQUIRES: it was described.
void RadixTree::Retire(uint32_t id, Removed* removed) {
  Block& block = blocks_[id];
  ++removed->blocks;
  for (int tier = 0; tier < kTierCount; ++tier) tier_blocks_[tier] -= block.slot[tier] != kNoSlot;
  if (block.in_use()) {
    block.state = BlockState::kDetached;
    block.node = kNone;
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
}

// ---- leaving a tier ----

// Marks an attached, resident block as a victim of the tier.
void RadixTree::Take(uint32_t id, int tier) {
  Block& block = blocks_[id];
  block.leaving |= 1u << tier;
  AddResident(block.node, tier, -1);
  RefreshTier(block.node, tier);
}

// Counts `count` blocks of the node that came into `tier`, or stay in it after all; `end` is behind the deepest.
void RadixTree::BecomeResident(uint32_t node_id, int tier, uint32_t count, uint32_t end) {
  Node& node = nodes_[node_id];
  node.resident_end[tier] = std::max(node.resident_end[tier], end);
  AddResident(node_id, tier, count);
  RefreshTier(node_id, tier);
}

void RadixTree::AddResident(uint32_t node_id, int tier, int64_t delta) {
  Node& node = nodes_[node_id];
  const bool was_occupied = node.occupied(tier);
  node.resident[tier] = static_cast<uint32_t>(node.resident[tier] + delta);
  Propagate(node_id, tier, was_occupied);
}

// Tells the ancestors whether there is still something of the tier in the subtree of the node; stops where nothing
// changes.
void RadixTree::Propagate(uint32_t node_id, int tier, bool was_occupied) {
  for (uint32_t parent_id = nodes_[node_id].parent; parent_id != kNone; parent_id = nodes_[node_id].parent) {
    const bool is_occupied = nodes_[node_id].occupied(tier);
    if (is_occupied == was_occupied) return;
    Node& parent = nodes_[parent_id];
    was_occupied = parent.occupied(tier);
    parent.below[tier] += is_occupied ? 1 : -1;
    RefreshTier(parent_id, tier);
    node_id = parent_id;
  }
}

// The deepest block of the node that is resident in the tier. REQUIRES: there is one.
uint32_t RadixTree::LastResident(Node* node, int tier) {
  uint32_t end = node->resident_end[tier];
  while (!blocks_[node->ids[end - node->depth - 1]].resident(tier)) --end;
  node->resident_end[tier] = end;
  return node->ids[end - node->depth - 1];
}

void RadixTree::Refresh(uint32_t node_id) {
  for (int tier = 0; tier < kTierCount; ++tier) RefreshTier(node_id, tier);
}

// Brings the node's entry among the victims of the tier up to date.
void RadixTree::RefreshTier(uint32_t node_id, int tier) {
  Node& node = nodes_[node_id];
  if (node.resident[tier] == 0 || node.below[tier] > 0) {
    heaps_[tier].Remove(node_id);
    return;
  }
  const Block& last = blocks_[LastResident(&node, tier)];
  if (last.holds > 0) {
    heaps_[tier].Remove(node_id);
  } else {
    heaps_[tier].Set(node_id, VictimRank{last.tick, last.slot[tier]});
  }
}

// The block that leaves the tier first, or kNone. Touching and leasing do not move entries, so a rank may be too low,
// never too high: an entry is brought up to date when it comes to the top.
uint32_t RadixTree::ColdestVictim(int tier) {
  VictimHeap& heap = heaps_[tier];
  while (!heap.empty()) {
    const uint32_t node_id = heap.top_node();
    const uint32_t id = LastResident(&nodes_[node_id], tier);
    const Block& block = blocks_[id];
    const VictimRank rank{block.tick, block.slot[tier]};
    if (block.holds == 0 && !(heap.top_rank() < rank)) return id;
    RefreshTier(node_id, tier);
  }
  return kNone;
}

}  // namespace kvstore
