// One open-addressing table finds the children of all nodes: (tag, node), where the tag hashes the parent and the
// child's first block. The table never decides: the caller verifies each node whose tag is equal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pool.h"

namespace kvstore {

class ChildTable {
 public:
  // The first node under `tag` for which matches(node) holds, or kNone.
  template <typename Matches>
  uint32_t Find(uint32_t tag, Matches matches) const {
    if (entries_.empty()) return kNone;
    for (size_t at = Home(tag); entries_[at].node != kNone; at = Next(at)) {
      if (entries_[at].tag == tag && matches(entries_[at].node)) return entries_[at].node;
    }
    return kNone;
  }

  void Insert(uint32_t tag, uint32_t node) {
    if ((size_ + 1) * 4 > entries_.size() * 3) Resize(entries_.empty() ? kSizeMin : entries_.size() * 2);
    Put(Entry{tag, node});
    ++size_;
  }

  // REQUIRES: (tag, node) was inserted. Later entries move up, so that no tombstones pile up under churn.
  void Erase(uint32_t tag, uint32_t node) {
    size_t hole = Home(tag);
    while (entries_[hole].node != node) hole = Next(hole);
    for (size_t at = Next(hole); entries_[at].node != kNone; at = Next(at)) {
      const size_t distance = (at - Home(entries_[at].tag)) & (entries_.size() - 1);
      if (distance >= ((at - hole) & (entries_.size() - 1))) {
        entries_[hole] = entries_[at];
        hole = at;
      }
    }
    entries_[hole] = Entry{};
    --size_;
    if (entries_.size() > kSizeMin && size_ * 8 < entries_.size()) Resize(entries_.size() / 2);
  }

  size_t size() const { return size_; }
  size_t bytes() const { return entries_.capacity() * sizeof(Entry); }

 private:
  static constexpr size_t kSizeMin = 16;

  struct Entry {
    uint32_t tag = 0;
    uint32_t node = kNone;
  };

  size_t Home(uint32_t tag) const { return tag & (entries_.size() - 1); }
  size_t Next(size_t at) const { return (at + 1) & (entries_.size() - 1); }

  void Put(Entry entry) {
    size_t at = Home(entry.tag);
    while (entries_[at].node != kNone) at = Next(at);
    entries_[at] = entry;
  }

  void Resize(size_t size) {
    std::vector<Entry> old(size);
    std::swap(old, entries_);
    for (const Entry& entry : old) {
      if (entry.node != kNone) Put(entry);
    }
  }

  std::vector<Entry> entries_;  // the size is 0 or a power of two
  size_t size_ = 0;
};

}  // namespace kvstore
