// Miniatures of a cache: what would be found at other capacities, and whether the survival index or recency serves better?
//
// Of the prefixes that requests touch, those at the kept fingerprints are units; where there are many, a part of them that
// their fingerprints select (as SHARDS does, Waldspurger et al., FAST 2015). A unit's parent is the nearest unit above it, and
// its history that of the whole request, so the units make up prefix-closed caches of their own. Several of them are run
// at once, with the real policy and with recency alone, at fractions and multiples of the capacity that the tree has.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "policy.h"
#include "survival.h"

namespace kvstore {

enum class VictimOrder : uint8_t { kSurvival, kRecency };

// One cache of units, and the hits it had.
class Miniature {
 public:
  Miniature(const SurvivalPolicy* policy, VictimOrder order) : policy_(policy), order_(order) {}

  VictimOrder order() const { return order_; }
  size_t capacity() const { return capacity_; }
  size_t size() const { return size_; }
  size_t bytes() const { return candidates_ * kCandidateBytes; }

  void set_capacity(size_t capacity) { capacity_ = capacity; }
  void Grow() { ++size_; }
  void Shrink() { --size_; }

  void AddCandidate(uint32_t unit, uint32_t depth, const History& history);
  void RemoveCandidate(uint32_t unit, uint32_t depth, const History& history);
  // The unit that goes first. REQUIRES: there is a candidate.
  uint32_t Choose(uint64_t now) const;

 private:
  static constexpr size_t kCandidateBytes = 64;  // a node of the set
  // The oldest first, of one request the deepest.
  using Candidate = std::tuple<uint64_t, uint32_t, uint32_t>;

  uint16_t QueueOf(const History& history) const { return order_ == VictimOrder::kSurvival ? history.queue : 0; }

  const SurvivalPolicy* policy_;
  VictimOrder order_;
  size_t capacity_ = 0;
  size_t size_ = 0;
  size_t candidates_ = 0;
  std::map<uint16_t, std::set<Candidate>> queues_;
};

// The two miniatures of one capacity against each other, request by request: which order found more lately, and what a
// cache that goes by it finds.
class Contest {
 public:
  // What the request of now found; may be called several times for it.
  void Count(double by_survival, double by_recency);
  // The request is over.
  void Decide();

  bool prefers_recency() const { return prefers_recency_; }
  double found() const { return found_; }

  void Save(std::string* bytes) const;
  void Load(SavedBytes* bytes);  // throws std::invalid_argument for what no contest saved

 private:
  double request_lead_ = 0;   // of recency over the survival index, with the request of now
  double lead_ = 0;           // the sum of these, lately
  double lead_variance_ = 0;  // of that sum
  bool prefers_recency_ = false;
  double found_ = 0;
};

// What a cache of `blocks` would have found.
struct RehearsedCapacity {
  uint64_t blocks;
  double found;
};

// Counted in blocks since the tree was full.
struct Rehearsed {
  double looked_up;
  double found;  // in the tree
  std::vector<RehearsedCapacity> capacities;
};

class Rehearsal {
 public:
  Rehearsal(const SurvivalPolicy* policy, uint32_t unit_blocks);
  Rehearsal(const Rehearsal&) = delete;
  Rehearsal& operator=(const Rehearsal&) = delete;

  // Tells how many blocks the cache holds, now that it is full. Nothing is rehearsed before.
  void SetCapacity(uint64_t blocks);

  // A request looked a prompt up, and found so many blocks in the cache. The fingerprints are those of what the tree has of
  // it, from the root on.
  void Look(const Prefixes& prefix, const Access& access, uint32_t found_blocks);
  // It stores the whole prompt, of which it had found the first `found` fingerprints.
  void Store(const Prefixes& prefix, size_t found, const Access& access);

  // Whether recency alone found more lately, at the capacity of the tree.
  bool prefers_recency() const { return contests_[kOwnScale].prefers_recency(); }
  Rehearsed result() const;
  size_t bytes() const;

  // Saving, in pieces: first what is counted, then some units in each; none before the cache is full. A piece is a row of
  // records that begin with `mark`, or for units with the one after it. To take it up in another process: LoadCounts,
  // then LoadUnit for all others in any order, of which those that are there twice count once; then Resume. Both throw
  // std::invalid_argument for what no rehearsal saved.
  uint32_t piece_count() const;
  void Save(uint32_t piece, uint16_t mark, std::string* bytes) const;
  void LoadCounts(SavedBytes* bytes);
  void LoadUnit(SavedBytes* bytes, int64_t shift);
  void Resume();

 private:
  static constexpr size_t kScales = 5;
  static constexpr std::array<double, kScales> kScale = {0.25, 0.5, 1, 2, 4};
  static constexpr size_t kOwnScale = 2;
  static constexpr size_t kMiniatures = 2 * kScales;
  static constexpr size_t kUnitsAtScaleOne = 2048;  // to twice as many

  struct Unit {
    uint64_t fingerprint = 0;
    History history;
    uint32_t parent = kNone;
    uint32_t depth = 0;
    uint32_t children = 0;                      // known units whose parent it is
    std::array<uint32_t, kMiniatures> below{};  // of them in each miniature
    uint16_t cached_in = 0;                     // a bit for each miniature
    bool is_known = false;                      // false: the place is free
    bool was_touched = false;                   // since the hand passed
  };

  static bool IsIn(const Unit& unit, size_t miniature) { return (unit.cached_in >> miniature) & 1; }
  std::vector<uint32_t> FindPath(const Prefixes& prefix, size_t* found) const;
  bool IsSampled(uint64_t fingerprint) const { return ((fingerprint >> 32) & mask_) == 0; }
  void Keep(const Prefixes& prefix, std::vector<uint32_t> path, const Access& access);
  size_t LeadingIn(const std::vector<uint32_t>& path, size_t miniature) const;
  void SetHistory(uint32_t at, const History& history);
  uint32_t NewUnit(uint64_t fingerprint, uint32_t parent, const History& history);
  void Insert(const std::vector<uint32_t>& path, size_t miniature, uint64_t now);
  void Evict(size_t miniature, uint64_t now);
  void CountHits(const std::vector<uint32_t>& path, size_t counted);
  void ForgetIdleUnits(size_t looks);
  void Forget(uint32_t at);
  void Restart(uint64_t mask);
  void SizeMiniatures();

  // In rehearsal_saved.cpp.
  void SaveUnit(const Unit& unit, std::string* bytes) const;
  void ReachOrForget(uint32_t at);

  const SurvivalPolicy* policy_;
  const uint32_t unit_blocks_;
  uint64_t capacity_blocks_ = 0;
  uint64_t mask_ = 0;
  double looked_up_ = 0;
  double found_ = 0;
  std::vector<Miniature> miniatures_;  // two for each scale, in the order of VictimOrder
  std::array<Contest, kScales> contests_{};
  std::unordered_map<uint64_t, uint32_t> at_;
  std::vector<Unit> units_;
  std::vector<uint32_t> free_;
  size_t hand_ = 0;  // the unit that is looked at next, for what to forget
  std::vector<uint64_t> loaded_parents_;  // fingerprints, by unit, between LoadUnit and Resume
};

}  // namespace kvstore
