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

  // ---- saving ----

  uint64_t mask() const { return mask_; }

  // Calls visit(fingerprint, history) for up to `limit` ghosts, the oldest first, from the sequence number `first` on;
  // returns the one to go on with, or 0 where there are no more.
  template <typename Visit>
  uint64_t VisitFrom(uint64_t first, uint32_t limit, Visit visit) const {
    const auto is_before = [](const std::pair<uint64_t, uint64_t>& item, uint64_t value) { return item.second < value; };
    for (auto item = std::lower_bound(order_.begin(), order_.end(), first, is_before); item != order_.end(); ++item) {
      if (limit-- == 0) return item->second;
      if (!IsStale(*item)) visit(item->first, histories_.find(item->first)->second.history);
    }
    return 0;
  }

  // Forgets all, for ghosts that Restore brings, thinned out by `mask`.
  void StartAnew(uint64_t mask) {
    histories_.clear();
    order_.clear();
    mask_ = mask;
  }

  // False where there is one of this fingerprint already, or where it is thinned out.
  bool Restore(uint64_t fingerprint, const History& history) {
    if (IsThinned(fingerprint) || !histories_.try_emplace(fingerprint, Entry{history, sequence_ + 1}).second) return false;
    order_.emplace_back(fingerprint, ++sequence_);
    return true;
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
