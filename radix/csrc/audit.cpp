#include "audit.h"

#include <algorithm>
#include <utility>

namespace kvstore {

// ---- what callers ask for ----

std::vector<std::string> RadixTree::CheckIntegrity() {
  const uint64_t steps = steps_;
  Audit audit(this);
  while (!audit.Step(UINT64_MAX)) continue;
  steps_ = steps;
  return audit.problems();
}

std::optional<std::vector<std::string>> RadixTree::CheckSlice() {
  if (!audit_) audit_ = std::make_unique<Audit>(this);
  if (!audit_->Step(steps_ + limits_.slice_blocks)) return std::nullopt;
  return std::exchange(audit_, nullptr)->problems();
}

void RadixTree::TellOfBlock(uint32_t id) { audit_->BlockChanged(id); }

void RadixTree::TellOfNode(uint32_t id) { audit_->NodeChanged(id); }

// ---- going on ----

bool RadixTree::Audit::Step(uint64_t steps_max) {
  while (phase_ != Phase::kDone && VisitSome(steps_max)) phase_ = static_cast<Phase>(static_cast<int>(phase_) + 1);
  return phase_ == Phase::kDone;
}

// Goes on with the present phase; true where it is over.
bool RadixTree::Audit::VisitSome(uint64_t steps_max) {
  switch (phase_) {
    case Phase::kBlocks:
      next_block_ = tree_.blocks_.VisitFrom(next_block_, [&](uint32_t id, const Block& block) {
        ++tree_.steps_;
        CheckBlock(id, block);
        return tree_.steps_ < steps_max;
      });
      return next_block_ == kNone;
    case Phase::kNodes: {
      uint32_t unfinished = kNone;
      next_node_ = tree_.nodes_.VisitFrom(next_node_, [&](uint32_t id, const Node&) {
        ++tree_.steps_;
        if (!CheckNode(id, steps_max)) unfinished = id;
        return unfinished == kNone && tree_.steps_ < steps_max;
      });
      if (unfinished != kNone) next_node_ = unfinished;
      return next_node_ == kNone;
    }
    case Phase::kFamilies:
      next_family_ = tree_.nodes_.VisitFrom(next_family_, [&](uint32_t id, const Node& node) {
        ++tree_.steps_;
        CheckFamily(id, node);
        return tree_.steps_ < steps_max;
      });
      return next_family_ == kNone;
    case Phase::kVictims:
      return CheckVictims(steps_max);
    case Phase::kTotals:
      CheckTotals();
      return true;
    case Phase::kDone:
      break;
  }
  return false;
}

std::vector<std::string> RadixTree::Audit::problems() const {
  std::vector<std::string> problems = problems_;
  if (problem_count_ > problems.size()) {
    problems.push_back("and " + std::to_string(problem_count_ - problems.size()) + " more");
  }
  return problems;
}

void RadixTree::Audit::Expect(bool holds, const char* what, uint32_t id) {
  if (holds) return;
  if (++problem_count_ <= kProblemsMax) problems_.push_back(std::string(what) + " (" + std::to_string(id) + ")");
}

const Node* RadixTree::Audit::LiveNode(uint32_t id) const {
  const Node* node = tree_.nodes_.Find(id);
  return node != nullptr && node->is_live ? node : nullptr;
}

bool RadixTree::Audit::HasShape(const Node& node) const {
  return !node.ids.empty() && node.tokens.size() == node.ids.size() * tree_.block_tokens_;
}

// Whether the node lies below a root that Match finds. Else it is condemned, or its links are broken.
bool RadixTree::Audit::IsReachable(uint32_t node_id) const {
  for (uint32_t steps = 0; steps < tree_.nodes_.used(); ++steps) {
    const Node* node = LiveNode(node_id);
    if (node == nullptr) return false;
    if (node->parent == kNone) return tree_.FindRoot(node->end_key) == node_id;
    node_id = node->parent;
  }
  return false;
}

// ---- sums ----

void RadixTree::Audit::RecountBlock(uint32_t id) {
  if (id >= block_shares_.size()) block_shares_.resize(static_cast<size_t>(id) + 1);
  const Block* block = tree_.FindUsed(id);
  const bool is_attached = block != nullptr && block->state == BlockState::kAttached;
  BlockShare& share = block_shares_[id];
  detached_ -= share.detached;
  share.detached = block != nullptr && !is_attached;
  detached_ += share.detached;
  for (int tier = 0; tier < kTierCount; ++tier) {
    tier_blocks_[tier] -= share.in_tier[tier];
    share.in_tier[tier] = is_attached && block->slot[tier] != kNoSlot;
    tier_blocks_[tier] += share.in_tier[tier];
  }
}

void RadixTree::Audit::RecountNode(uint32_t id) {
  if (id >= node_shares_.size()) node_shares_.resize(static_cast<size_t>(id) + 1);
  CountNode(node_shares_[id], -1);
  NodeShare share;
  if (const Node* node = LiveNode(id)) {
    share.edge_bytes = node->edge_bytes();
    share.blocks = node->block_count();
    share.live = true;
    share.root = node->parent == kNone;
    if (LiveNode(node->parent) != nullptr) share.parent = node->parent;
    for (int tier = 0; tier < kTierCount; ++tier) share.occupied[tier] = node->occupied(tier);
  }
  CountNode(share, 1);
  node_shares_[id] = share;
}

// Differences below 0 come out right in the end, as unsigned numbers do.
void RadixTree::Audit::CountNode(const NodeShare& share, int sign) {
  const auto change = static_cast<uint32_t>(sign);
  edge_bytes_ += sign > 0 ? share.edge_bytes : 0 - share.edge_bytes;
  attached_ += change * share.blocks;
  nodes_ += change * share.live;
  roots_ += change * share.root;
  if (share.parent == kNone) return;
  Family& family = FamilyOf(share.parent);
  family.children += change;
  for (int tier = 0; tier < kTierCount; ++tier) family.occupied[tier] += change * share.occupied[tier];
}

RadixTree::Audit::Family& RadixTree::Audit::FamilyOf(uint32_t node_id) {
  if (node_id >= families_.size()) families_.resize(static_cast<size_t>(node_id) + 1);
  return families_[node_id];
}

// ---- blocks ----

void RadixTree::Audit::CheckBlock(uint32_t id, const Block& block) {
  RecountBlock(id);
  if (block.state == BlockState::kFree) return;
  if (block.state == BlockState::kDetached) {
    Expect(block.in_use(), "a detached block is in nobody's use", id);
    Expect(tree_.detached_.count(id) == 1, "a detached block has no identity", id);
  }
  for (int tier = 0; tier < kTierCount; ++tier) {
    if (block.slot[tier] != kNoSlot) CheckSlot(id, tier, block.slot[tier]);
  }
}

// Two blocks in one slot would mean another prompt's bytes.
void RadixTree::Audit::CheckSlot(uint32_t id, int tier, uint32_t slot) {
  std::unique_ptr<SlotPage>& page = slots_[tier][slot / kPageSlots];
  if (!page) {
    page = std::make_unique<SlotPage>();
    page->fill(kNone);
  }
  uint32_t& seen = (*page)[slot % kPageSlots];
  const Block* other = tree_.FindUsed(seen);
  Expect(other == nullptr || other->slot[tier] != slot, "two blocks have one slot", slot);
  seen = id;
}

// ---- nodes ----

// False where keys are to be made first, for which the steps did not suffice.
bool RadixTree::Audit::CheckNode(uint32_t id, uint64_t steps_max) {
  const Node& node = tree_.nodes_[id];
  if (node.is_live && node.parent != kNone && HasShape(node) && !CheckKeys(id, node, steps_max)) return false;
  RecountNode(id);
  if (!node.is_live) return true;
  CheckChild(id, node);
  if (node.parent == kNone) {
    CheckRoot(id, node);
    return true;
  }
  tree_.steps_ += node.block_count();
  const Node* parent = LiveNode(node.parent);
  Expect(parent != nullptr, "a node has a parent that is none", id);
  Expect(HasShape(node), "a node has no blocks, or other tokens than blocks", id);
  if (parent == nullptr || !HasShape(node)) return true;
  CheckPlace(id, node, *parent);
  CheckLinks(id, node, *parent);
  CheckBlocks(id, node);
  Expect(HasRuns(node), "the histories of a node are of other blocks", id);
  if (tree_.remembers_) CheckFingerprints(id, node, *parent);
  for (int tier = 0; tier < kTierCount; ++tier) CheckVictim(id, node, tier);
  return true;
}

void RadixTree::Audit::CheckRoot(uint32_t id, const Node& node) {
  Expect(node.ids.empty() && node.tokens.empty(), "a root has blocks", id);
  Expect(node.has_end_key, "a root has no key", id);
  Expect(node.child_count > 0, "a root is empty", id);
  size_t places = tree_.condemned_.count(id) + (tree_.FindRoot(node.end_key) == id);
  for (const RootMap& roots : tree_.cleared_) {
    const auto found = roots.find(node.end_key);
    places += found != roots.end() && found->second == id;
  }
  Expect(places == 1, "a node without a parent is no root, or two of them", id);
}

void RadixTree::Audit::CheckPlace(uint32_t id, const Node& node, const Node& parent) {
  Expect(node.depth == parent.end(), "a node does not begin where its parent ends", id);
  Expect(node.block_count() <= tree_.limits_.edge_blocks, "a node has too many blocks", id);
  Expect(!FitsOnlyChild(node), "a node was not merged with its only child", id);
  uint32_t compared = 0;
  const bool is_found = tree_.FindChild(node.parent, node.tokens.data(), &compared) == id;
  Expect(is_found, "the table misses a node", id);
  if (!parent.ids.empty()) CheckOrder(parent.ids.back(), node.ids.front());
}

bool RadixTree::Audit::FitsOnlyChild(const Node& node) const {
  const Node* child = node.child_count == 1 ? LiveNode(node.first_child) : nullptr;
  return child != nullptr && node.block_count() + child->block_count() <= tree_.limits_.edge_blocks;
}

// Siblings lie in the order in which they were linked, so what goes round in a ring of its own is out of order somewhere.
void RadixTree::Audit::CheckLinks(uint32_t id, const Node& node, const Node& parent) {
  const Node* before = LiveNode(node.previous_sibling);
  const bool is_first = node.previous_sibling == kNone && parent.first_child == id;
  const bool follows = before != nullptr && before->next_sibling == id && before->parent == node.parent &&
                       before->linked > node.linked;
  Expect(is_first || follows, "a child is linked wrongly", id);
  const Node* next = LiveNode(node.next_sibling);
  const bool precedes = next != nullptr && next->previous_sibling == id && next->parent == node.parent;
  Expect(node.next_sibling == kNone || precedes, "the links of children lead elsewhere", id);
}

void RadixTree::Audit::CheckChild(uint32_t id, const Node& node) {
  const Node* child = LiveNode(node.first_child);
  const bool is_first = child != nullptr && child->parent == id && child->previous_sibling == kNone;
  Expect(node.child_count == 0 ? node.first_child == kNone : is_first, "the first child is none", id);
}

void RadixTree::Audit::CheckBlocks(uint32_t node_id, const Node& node) {
  uint32_t staged = 0;
  uint32_t resident[kTierCount] = {0, 0};
  for (uint32_t at = 0; at < node.block_count(); ++at) {
    const uint32_t id = node.ids[at];
    const Block* block = tree_.FindUsed(id);
    Expect(block != nullptr, "a node names a block that was freed", id);
    if (block == nullptr) continue;
    Expect(block->state == BlockState::kAttached && block->node == node_id, "a block is not of its node", id);
    Expect(block->depth == node.depth + at, "a block has the wrong depth", id);
    const bool is_idle = block->staged() && block->holds == 0;
    Expect(!is_idle || !IsReachable(node_id), "a staged block is held by nobody", id);
    if (at > 0) CheckOrder(node.ids[at - 1], id);
    staged += block->staged();
    for (int tier = 0; tier < kTierCount; ++tier) {
      resident[tier] += block->resident(tier);
      Expect(!block->leaves(tier) || block->slot[tier] != kNoSlot, "a block leaves a tier it is not in", id);
      Expect(!block->resident(tier) || block->depth < node.resident_end[tier], "a resident lies past the end", id);
    }
  }
  Expect(staged == node.staged, "staged blocks are miscounted", node_id);
  for (int tier = 0; tier < kTierCount; ++tier) {
    Expect(resident[tier] == node.resident[tier], "resident blocks are miscounted", node_id);
  }
}

void RadixTree::Audit::CheckOrder(uint32_t upper_id, uint32_t lower_id) {
  const Block* upper = tree_.FindUsed(upper_id);
  const Block* lower = tree_.FindUsed(lower_id);
  if (upper == nullptr || lower == nullptr) return;
  Expect(upper->holds >= lower->holds, "holds grow towards the leaf", lower_id);
}

bool RadixTree::Audit::HasRuns(const Node& node) {
  uint32_t begin = node.depth;
  for (const History& run : node.runs.all()) {
    if (run.end <= begin) return false;
    begin = run.end;
  }
  return begin == node.end();
}

void RadixTree::Audit::CheckFingerprints(uint32_t id, const Node& node, const Node& parent) {
  const bool is_known = parent.fingerprints.size() == tree_.Fingerprints(parent.depth, parent.end()) &&
                        (parent.ids.empty() || HasShape(parent));
  if (is_known) {
    const bool follows = node.start_fingerprint == tree_.FingerprintAt(parent, parent.block_count());
    Expect(follows || !IsReachable(id), "a node has another fingerprint than its parent", id);
  }
  const bool has_all = node.fingerprints.size() == tree_.Fingerprints(node.depth, node.end());
  Expect(has_all, "fingerprints are miscounted", id);
  if (!has_all) return;
  uint64_t fingerprint = node.start_fingerprint;
  size_t kept = 0;
  for (uint32_t at = 0; at < node.block_count(); ++at) {
    const uint32_t* tokens = node.tokens.data() + static_cast<size_t>(at) * tree_.block_tokens_;
    fingerprint = tree_.FingerprintThrough(fingerprint, tokens, 1);
    if ((node.depth + at + 1) % tree_.fingerprint_blocks_ != 0) continue;
    Expect(fingerprint == node.fingerprints[kept++], "a fingerprint is wrong", id);
  }
}

// ---- keys ----

// Compares what is kept of the node's keys with what follows from the one above. False where the steps did not suffice.
bool RadixTree::Audit::CheckKeys(uint32_t id, const Node& node, uint64_t steps_max) {
  if (!node.has_end_key && node.mark_count() == 0) return true;
  bool reached = false;
  if (!ReachKeyBefore(id, steps_max, &reached)) return false;
  if (!reached) return true;
  Expect(node.mark_count() <= node.block_count() / kMarkBlocks, "keys are kept of no blocks", id);
  Key128 key = tree_.nodes_[node.parent].end_key;
  uint32_t end = 0;
  for (uint32_t mark = 0; end + kMarkBlocks <= node.block_count() && mark < node.mark_count(); ++mark) {
    key = tree_.ChainThrough(node, end, end + kMarkBlocks, key);
    end += kMarkBlocks;
    Expect(KeyEqual{}(key, (*node.marks)[mark]), "a key kept within an edge is wrong", id);
  }
  if (!node.has_end_key) return true;
  key = tree_.ChainThrough(node, end, node.block_count(), key);
  Expect(KeyEqual{}(key, node.end_key), "a kept key is wrong", id);
  return true;
}

// Makes the keys above the node, topmost first, and keeps them. False where the steps did not suffice; not `reached`
// where the links upwards are broken.
bool RadixTree::Audit::ReachKeyBefore(uint32_t id, uint64_t steps_max, bool* reached) {
  Ids unknown;
  for (uint32_t at = tree_.nodes_[id].parent;; at = tree_.nodes_[at].parent) {
    const Node* node = LiveNode(at);
    if (node == nullptr) return true;
    if (node->has_end_key) break;
    if (!HasShape(*node) || unknown.size() > tree_.nodes_.used()) return true;
    unknown.push_back(at);
  }
  *reached = true;
  for (auto at = unknown.rbegin(); at != unknown.rend(); ++at) {
    if (tree_.steps_ >= steps_max) return false;
    Node& node = tree_.nodes_[*at];
    node.end_key = tree_.ChainThrough(node, 0, node.block_count(), tree_.nodes_[node.parent].end_key);
    node.has_end_key = true;
  }
  return true;
}

// ---- who leaves next ----

void RadixTree::Audit::CheckVictim(uint32_t node_id, const Node& node, int tier) {
  const VictimRank* rank = tree_.victims_[tier].Find(node_id);
  Expect((rank != nullptr) == tree_.victims_[tier].contains(node_id), "a victim is in no queue", node_id);
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
  Expect(rank != nullptr || !IsReachable(node_id), "a victim is not among the victims", node_id);
  if (rank == nullptr || !HasRuns(node)) return;
  const History& history = node.runs.At(last->depth);
  const VictimRank expected{tree_.policy_->RankOf(history), last->slot[tier]};
  Expect(rank->rank == expected.rank && rank->slot == expected.slot, "a victim is ranked wrongly", node_id);
  Expect(node.victim_queue[tier] == tree_.policy_->QueueAt(history, last->depth), "a victim is in the wrong queue", node_id);
}

bool RadixTree::Audit::CheckVictims(uint64_t steps_max) {
  for (; next_victim_.tier < kTierCount; next_victim_ = Place{next_victim_.tier + 1}) {
    const VictimQueues& queues = tree_.victims_[next_victim_.tier];
    for (; next_victim_.queue < queues.queue_count(); ++next_victim_.queue, next_victim_.end = 0) {
      for (; next_victim_.end < 2; ++next_victim_.end, next_victim_.at = 0) {
        for (; next_victim_.at < queues.EntryCount(next_victim_.queue, next_victim_.end); ++next_victim_.at) {
          if (tree_.steps_ >= steps_max) return false;
          ++tree_.steps_;
          const bool is_sound = queues.IsSoundAt(next_victim_.queue, next_victim_.end, next_victim_.at);
          Expect(is_sound, "victims are out of order, or name nodes that are gone", next_victim_.queue);
        }
      }
    }
  }
  return true;
}

// ---- what all of them come to ----

void RadixTree::Audit::CheckFamily(uint32_t id, const Node& node) {
  if (!node.is_live) return;
  const Family& family = FamilyOf(id);
  Expect(family.children == node.child_count, "children are miscounted", id);
  for (int tier = 0; tier < kTierCount; ++tier) {
    Expect(family.occupied[tier] == node.below[tier], "occupied children are miscounted", id);
  }
}

void RadixTree::Audit::CheckTotals() {
  const uint32_t root_count = tree_.root_count() + tree_.condemned_root_count();
  Expect(attached_ == tree_.block_count(), "blocks cannot be reached from a root", attached_);
  Expect(nodes_ == tree_.nodes_.used(), "nodes are miscounted", nodes_);
  Expect(roots_ == root_count, "roots are no nodes", roots_);
  Expect(tree_.children_.size() == tree_.node_count(), "the table has other entries than nodes", nodes_);
  Expect(edge_bytes_ == tree_.edge_bytes_, "the bytes of edges are miscounted", nodes_);
  Expect(detached_ == tree_.detached_.size(), "detached blocks are miscounted", detached_);
  for (const RootMap& roots : tree_.cleared_) Expect(!roots.empty(), "a cleared map of roots is empty", 0);
  for (int tier = 0; tier < kTierCount; ++tier) {
    Expect(tree_.victims_[tier].IsCounted(), "victims are miscounted", 0);
    Expect(tier_blocks_[tier] == tree_.tier_blocks_[tier], "blocks of a tier are miscounted", tier_blocks_[tier]);
  }
}

}  // namespace kvstore
