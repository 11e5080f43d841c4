// Histories of blocks that left the tree, by a fingerprint of their prefix; bounded in number, the oldest go first.
//
// When there are more ghosts than there may be, only
// fingerprints with one more zero bit are kept from then on, so that the time they reach back does not shrink.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>

#include "policy.h"

namespace kvstore {

class Ghosts {
 public:
  static constexpr size_t kGhostsMax = 1u << 16;

  bool empty() const { return histories_.empty(); }
  size_t size() const { return histories_.size(); }
  size_t bytes() const { return histories_.size() * kEntryBytes + order_.size() * sizeof(order_[0]); }

  // `ghosts_max` would be kept if none were thinned out. Calls forget(history) for what does not fit any more.
  template <typename Forget>
  void Add(uint64_t fingerprint, const History& history, double ghosts_max, Forget forget) {
    if (IsThinned(fingerprint)) {
      forget(history);
      return;
    }
    const auto [entry, is_new] = histories_.try_emplace(fingerprint, Entry{history, ++sequence_});
    if (!is_new) {
      forget(entry->second.history);
      entry->second = Entry{history, sequence_};
    }
    order_.emplace_back(fingerprint, sequence_);
    const auto kept = static_cast<double>(mask_ + 1);
    while (static_cast<double>(histories_.size()) * kept > std::max(ghosts_max, kGhostsLeast)) DropOldest(forget);
    if (histories_.size() > kGhostsMax) Thin(forget);
    if (order_.size() > 2 * histories_.size() + 64) SkipStale();
  }

  // Takes the history of this prefix out.
  std::optional<History> Take(uint64_t fingerprint) {
    if (IsThinned(fingerprint)) return std::nullopt;
    const auto found = histories_.find(fingerprint);
    if (found == histories_.end()) return std::nullopt;
    const History history = found->second.history;
    histories_.erase(found);
    return history;
  }

 private:
  static constexpr double kGhostsLeast = 1024;
  static constexpr size_t kEntryBytes = 72;  // a node and a bucket of the map

  struct Entry {
    History history;
    uint64_t sequence;
  };

  bool IsThinned(uint64_t fingerprint) const { return ((fingerprint >> 32) & mask_) != 0; }

  bool IsStale(const std::pair<uint64_t, uint64_t>& item) const {
    const auto found = histories_.find(item.first);
    return found == histories_.end() || found->second.sequence != item.second;
  }

  template <typename Forget>
  void DropOldest(Forget forget) {
    while (IsStale(order_.front())) order_.pop_front();
    const auto found = histories_.find(order_.front().first);
    forget(found->second.history);
    histories_.erase(found);
    order_.pop_front();
  }

  template <typename Forget>
  void Thin(Forget forget) {
    mask_ = mask_ * 2 + 1;
    for (auto entry = histories_.begin(); entry != histories_.end();) {
      if (!IsThinned(entry->first)) {
        ++entry;
        continue;
      }
      forget(entry->second.history);
      entry = histories_.erase(entry);
    }
    SkipStale();
  }

  void SkipStale() {
    std::deque<std::pair<uint64_t, uint64_t>> live;
    for (const auto& item : order_) {
      if (!IsStale(item)) live.push_back(item);
    }
    order_.swap(live);
  }

  std::unordered_map<uint64_t, Entry> histories_;
  std::deque<std::pair<uint64_t, uint64_t>> order_;  // fingerprints as they came, some of them gone by now
  uint64_t sequence_ = 0;
  uint64_t mask_ = 0;
};

}  // namespace kvstore
