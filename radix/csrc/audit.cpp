// Checks every invariant of the tree from scratch; for tests and for `check`.
#include <string>
#include <utility>
#include <vector>

#include "radix_tree.h"

namespace kvstore {

class RadixTree::Audit {
 public:
  explicit Audit(const RadixTree& tree) : tree_(tree) {}

  std::vector<std::string> Run() {
    for (const auto& [key, node_id] : tree_.roots_) CheckRoot(key, node_id);
    while (!stack_.empty()) {
      const auto [node_id, key_before] = stack_.back();
      stack_.pop_back();
      CheckNode(node_id, key_before);
    }
    CheckTotals();
    return problems_;
  }

 private:
  void Expect(bool holds, const char* what, uint32_t id) {
    if (!holds) problems_.push_back(std::string(what) + " (" + std::to_string(id) + ")");
  }

  void CheckRoot(const Key128& key, uint32_t node_id) {
    const Node& node = tree_.nodes_[node_id];
    Expect(node.parent == kNone && node.ids.empty(), "a root has a parent or blocks", node_id);
    Expect(node.has_end_key && KeyEqual{}(node.end_key, key), "a root has another key", node_id);
    Expect(node.child_count > 0, "a root is empty", node_id);
    CheckChildren(node_id, key);
    ++nodes_seen_;
  }

  void CheckNode(uint32_t node_id, const Key128& key_before) {
    const Node& node = tree_.nodes_[node_id];
    const Node& parent = tree_.nodes_[node.parent];
    ++nodes_seen_;
    Expect(!node.ids.empty(), "a node has no blocks", node_id);
    if (node.ids.empty()) return;
    Expect(node.tokens.size() == node.ids.size() * tree_.block_tokens_, "tokens and ids differ", node_id);
    Expect(node.depth == parent.end(), "a node does not begin where its parent ends", node_id);
    Expect(node.child_count != 1, "a node was not merged with its only child", node_id);
    Expect(tree_.FindChild(node.parent, node.tokens.data()) == node_id, "the table does not find a node", node_id);
    if (!parent.ids.empty()) CheckOrder(parent.ids.back(), node.ids.front());
    CheckBlocks(node_id);
    CheckChildren(node_id, CheckEndKey(node_id, key_before));
    for (int tier = 0; tier < kTierCount; ++tier) CheckVictim(node_id, tier);
    edge_bytes_ += (node.tokens.capacity() + node.ids.capacity()) * sizeof(uint32_t);
  }

  void CheckBlocks(uint32_t node_id) {
    const Node& node = tree_.nodes_[node_id];
    uint32_t staged = 0;
    uint32_t resident[kTierCount] = {0, 0};
    for (uint32_t at = 0; at < node.block_count(); ++at) {
      const uint32_t id = node.ids[at];
      const Block* block = tree_.FindUsed(id);
      Expect(block != nullptr, "a node names a block that was freed", id);
      if (block == nullptr) continue;
      Expect(block->state == BlockState::kAttached && block->node == node_id, "a block is not of its node", id);
      Expect(block->depth == node.depth + at, "a block has the wrong depth", id);
      Expect(!block->staged() || block->holds > 0, "a staged block is held by nobody", id);
      if (at > 0) CheckOrder(node.ids[at - 1], id);
      staged += block->staged();
      for (int tier = 0; tier < kTierCount; ++tier) {
        resident[tier] += block->resident(tier);
        tier_blocks_[tier] += block->slot[tier] != kNoSlot;
        Expect(!block->leaves(tier) || block->slot[tier] != kNoSlot, "a block leaves a tier it is not in", id);
        Expect(!block->resident(tier) || block->depth < node.resident_end[tier], "a resident lies past the end", id);
      }
    }
    attached_seen_ += node.block_count();
    Expect(staged == node.staged, "staged blocks are miscounted", node_id);
    for (int tier = 0; tier < kTierCount; ++tier) {
      Expect(resident[tier] == node.resident[tier], "resident blocks are miscounted", node_id);
    }
  }

  // Returns the key of the node's last block, made from scratch.
  Key128 CheckEndKey(uint32_t node_id, const Key128& key_before) {
    const Node& node = tree_.nodes_[node_id];
    const Key128 key = tree_.ChainThrough(node, 0, node.block_count(), key_before);
    Expect(!node.has_end_key || KeyEqual{}(key, node.end_key), "a kept key is wrong", node_id);
    return key;
  }

