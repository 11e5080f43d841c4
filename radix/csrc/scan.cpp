// Looking through all blocks, a slice at a time: in the order of their ids, which no other call changes.
#include <algorithm>
#include <stdexcept>
#include <unordered_map>

#include "radix_tree.h"

namespace kvstore {

Slice RadixTree::TakeRange(int64_t tier, int64_t first_slot, int64_t slot_count, int64_t first_id) {
  const int index = CheckTier(tier);
  if (first_slot < 0 || slot_count < 0) throw std::invalid_argument("a range of slots is negative");
  Slice slice;
  const uint64_t steps_max = steps_ + limits_.slice_blocks;
  slice.next = blocks_.VisitFrom(CheckFirstId(first_id), [&](uint32_t id, const Block& block) {
    const bool is_last = ++steps_ >= steps_max;
    if (block.state != BlockState::kAttached || block.holds > 0 || !block.resident(index)) return !is_last;
    const int64_t offset = static_cast<int64_t>(block.slot[index]) - first_slot;
    if (offset >= 0 && offset < slot_count && !IsCondemned(block.node)) slice.ids.push_back(id);
    return !is_last;
  });
  std::sort(slice.ids.begin(), slice.ids.end(), [&](uint32_t left, uint32_t right) {
    const Block& one = blocks_[left];
    const Block& other = blocks_[right];
    return one.depth != other.depth ? one.depth > other.depth : one.slot[index] < other.slot[index];
  });
  for (uint32_t id : slice.ids) Take(id, index);
  return slice;
}

Slice RadixTree::MissingIn(int64_t tier, int64_t source_tier, int64_t first_id) const {
  const int absent = CheckTier(tier);
  const int present = CheckTier(source_tier);
  Slice slice;
  std::unordered_map<uint32_t, uint32_t> done;  // leading blocks that were looked at, by node
  const uint64_t steps_max = steps_ + limits_.slice_blocks;
  slice.next = blocks_.VisitFrom(CheckFirstId(first_id), [&](uint32_t id, const Block& block) {
    ++steps_;
    const bool is_missing = block.slot[absent] == kNoSlot && block.slot[present] != kNoSlot;
    if (block.state == BlockState::kAttached && is_missing && !IsCondemned(block.node)) {
      AddMissingPath(id, absent, present, &done, &slice.ids);
    }
    return steps_ < steps_max;
  });
  return slice;
}

Slice RadixTree::Boundaries(int64_t every, int64_t first_id) const {
  if (every < 1) throw std::invalid_argument("a boundary is at every so many blocks, expected at least 1");
  Slice slice;
  const uint64_t steps_max = steps_ + limits_.slice_blocks;
  slice.next = blocks_.VisitFrom(CheckFirstId(first_id), [&](uint32_t id, const Block& block) {
    const bool is_last = ++steps_ >= steps_max;
    const bool is_committed = block.slot[0] != kNoSlot || block.slot[1] != kNoSlot;
    if (block.state == BlockState::kAttached && is_committed && (int64_t{block.depth} + 1) % every == 0 &&
        !IsCondemned(block.node)) {
      slice.ids.push_back(id);
    }
    return !is_last;
  });
  return slice;
}

// Adds what is missing on the way from the root to this block, itself included, but for what was looked at already.
void RadixTree::AddMissingPath(uint32_t id, int absent, int present, std::unordered_map<uint32_t, uint32_t>* done,
                               Ids* ids) const {
  Ids path;
  for (uint32_t at = blocks_[id].node; at != kNone; at = nodes_[at].parent) {
    ++steps_;
    const bool is_complete = nodes_[at].resident[absent] == nodes_[at].block_count();
    if (!is_complete) path.push_back(at);
    if (done->count(at) > 0) break;  // and so were all above it
  }
  for (auto at = path.rbegin(); at != path.rend(); ++at) {
    const Node& node = nodes_[*at];
    const uint32_t end = *at == blocks_[id].node ? blocks_[id].depth - node.depth + 1 : node.block_count();
    uint32_t& looked_at = (*done)[*at];
    for (; looked_at < end; ++looked_at) {
      ++steps_;
      const Block& block = blocks_[node.ids[looked_at]];
      if (block.slot[absent] == kNoSlot && block.slot[present] != kNoSlot) ids->push_back(node.ids[looked_at]);
    }
  }
}

}  // namespace kvstore
