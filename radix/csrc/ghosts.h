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
#include <optional>
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
  size_t bytes() const { return entries_.capacity() * sizeof(Entry) + places_.capacity() * sizeof(places_[0]); }

  // `ghosts_max` would be kept if none were thinned out. Calls forget(history) for what does not fit any more.
  template <typename Forget>
  void Add(uint64_t fingerprint, const History& history, double ghosts_max, Forget forget) {
    if (IsThinned(fingerprint)) {
      forget(history);
      return;
    }
    if (const std::optional<History> before = Take(fingerprint)) forget(*before);
    Insert(fingerprint, history);
    const auto kept = static_cast<double>(mask_ + 1);
    while (static_cast<double>(size_) * kept > std::max(ghosts_max, kGhostsLeast)) Forgo(oldest_, forget);
    if (size_ > kGhostsMax) Thin(forget);
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
  static constexpr size_t kPlacesLeast = 64;

  struct Entry {
    uint64_t fingerprint = 0;
    History history;
    uint32_t older = kNone;
    uint32_t newer = kNone;  // of one that is free: the next free one
  };

  bool IsThinned(uint64_t fingerprint) const { return ((fingerprint >> 32) & mask_) != 0; }
  size_t HomeOf(uint64_t fingerprint) const { return Mix(fingerprint, kMixFactor) & (places_.size() - 1); }
  size_t After(size_t place) const { return (place + 1) & (places_.size() - 1); }
  uint32_t EntryAt(size_t place) const { return static_cast<uint32_t>(places_[place]) - 1; }

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
    if (free_ == kNone) {
      free_ = static_cast<uint32_t>(entries_.size());
      entries_.emplace_back();
    }
    const uint32_t at = free_;
    free_ = entries_[at].newer;
    entries_[at] = Entry{fingerprint, history, newest_, kNone};
    (newest_ == kNone ? oldest_ : entries_[newest_].newer) = at;
    newest_ = at;
    places_[PlaceOf(fingerprint)] = PlaceFor(fingerprint, at);
    ++size_;
  }

  void Remove(size_t place) {
    const uint32_t at = EntryAt(place);
    Entry& entry = entries_[at];
    (entry.older == kNone ? oldest_ : entries_[entry.older].newer) = entry.newer;
    (entry.newer == kNone ? newest_ : entries_[entry.newer].older) = entry.older;
    entry.newer = free_;
    free_ = at;
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
    places_.assign(std::max(kPlacesLeast, 2 * places_.size()), 0);
    for (uint32_t at = oldest_; at != kNone; at = entries_[at].newer) {
      const uint64_t fingerprint = entries_[at].fingerprint;
      places_[PlaceOf(fingerprint)] = PlaceFor(fingerprint, at);
    }
  }

  template <typename Forget>
  void Forgo(uint32_t at, Forget forget) {
    forget(entries_[at].history);
    Remove(PlaceOf(entries_[at].fingerprint));
  }

  template <typename Forget>
  void Thin(Forget forget) {
    mask_ = mask_ * 2 + 1;
    for (uint32_t at = oldest_; at != kNone;) {
      const uint32_t newer = entries_[at].newer;
      if (IsThinned(entries_[at].fingerprint)) Forgo(at, forget);
      at = newer;
    }
  }

  std::vector<uint64_t> places_;  // a power of two of them; 0 is empty
  std::vector<Entry> entries_;    // linked by age
  uint32_t oldest_ = kNone;
  uint32_t newest_ = kNone;
  uint32_t free_ = kNone;
  size_t size_ = 0;
  uint64_t mask_ = 0;
};

}  // namespace kvstore
