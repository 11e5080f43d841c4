// Histories of blocks that left the tree, by a fingerprint of their prefix; bounded in number, the oldest go first.
//
// When there are more ghosts than there may be, only fingerprints with one more zero bit are kept from then on, so that
// the time they reach back does not shrink.
//
// Most blocks that are looked for are not here, so a table of eight bytes for each place, open addressing and at most
// three fifths full, says so with one access to memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "mix.h"
#include "policy.h"
#include "pool.h"

namespace kvstore {

class Ghosts {
 public:
  static constexpr size_t kGhostsMax = 1u << 16;

  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  size_t bytes() const {
    return entries_.capacity() * sizeof(Entry) + free_.capacity() * sizeof(uint32_t) +
           places_.capacity() * sizeof(places_[0]) + order_.size() * sizeof(order_[0]);
  }

  // Whether a ghost of this fingerprint would be kept, as things are.
  bool Keeps(uint64_t fingerprint) const { return !IsThinned(fingerprint); }

  // Has the memory fetched that Add and Take will look at first: for those who know many fingerprints ahead.
  void Prefetch(uint64_t fingerprint) const {
    if (!places_.empty() && !IsThinned(fingerprint)) __builtin_prefetch(&places_[HomeOf(fingerprint)]);
  }

  // `ghosts_max` would be kept if none were thinned out. Calls forget(history) for what does not fit any more.
  // REQUIRES: Keeps(fingerprint).
  template <typename Forget>
  void Add(uint64_t fingerprint, const History& history, double ghosts_max, Forget forget) {
    if (const std::optional<History> before = Take(fingerprint)) forget(*before);
    Insert(fingerprint, history);
    const auto kept = static_cast<double>(mask_ + 1);
    while (static_cast<double>(size_) * kept > std::max(ghosts_max, kGhostsLeast)) DropOldest(forget);
    if (size_ > kGhostsMax) Thin(forget);
    if (order_.size() > 2 * size_ + 64) SkipStale();
  }

  // Takes the history of this prefix out.
  std::optional<History> Take(uint64_t fingerprint) {
    if (empty() || IsThinned(fingerprint)) return std::nullopt;
    const size_t place = PlaceOf(fingerprint);
    if (places_[place] == 0) return std::nullopt;
    const History history = entries_[EntryAt(place)].history;
    Remove(place);
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
      if (!IsStale(*item)) visit(item->first, entries_[EntryAt(PlaceOf(item->first))].history);
    }
    return 0;
  }

  // Forgets all, for ghosts that Restore brings, thinned out by `mask`.
  void StartAnew(uint64_t mask) {
    *this = Ghosts();
    mask_ = mask;
  }

  // False where there is one of this fingerprint already, or where it is thinned out.
  bool Restore(uint64_t fingerprint, const History& history) {
    if (IsThinned(fingerprint) || (!empty() && places_[PlaceOf(fingerprint)] != 0)) return false;
    Insert(fingerprint, history);
    return true;
  }

 private:
  static constexpr double kGhostsLeast = 1024;
  static constexpr size_t kPlacesLeast = 64;

  struct Entry {
    uint64_t fingerprint = 0;
    History history;
    uint64_t sequence = 0;
  };

  bool IsThinned(uint64_t fingerprint) const { return ((fingerprint >> 32) & mask_) != 0; }
  size_t HomeOf(uint64_t fingerprint) const { return Mix(fingerprint, kMixFactor) & (places_.size() - 1); }
  size_t After(size_t place) const { return (place + 1) & (places_.size() - 1); }
  uint32_t EntryAt(size_t place) const { return static_cast<uint32_t>(places_[place]) - 1; }

  bool IsStale(const std::pair<uint64_t, uint64_t>& item) const {
    if (empty()) return true;
    const uint64_t place = places_[PlaceOf(item.first)];
    return place == 0 || entries_[static_cast<uint32_t>(place) - 1].sequence != item.second;
  }

  // What tells most others apart, and the entry. Never 0.
  static uint64_t PlaceFor(uint64_t fingerprint, uint32_t entry) {
    return (fingerprint ^ fingerprint >> 32) << 32 | (entry + 1);
  }

  // Where it is, or the empty place where it would be. REQUIRES: there are places.
  size_t PlaceOf(uint64_t fingerprint) const {
    const uint64_t tag = PlaceFor(fingerprint, 0) >> 32;
    size_t place = HomeOf(fingerprint);
    while (places_[place] != 0 &&
           (places_[place] >> 32 != tag || entries_[EntryAt(place)].fingerprint != fingerprint)) {
      place = After(place);
    }
    return place;
  }

  void Insert(uint64_t fingerprint, const History& history) {
    if (5 * (size_ + 1) > 3 * places_.size()) Rehash();
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(entries_.size()));
      entries_.emplace_back();
    }
    const uint32_t at = free_.back();
    free_.pop_back();
    entries_[at] = Entry{fingerprint, history, ++sequence_};
    places_[PlaceOf(fingerprint)] = PlaceFor(fingerprint, at);
    order_.emplace_back(fingerprint, sequence_);
    ++size_;
  }

  void Remove(size_t place) {
    free_.push_back(EntryAt(place));
    --size_;
    // What lies behind moves up as far as its home allows, so that no place is passed in vain.
    size_t hole = place;
    for (size_t next = After(hole); places_[next] != 0; next = After(next)) {
      const size_t home = HomeOf(entries_[EntryAt(next)].fingerprint);
      const size_t distance = (next - home) & (places_.size() - 1);
      if (distance < ((next - hole) & (places_.size() - 1))) continue;
      places_[hole] = places_[next];
      hole = next;
    }
    places_[hole] = 0;
  }

  void Rehash() {
    std::vector<uint64_t> before(std::max(kPlacesLeast, 2 * places_.size()), 0);
    before.swap(places_);
    for (uint64_t place : before) {
      if (place == 0) continue;
      places_[PlaceOf(entries_[static_cast<uint32_t>(place) - 1].fingerprint)] = place;
    }
  }

  template <typename Forget>
  void Forgo(uint64_t fingerprint, Forget forget) {
    const size_t place = PlaceOf(fingerprint);
    forget(entries_[EntryAt(place)].history);
    Remove(place);
  }

  template <typename Forget>
  void DropOldest(Forget forget) {
    while (IsStale(order_.front())) order_.pop_front();
    Forgo(order_.front().first, forget);
    order_.pop_front();
  }

  template <typename Forget>
  void Thin(Forget forget) {
    mask_ = mask_ * 2 + 1;
    for (const auto& item : order_) {
      if (IsThinned(item.first) && !IsStale(item)) Forgo(item.first, forget);
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

  std::vector<uint64_t> places_;  // a power of two of them; 0 is empty
  std::vector<Entry> entries_;
  std::vector<uint32_t> free_;  // entries without a place
  std::deque<std::pair<uint64_t, uint64_t>> order_;  // fingerprints and sequence numbers as they came, some gone by now
  uint64_t sequence_ = 0;
  size_t size_ = 0;
  uint64_t mask_ = 0;
};

}  // namespace kvstore
