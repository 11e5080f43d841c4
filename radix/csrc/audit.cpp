// Checks every invariant of the tree from scratch; for tests and for `kvstore verify`. It trusts nothing that it has
// not checked: a broken tree gives problems, not a crash or an endless walk.
#include <algorithm>
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
    CheckNodes();
    CheckCondemned();
    CheckNodes();
    CheckDetached();
    CheckSlots();
    CheckTotals();
    if (problem_count_ > problems_.size()) {
      problems_.push_back("and " + std::to_string(problem_count_ - problems_.size()) + " more");
    }
    return problems_;
  }

 private:
  static constexpr size_t kProblemsMax = 100;  // one cause often breaks many records

  struct Visit {
    uint32_t node;
    uint32_t parent;
    Key128 key_before;
    uint64_t fingerprint_before;
  };

  void Expect(bool holds, const char* what, uint32_t id) {
    if (holds) return;
    if (++problem_count_ <= kProblemsMax) problems_.push_back(std::string(what) + " (" + std::to_string(id) + ")");
  }

  void CheckNodes() {
    while (!stack_.empty()) {
      const Visit visit = stack_.back();
      stack_.pop_back();
      CheckNode(visit);
    }
  }

  void CheckRoot(const Key128& key, uint32_t node_id) {
    const Node* node = tree_.nodes_.Find(node_id);
    Expect(node != nullptr, "a root is no node", node_id);
    if (node == nullptr) return;
    Expect(node->parent == kNone && node->ids.empty(), "a root has a parent or blocks", node_id);
    Expect(node->has_end_key && KeyEqual{}(node->end_key, key), "a root has another key", node_id);
    Expect(node->child_count > 0, "a root is empty", node_id);
    ++nodes_seen_;
    edge_bytes_ += node->edge_bytes();
    CheckChildren(node_id, key, node->start_fingerprint);
  }

  // What waits to be reaped is as sound as the rest, but that nobody need hold its staged blocks, and that its nodes
  // need not be among the victims.
  void CheckCondemned() {
    is_condemned_ = true;
    for (const RootMap& roots : tree_.cleared_) {
      Expect(!roots.empty(), "a cleared map of roots is empty", 0);
      for (const auto& [key, node_id] : roots) CheckCondemnedRoot(key, node_id);
    }
    for (const auto& [node_id, root] : tree_.condemned_) {
      const Node* node = tree_.nodes_.Find(node_id);
      CheckCondemnedRoot(node == nullptr ? root : node->end_key, node_id);
    }
  }

  void CheckCondemnedRoot(const Key128& key, uint32_t node_id) {
    CheckRoot(key, node_id);
    for (const auto& [root, live_id] : tree_.roots_) Expect(live_id != node_id, "a live root is condemned", node_id);
  }

  void CheckNode(const Visit& visit) {
    const Node& node = tree_.nodes_[visit.node];
    const Node& parent = tree_.nodes_[visit.parent];
    const bool has_shape = !node.ids.empty() && node.tokens.size() == node.ids.size() * tree_.block_tokens_;
    Expect(has_shape, "a node has no blocks, or other tokens than blocks", visit.node);
    if (!has_shape) return;
    Expect(node.parent == visit.parent, "a child has another parent", visit.node);
    Expect(node.depth == parent.end(), "a node does not begin where its parent ends", visit.node);
    Expect(node.block_count() <= tree_.limits_.edge_blocks, "a node has too many blocks", visit.node);
    Expect(!FitsOnlyChild(node), "a node was not merged with its only child", visit.node);
    uint32_t steps = 0;
    const bool is_found = tree_.FindChild(visit.parent, node.tokens.data(), &steps) == visit.node;
    Expect(is_found, "the table misses a node", visit.node);
    if (!parent.ids.empty()) CheckOrder(parent.ids.back(), node.ids.front());
    CheckBlocks(visit.node);
    Expect(HasRuns(node), "the histories of a node are of other blocks", visit.node);
    const uint64_t fingerprint = tree_.remembers_ ? CheckFingerprints(visit) : 0;
    CheckChildren(visit.node, CheckEndKey(visit.node, visit.key_before), fingerprint);
    for (int tier = 0; tier < kTierCount; ++tier) CheckVictim(visit.node, tier);
    edge_bytes_ += node.edge_bytes();
  }

  bool FitsOnlyChild(const Node& node) const {
    const Node* child = node.child_count == 1 ? tree_.nodes_.Find(node.first_child) : nullptr;
    return child != nullptr && node.block_count() + child->block_count() <= tree_.limits_.edge_blocks;
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
      Expect(!block->staged() || block->holds > 0 || is_condemned_, "a staged block is held by nobody", id);
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

  static bool HasRuns(const Node& node) {
    uint32_t begin = node.depth;
    for (const History& run : node.runs.all()) {
      if (run.end <= begin) return false;
      begin = run.end;
    }
    return begin == node.end();
  }

  // Returns the fingerprint at the node's end, made from scratch.
  uint64_t CheckFingerprints(const Visit& visit) {
    const Node& node = tree_.nodes_[visit.node];
    const bool follows = is_condemned_ || node.start_fingerprint == visit.fingerprint_before;
    Expect(follows, "a node has another fingerprint than its parent", visit.node);
    const bool has_all = node.fingerprints.size() == tree_.Fingerprints(node.depth, node.end());
    Expect(has_all, "fingerprints are miscounted", visit.node);
    uint64_t fingerprint = node.start_fingerprint;
    size_t kept = 0;
    for (uint32_t at = 0; at < node.block_count(); ++at) {
      const uint32_t* tokens = node.tokens.data() + static_cast<size_t>(at) * tree_.block_tokens_;
      fingerprint = tree_.FingerprintThrough(fingerprint, tokens, 1);
      if (!has_all || (node.depth + at + 1) % tree_.fingerprint_blocks_ != 0) continue;
      Expect(fingerprint == node.fingerprints[kept++], "a fingerprint is wrong", visit.node);
    }
    return fingerprint;
  }

  // Returns the key of the node's last block, made from scratch.
  Key128 CheckEndKey(uint32_t node_id, const Key128& key_before) {
    const Node& node = tree_.nodes_[node_id];
    Expect(node.mark_count() <= node.block_count() / kMarkBlocks, "keys are kept of no blocks", node_id);
    Key128 key = key_before;
    uint32_t end = 0;
    for (uint32_t mark = 0; end + kMarkBlocks <= node.block_count() && mark < node.mark_count(); ++mark) {
      key = tree_.ChainThrough(node, end, end + kMarkBlocks, key);
      end += kMarkBlocks;
      Expect(KeyEqual{}(key, (*node.marks)[mark]), "a key kept within an edge is wrong", node_id);
    }
    key = tree_.ChainThrough(node, end, node.block_count(), key);
    Expect(!node.has_end_key || KeyEqual{}(key, node.end_key), "a kept key is wrong", node_id);
    return key;
  }

  void CheckOrder(uint32_t upper_id, uint32_t lower_id) {
    const Block* upper = tree_.FindUsed(upper_id);
    const Block* lower = tree_.FindUsed(lower_id);
    if (upper == nullptr || lower == nullptr) return;
    Expect(upper->holds >= lower->holds, "holds grow towards the leaf", lower_id);
  }

  void CheckChildren(uint32_t node_id, const Key128& end_key, uint64_t fingerprint) {
    const Node& node = tree_.nodes_[node_id];
    uint32_t count = 0;
    uint32_t below[kTierCount] = {0, 0};
    uint32_t previous = kNone;
    for (uint32_t child_id = node.first_child; child_id != kNone; ++count) {
      const Node* child = tree_.nodes_.Find(child_id);
      // No node is a child twice, so whatever the links say, there are no more visits than nodes.
      const bool is_new = child != nullptr && ++nodes_seen_ <= tree_.nodes_.used();
      Expect(is_new, "the links of children lead nowhere or in circles", child_id);
      if (!is_new) break;
      Expect(child->previous_sibling == previous, "a child is linked wrongly", child_id);
      for (int tier = 0; tier < kTierCount; ++tier) below[tier] += child->occupied(tier);
      stack_.push_back(Visit{child_id, node_id, end_key, fingerprint});
      previous = child_id;
      child_id = child->next_sibling;
    }
    Expect(count == node.child_count, "children are miscounted", node_id);
    for (int tier = 0; tier < kTierCount; ++tier) {
      Expect(below[tier] == node.below[tier], "occupied children are miscounted", node_id);
    }
  }

  void CheckVictim(uint32_t node_id, int tier) {
    const Node& node = tree_.nodes_[node_id];
    const VictimRank* rank = tree_.victims_[tier].Find(node_id);
    victims_seen_[tier] += rank != nullptr;
    if (node.resident[tier] == 0 || node.below[tier] > 0) {
      Expect(rank == nullptr, "a node without a victim is among the victims", node_id);
      return;
    }
    const Block* last = nullptr;
    for (uint32_t id : node.ids) {
      const Block* block = tree_.FindUsed(id);
      if (block != nullptr && block->resident(tier)) last = block;
    }
    if (last == nullptr || last->holds > 0) return;
    Expect(rank != nullptr || is_condemned_, "a victim is not among the victims", node_id);
    if (rank == nullptr) return;
    if (!HasRuns(node)) return;
    const History& history = node.runs.At(last->depth);
    const VictimRank expected{tree_.policy_->RankOf(history), last->slot[tier]};
    Expect(rank->rank == expected.rank && rank->slot == expected.slot, "a victim is ranked wrongly", node_id);
    Expect(node.victim_queue[tier] == history.queue, "a victim is in the wrong queue", node_id);
  }

  void CheckDetached() {
    uint32_t detached = 0;
    tree_.blocks_.ForEach([&](uint32_t id, const Block& block) {
      if (block.state != BlockState::kDetached) return;
      Expect(block.in_use(), "a detached block is in nobody's use", id);
      Expect(tree_.detached_.count(id) == 1, "a detached block has no identity", id);
      ++detached;
    });
    Expect(detached == tree_.detached_.size(), "detached blocks are miscounted", detached);
  }

  // Two blocks in one slot would mean another prompt's bytes.
  void CheckSlots() {
    for (int tier = 0; tier < kTierCount; ++tier) {
      Ids slots;
      slots.reserve(tree_.tier_blocks_[tier]);
      tree_.blocks_.ForEach([&](uint32_t, const Block& block) {
        if (block.state != BlockState::kFree && block.slot[tier] != kNoSlot) slots.push_back(block.slot[tier]);
      });
      if (!std::is_sorted(slots.begin(), slots.end())) std::sort(slots.begin(), slots.end());
      for (size_t at = 1; at < slots.size(); ++at) {
        Expect(slots[at - 1] != slots[at], "two blocks have one slot", slots[at]);
      }
    }
  }

  void CheckTotals() {
    Expect(attached_seen_ == tree_.block_count(), "blocks cannot be reached from a root", attached_seen_);
    Expect(nodes_seen_ == tree_.nodes_.used(), "nodes cannot be reached from a root", nodes_seen_);
    Expect(tree_.children_.size() == tree_.node_count(), "the table has other entries than nodes", nodes_seen_);
    Expect(edge_bytes_ == tree_.edge_bytes_, "the bytes of edges are miscounted", nodes_seen_);
    for (int tier = 0; tier < kTierCount; ++tier) {
      const VictimQueues& queues = tree_.victims_[tier];
      Expect(victims_seen_[tier] == queues.size(), "victims name nodes that are gone", victims_seen_[tier]);
      Expect(queues.IsSound(), "victims are out of order", victims_seen_[tier]);
      Expect(tier_blocks_[tier] == tree_.tier_blocks_[tier], "blocks of a tier are miscounted", tier_blocks_[tier]);
    }
  }

  const RadixTree& tree_;
  std::vector<std::string> problems_;
  size_t problem_count_ = 0;
  std::vector<Visit> stack_;
  bool is_condemned_ = false;
  uint32_t nodes_seen_ = 0;
  uint32_t attached_seen_ = 0;
  uint32_t victims_seen_[kTierCount] = {0, 0};
  uint32_t tier_blocks_[kTierCount] = {0, 0};
  size_t edge_bytes_ = 0;
};

std::vector<std::string> RadixTree::CheckIntegrity() const {
  const uint64_t steps = steps_;
  std::vector<std::string> problems = Audit(*this).Run();
  steps_ = steps;
  return problems;
}

}  // namespace kvstore