  void CheckOrder(uint32_t upper, uint32_t lower) {
    Expect(tree_.blocks_[upper].holds >= tree_.blocks_[lower].holds, "holds grow towards the leaf", lower);
    Expect(tree_.blocks_[upper].tick >= tree_.blocks_[lower].tick, "ticks grow towards the leaf", lower);
  }

  void CheckChildren(uint32_t node_id, const Key128& end_key) {
    const Node& node = tree_.nodes_[node_id];
    uint32_t count = 0;
    uint32_t below[kTierCount] = {0, 0};
    uint32_t previous = kNone;
    for (uint32_t child_id = node.first_child; child_id != kNone; child_id = tree_.nodes_[child_id].next_sibling) {
      const Node& child = tree_.nodes_[child_id];
      Expect(child.parent == node_id && child.previous_sibling == previous, "a child is linked wrongly", child_id);
      for (int tier = 0; tier < kTierCount; ++tier) below[tier] += child.occupied(tier);
      stack_.emplace_back(child_id, end_key);
      previous = child_id;
      ++count;
    }
    Expect(count == node.child_count, "children are miscounted", node_id);
    for (int tier = 0; tier < kTierCount; ++tier) {
      Expect(below[tier] == node.below[tier], "occupied children are miscounted", node_id);
    }
  }

  void CheckVictim(uint32_t node_id, int tier) {
    const Node& node = tree_.nodes_[node_id];
    const VictimRank* rank = tree_.heaps_[tier].Find(node_id);
    heap_seen_[tier] += rank != nullptr;
    if (node.resident[tier] == 0 || node.below[tier] > 0) {
      Expect(rank == nullptr, "a node without a victim is among the victims", node_id);
      return;
    }
    const Block* last = nullptr;
    for (uint32_t id : node.ids) {
      if (tree_.blocks_[id].resident(tier)) last = &tree_.blocks_[id];
    }
    if (last == nullptr || last->holds > 0) return;
    Expect(rank != nullptr, "a victim is not among the victims", node_id);
    if (rank == nullptr) return;
    Expect(!(VictimRank{last->tick, last->slot[tier]} < *rank), "a victim is ranked too hot", node_id);
  }

  void CheckTotals() {
    uint32_t detached = 0;
    tree_.blocks_.ForEach([&](uint32_t id, const Block& block) {
      if (block.state != BlockState::kDetached) return;
      Expect(block.in_use(), "a detached block is in nobody's use", id);
      Expect(tree_.detached_.count(id) == 1, "a detached block has no identity", id);
      ++detached;
    });
    Expect(detached == tree_.detached_.size(), "detached blocks are miscounted", detached);
    Expect(attached_seen_ == tree_.block_count(), "blocks cannot be reached from a root", attached_seen_);
    Expect(nodes_seen_ == tree_.nodes_.used(), "nodes cannot be reached from a root", nodes_seen_);
    Expect(tree_.children_.size() == tree_.node_count(), "the table has other entries than nodes", nodes_seen_);
    Expect(edge_bytes_ == tree_.edge_bytes_, "the bytes of edges are miscounted", nodes_seen_);
    for (int tier = 0; tier < kTierCount; ++tier) {
      Expect(heap_seen_[tier] == tree_.heaps_[tier].size(), "victims name nodes that are gone", heap_seen_[tier]);
      Expect(tier_blocks_[tier] == tree_.tier_blocks_[tier], "blocks of a tier are miscounted", tier_blocks_[tier]);
    }
  }

  const RadixTree& tree_;
  std::vector<std::string> problems_;
  std::vector<std::pair<uint32_t, Key128>> stack_;  // a node, and the key before it
  uint32_t nodes_seen_ = 0;
  uint32_t attached_seen_ = 0;
  uint32_t heap_seen_[kTierCount] = {0, 0};
  uint32_t tier_blocks_[kTierCount] = {0, 0};
  size_t edge_bytes_ = 0;
};

std::vector<std::string> RadixTree::CheckIntegrity() const { return Audit(*this).Run(); }

}  // namespace kvstore
