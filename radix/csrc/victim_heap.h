// The nodes of one tree whose last block in a tier may leave it next, coldest first. A binary min-heap in which a node
// occurs at most once; each node remembers its place, so that its entry can be moved or removed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "node.h"

namespace kvstore {

// Coldest first; among equal ticks the lower slot.
struct VictimRank {
  uint64_t tick;
  uint32_t slot;

  bool operator<(const VictimRank& other) const {
    return std::tie(tick, slot) < std::tie(other.tick, other.slot);
  }
};

class VictimHeap {
 public:
  VictimHeap(NodePool* nodes, int tier) : nodes_(nodes), tier_(tier) {}

  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }
  size_t bytes() const { return entries_.capacity() * sizeof(Entry); }
  uint32_t top_node() const { return entries_.front().node; }
  VictimRank top_rank() const { return entries_.front().rank; }

  // The rank under which `node` is kept, or null.
  const VictimRank* Find(uint32_t node) const {
    const uint32_t at = (*nodes_)[node].heap_index[tier_];
    return at < entries_.size() && entries_[at].node == node ? &entries_[at].rank : nullptr;
  }

  // Whether no entry is colder than the one above it. O(size).
  bool IsOrdered() const {
    for (size_t at = 1; at < entries_.size(); ++at) {
      if (entries_[at].rank < entries_[(at - 1) / 2].rank) return false;
    }
    return true;
  }

  // Inserts `node`, or moves it to `rank`.
  void Set(uint32_t node, VictimRank rank) {
    uint32_t at = Place(node);
    if (at == kNone) {
      at = static_cast<uint32_t>(entries_.size());
      entries_.push_back(Entry{rank, node});
    }
    entries_[at].rank = rank;
    Settle(at);
  }

  // Does nothing where `node` is not in the heap.
  void Remove(uint32_t node) {
    const uint32_t at = Place(node);
    if (at == kNone) return;
    Place(node) = kNone;
    const Entry last = entries_.back();
    entries_.pop_back();
    if (at < entries_.size()) {
      entries_[at] = last;
      Settle(at);
    }
    if (entries_.capacity() > 4 * entries_.size() + 64) entries_.shrink_to_fit();
  }

 private:
  friend class Surgeon;

  struct Entry {
    VictimRank rank;
    uint32_t node;
  };

  uint32_t& Place(uint32_t node) { return (*nodes_)[node].heap_index[tier_]; }

  // Moves the entry at `at` up or down to where it belongs.
  void Settle(uint32_t at) {
    const Entry entry = entries_[at];
    while (at > 0 && entry.rank < entries_[(at - 1) / 2].rank) {
      Put(at, entries_[(at - 1) / 2]);
      at = (at - 1) / 2;
    }
    for (uint32_t child = ColderChild(at); child != kNone && entries_[child].rank < entry.rank; child = ColderChild(at)) {
      Put(at, entries_[child]);
      at = child;
    }
    Put(at, entry);
  }

  uint32_t ColderChild(uint32_t at) const {
    const size_t left = 2 * static_cast<size_t>(at) + 1;
    if (left >= entries_.size()) return kNone;
    const bool right = left + 1 < entries_.size() && entries_[left + 1].rank < entries_[left].rank;
    return static_cast<uint32_t>(left + (right ? 1 : 0));
  }

  void Put(uint32_t at, Entry entry) {
    entries_[at] = entry;
    Place(entry.node) = at;
  }

  NodePool* nodes_;
  int tier_;
  std::vector<Entry> entries_;
};

}  // namespace kvstore
