// How the tree changes: inserting, splitting, merging, and who may leave a tier next.
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
  const uint32_t node_id = NewNode();
  nodes_[node_id].end_key = root;
  nodes_[node_id].has_end_key = true;
  nodes_[node_id].start_fingerprint = KeyHash{hash_seed_}(root);
  roots_.emplace(root, node_id);
  NodeChanged(node_id);
  return node_id;
}

uint32_t RadixTree::NewNode() {
  const uint32_t node_id = nodes_.Allocate();
  nodes_[node_id].is_live = true;
  return node_id;
}

// Adds the rest of the prompt behind the cursor as staged blocks with one hold each.
// REQUIRES: some of the prompt is left, and no child of the node continues it.
void RadixTree::Insert(const Cursor& cursor, const Births& births, Ids* ids) {
  const uint32_t* tokens = cursor.tokens + static_cast<size_t>(cursor.depth) * block_tokens_;
  uint32_t left = cursor.block_count - cursor.depth;
  uint32_t depth = cursor.depth;
  const auto append = [&](uint32_t node_id) {
    const uint32_t count = std::min(left, limits_.edge_blocks - nodes_[node_id].block_count());
    Append(node_id, tokens, count, births);
    const Ids& edge = nodes_[node_id].ids;
    ids->insert(ids->end(), edge.end() - count, edge.end());
    tokens += static_cast<size_t>(count) * block_tokens_;
    left -= count;
    depth += count;
  };
  uint32_t node_id = cursor.node;
  if (cursor.taken < nodes_[node_id].block_count()) {
    const uint32_t tail_id = node_id;
    node_id = Split(tail_id, cursor.taken);
    MergeIfFits(tail_id);
    MergeIfFits(nodes_[node_id].parent);
  } else if (nodes_[node_id].parent != kNone && nodes_[node_id].child_count == 0) {
    append(node_id);
  }
  while (left > 0) {
    node_id = NewChild(node_id, tokens, depth);
    append(node_id);
  }
}

// A child that holds no id yet, found by the block at `first_block`.
uint32_t RadixTree::NewChild(uint32_t parent, const uint32_t* first_block, uint32_t depth) {
  const uint32_t node_id = NewNode();
  nodes_[node_id].depth = depth;
  LinkChild(parent, node_id, first_block);
  return node_id;
}

void RadixTree::Append(uint32_t node_id, const uint32_t* tokens, uint32_t count, const Births& births) {
  Node& node = nodes_[node_id];
  AccountEdge(node_id, -1);
  ReserveFor(&node.tokens, static_cast<size_t>(count) * block_tokens_);
  ReserveFor(&node.ids, count);
  node.tokens.insert(node.tokens.end(), tokens, tokens + static_cast<size_t>(count) * block_tokens_);
  AppendHistories(&node, count, births);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t id = blocks_.Allocate();
    Block& block = blocks_[id];
    block.node = node_id;
    block.depth = node.end();
    block.holds = 1;
    block.state = BlockState::kAttached;
    node.ids.push_back(id);
    BlockChanged(id);
  }
  node.staged += count;
  if (count > 0) node.has_end_key = false;
  AccountEdge(node_id, 1);
}

// ---- splitting and merging ----

// Makes the first `at` blocks of the node a parent of the rest, and returns that parent. The rest keeps the node, so
// that its children need not be found anew. O(blocks of the node). The caller merges what fits.
uint32_t RadixTree::Split(uint32_t node_id, uint32_t at) {
  const uint32_t head_id = NewNode();
  Node& head = nodes_[head_id];
  Node& tail = nodes_[node_id];
  steps_ += tail.block_count();
  AccountEdge(node_id, -1);
  ReplaceChild(node_id, head_id);
  const size_t head_tokens = static_cast<size_t>(at) * block_tokens_;
  head.tokens.assign(tail.tokens.begin(), tail.tokens.begin() + head_tokens);
  head.ids.assign(tail.ids.begin(), tail.ids.begin() + at);
  tail.tokens = Ids(tail.tokens.begin() + head_tokens, tail.tokens.end());
  tail.ids = Ids(tail.ids.begin() + at, tail.ids.end());
  head.marks = std::move(tail.marks);
  head.KeepMarks(at);
  head.depth = tail.depth;
  tail.depth += at;
  SplitHistories(&head, &tail);
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
  AccountEdge(head_id, 1);
  AccountEdge(node_id, 1);
  Refresh(head_id);
  Refresh(node_id);
  return head_id;
}

// Keeps runs without a branch in as few nodes as the limit of an edge allows.
void RadixTree::MergeIfFits(uint32_t node_id) {
  const Node& node = nodes_[node_id];
  if (node.parent == kNone || node.child_count != 1) return;
  if (node.block_count() + nodes_[node.first_child].block_count() <= limits_.edge_blocks) MergeWithOnlyChild(node_id);
}

// The inverse of Split. REQUIRES: the node is no root and has one child.
void RadixTree::MergeWithOnlyChild(uint32_t node_id) {
  const uint32_t child_id = nodes_[node_id].first_child;
  Node& head = nodes_[node_id];
  Node& tail = nodes_[child_id];
  steps_ += head.block_count() + tail.block_count();
  UnlinkChild(child_id);
  ReplaceChild(node_id, child_id);
  AccountEdge(node_id, -1);
  AccountEdge(child_id, -1);
  Prepend(head.tokens, &tail.tokens);
  Prepend(head.ids, &tail.ids);
  tail.marks = std::move(head.marks);
  MergeHistories(&head, &tail);
  AccountEdge(node_id, 1);
  AccountEdge(child_id, 1);
  tail.depth = head.depth;
  tail.staged += head.staged;
  for (uint32_t id : head.ids) blocks_[id].node = child_id;
  for (int tier = 0; tier < kTierCount; ++tier) {
    if (tail.resident[tier] == 0) tail.resident_end[tier] = head.resident_end[tier];
    tail.resident[tier] += head.resident[tier];
  }
  FreeNode(node_id);
  NodeChanged(child_id);
  Refresh(child_id);
}

