// Checks every invariant of the tree from scratch, a slice at a time; for tests and for `kvstore verify`. It trusts
// nothing that it has not checked: a broken tree gives problems, not a crash or an endless walk.
//
// The tree may change between the slices. What concerns one record and its neighbours is looked at in one go, so it holds
// at every moment. What is a sum over all records is counted again as they are passed, and the tree tells of each record
// that changes (BlockChanged, NodeChanged): those that were passed already are counted anew. A slot that two blocks seem
// to have is looked up at both, since the first may have lost it meanwhile.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "radix_tree.h"

namespace kvstore {

class RadixTree::Audit {
 public:
  explicit Audit(RadixTree* tree) : tree_(*tree) {}

  // Goes on until the tree has counted `steps_max` steps in all. True when everything was checked.
  bool Step(uint64_t steps_max);
  std::vector<std::string> problems() const;

  void BlockChanged(uint32_t id) {
    if (id < next_block_) RecountBlock(id);
  }
  void NodeChanged(uint32_t id) {
    if (id < next_node_) RecountNode(id);
  }

 private:
  static constexpr size_t kProblemsMax = 100;  // one cause often breaks many records
  static constexpr uint32_t kPageSlots = 256;
  using SlotPage = std::array<uint32_t, kPageSlots>;  // of each slot, the block that was last seen to have it

  enum class Phase : uint8_t { kBlocks, kNodes, kFamilies, kVictims, kTotals, kDone };

  // What a record that was passed adds to the sums.
  struct BlockShare {
    bool in_tier[kTierCount];
    bool detached;
  };
  struct NodeShare {
    size_t edge_bytes = 0;
    uint32_t blocks = 0;
    uint32_t parent = kNone;
    bool occupied[kTierCount] = {false, false};
    bool live = false;
    bool root = false;
  };
  // What the nodes that were passed say of their parent.
  struct Family {
    uint32_t children = 0;
    uint32_t occupied[kTierCount] = {0, 0};
  };
  struct Place {
    int tier = 0;
    uint16_t queue = 0;
    int end = 0;
    size_t at = 0;
  };

  void Expect(bool holds, const char* what, uint32_t id);
  const Node* LiveNode(uint32_t id) const;
  bool HasShape(const Node& node) const;
  bool IsReachable(uint32_t node_id) const;
  bool VisitSome(uint64_t steps_max);

  void RecountBlock(uint32_t id);
  void RecountNode(uint32_t id);
  void CountNode(const NodeShare& share, int sign);
  Family& FamilyOf(uint32_t node_id);

  void CheckBlock(uint32_t id, const Block& block);
  void CheckSlot(uint32_t id, int tier, uint32_t slot);
  bool CheckNode(uint32_t id, uint64_t steps_max);
  void CheckRoot(uint32_t id, const Node& node);
  void CheckPlace(uint32_t id, const Node& node, const Node& parent);
  void CheckLinks(uint32_t id, const Node& node, const Node& parent);
  void CheckChild(uint32_t id, const Node& node);
  bool FitsOnlyChild(const Node& node) const;
  void CheckBlocks(uint32_t node_id, const Node& node);
  void CheckOrder(uint32_t upper_id, uint32_t lower_id);
  static bool HasRuns(const Node& node);
  void CheckFingerprints(uint32_t id, const Node& node, const Node& parent);
  bool CheckKeys(uint32_t id, const Node& node, uint64_t steps_max);
  bool ReachKeyBefore(uint32_t id, uint64_t steps_max, bool* reached);
  void CheckVictim(uint32_t node_id, const Node& node, int tier);
  void CheckFamily(uint32_t id, const Node& node);
  bool CheckVictims(uint64_t steps_max);
  void CheckTotals();

  RadixTree& tree_;
  Phase phase_ = Phase::kBlocks;
  uint32_t next_block_ = 0;  // all before were passed
  uint32_t next_node_ = 0;
  uint32_t next_family_ = 0;
  Place next_victim_;
  std::vector<std::string> problems_;
  size_t problem_count_ = 0;
  std::unordered_map<uint32_t, std::unique_ptr<SlotPage>> slots_[kTierCount];

  std::vector<BlockShare> block_shares_;
  uint32_t tier_blocks_[kTierCount] = {0, 0};
  uint32_t detached_ = 0;
  std::vector<NodeShare> node_shares_;
  std::vector<Family> families_;
  uint32_t attached_ = 0;
  uint32_t nodes_ = 0;
  uint32_t roots_ = 0;
  size_t edge_bytes_ = 0;
};

}  // namespace kvstore