void RadixTree::LinkChild(uint32_t parent_id, uint32_t child_id, const uint32_t* first_block) {
  Node& parent = nodes_[parent_id];
  Node& child = nodes_[child_id];
  child.parent = parent_id;
  child.linked = ++links_;
  child.previous_sibling = kNone;
  child.next_sibling = parent.first_child;
  if (parent.first_child != kNone) nodes_[parent.first_child].previous_sibling = child_id;
  parent.first_child = child_id;
  ++parent.child_count;
  children_.Insert(Tag(parent_id, first_block), child_id);
  NodeChanged(child_id);
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
  after.linked = before.linked;
  after.previous_sibling = before.previous_sibling;
  after.next_sibling = before.next_sibling;
  if (after.next_sibling != kNone) nodes_[after.next_sibling].previous_sibling = new_child;
  if (after.previous_sibling == kNone) {
    nodes_[after.parent].first_child = new_child;
  } else {
    nodes_[after.previous_sibling].next_sibling = new_child;
  }
  NodeChanged(new_child);
}

// REQUIRES: the node is not linked any more.
void RadixTree::FreeNode(uint32_t node_id) {
  for (VictimQueues& queues : victims_) queues.Remove(node_id);
  AccountEdge(node_id, -1);
  nodes_.Free(node_id);
  NodeChanged(node_id);
}

// Takes the bytes of the node's edge out of the sum before it changes, and back in afterwards.
void RadixTree::AccountEdge(uint32_t node_id, int sign) {
  const size_t bytes = nodes_[node_id].edge_bytes();
  edge_bytes_ += sign > 0 ? bytes : 0 - bytes;
  if (sign > 0) NodeChanged(node_id);
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
    NodeChanged(node_id);
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
  steps_ += node->resident_end[tier] - end;
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
    victims_[tier].Remove(node_id);
    return;
  }
  const Block& last = blocks_[LastResident(&node, tier)];
  if (last.holds > 0) {
    victims_[tier].Remove(node_id);
    return;
  }
  const History& history = node.runs.At(last.depth);
  victims_[tier].Set(node_id, policy_->QueueAt(history, last.depth), VictimRank{policy_->RankOf(history), last.slot[tier]});
}

// The node whose last blocks leave the tier first, or kNone: where there is none, or too many condemned ones come before
// it. Leasing does not move entries, so what is held is found out here. After a slice of runs that the policy spared the
// next one is not asked any more.
uint32_t RadixTree::ChooseVictim(int tier) {
  VictimQueues& queues = victims_[tier];
  uint32_t passed = 0;
  uint32_t spared = 0;
  while (passed < limits_.slice_blocks) {
    const uint32_t node_id = policy_->Choose(queues, tier, last_tick_);
    if (node_id == kNone) break;
    if (IsCondemned(node_id)) {
      queues.Remove(node_id);
      ++passed;
      ++steps_;
      continue;
    }
    Node& node = nodes_[node_id];
    const Block& last = blocks_[LastResident(&node, tier)];
    if (last.holds > 0) {
      queues.Remove(node_id);
      continue;
    }
    const uint32_t begin = node.runs.BeginOf(last.depth, node.depth);
    History history = node.runs.At(last.depth);
    const uint32_t end = history.end;
    if (spared == limits_.slice_blocks || !policy_->Spares(&history, end - begin)) return node_id;
    ++spared;
    AccountEdge(node_id, -1);
    node.runs.Update(node.depth, begin, end, [&](const History&, uint32_t, uint32_t) { return history; });
    AccountEdge(node_id, 1);
    Refresh(node_id);
    ++steps_;
  }
  return kNone;
}

double RadixTree::NextVictimValue(uint32_t node_id, int tier) {
  Node& node = nodes_[node_id];
  const uint32_t depth = blocks_[LastResident(&node, tier)].depth;
  return policy_->ValueOf(node.runs.At(depth), depth, last_tick_);
}

// Takes blocks of the node from its last one up, as far as they have one history and nobody holds them. Where another
// node is as good, one block: then the slots decide.
void RadixTree::TakeRun(uint32_t node_id, int tier, size_t limit, Ids* victims) {
  Node& node = nodes_[node_id];
  const uint32_t last_depth = blocks_[LastResident(&node, tier)].depth;
  const History history = node.runs.At(last_depth);
  const uint32_t begin = node.runs.BeginOf(last_depth, node.depth);
  const bool was_occupied = node.occupied(tier);
  victims_[tier].Remove(node_id);
  const QueueEnd rival = victims_[tier].First(policy_->QueueAt(history, last_depth));
  if (rival.node != kNone && rival.rank == policy_->RankOf(history)) limit = 1;
  for (uint32_t depth = last_depth + 1; depth > begin && limit > 0; --depth) {
    const uint32_t id = node.ids[depth - 1 - node.depth];
    Block& block = blocks_[id];
    if (!block.resident(tier)) continue;
    if (block.holds > 0) break;
    block.leaving |= 1u << tier;
    --node.resident[tier];
    --limit;
    ++steps_;
    victims->push_back(id);
  }
  Propagate(node_id, tier, was_occupied);
  RefreshTier(node_id, tier);
}

}  // namespace kvstore
