// Which run of blocks leaves a tier next: the interface of eviction policies, and what a tree remembers for them.
//
// A run is a stretch of an edge with one history: the same requests touched all of its blocks. A policy gives each run
// a queue and, within it, a rank; the tree keeps, for each tier, the runs whose last block may leave in these queues,
// and asks the policy to choose among their ends. So evicting costs O(log runs) for each run, whatever its length.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pool.h"
#include "saved.h"

namespace kvstore {

constexpr unsigned kTickBits = 48;  // of microseconds: 8.9 years
constexpr uint64_t kTickMax = (uint64_t{1} << kTickBits) - 1;

// What a policy remembers of a run.
struct History {
  uint64_t tick = 0;      // of the last access, in microseconds; a policy may give it another meaning
  float gap = -1;         // smoothed seconds between accesses, below 0 while there was one access only
  float weight = 0;       // what each block counts for in the policy's statistics
  uint16_t accesses = 0;  // saturates
  uint16_t queue = 0;
  uint32_t end = 0;       // the tree's: the depth behind the last block of the run. Not compared.

  bool operator==(const History& other) const {
    return tick == other.tick && gap == other.gap && weight == other.weight && accesses == other.accesses &&
           queue == other.queue;
  }
};
static_assert(sizeof(History) == 24, "the budget of memory counts on it");

// A request, as far as a policy needs it: when, how long its prompt is, and how much of it had been seen before.
struct Access {
  uint64_t tick;
  uint32_t prompt_blocks;
  uint32_t known_blocks;
};

// What somebody who knows tells about the next use of a prompt.
struct Hint {
  uint64_t tick;    // when it was told
  bool ended;       // there will be none
  double seconds;   // until it, where there will be one
};

// A candidate at an end of a queue.
struct QueueEnd {
  uint32_t node = kNone;  // kNone: the queue is empty
  uint64_t rank = 0;
};

// The candidates of one tier, as a policy sees them.
class Candidates {
 public:
  virtual ~Candidates() = default;
  virtual const std::vector<uint16_t>& open_queues() const = 0;  // those with a candidate, in no order
  virtual QueueEnd First(uint16_t queue) const = 0;              // of the lowest rank
  virtual QueueEnd Last(uint16_t queue) const = 0;               // of the highest rank
  virtual uint64_t Version(uint16_t queue) const = 0;            // grows whenever an end may have changed
};

// Fingerprints of prefixes, in order from the root on: one for each so many blocks of a prompt, as MakePolicy was told.
using Prefixes = std::vector<uint64_t>;

class Rehearsal;

// `blocks` is the length of a run.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // The history of blocks that nobody remembers.
  virtual History Born(const Access& access, uint32_t blocks) = 0;
  // The same blocks, still in the tree, are touched by another request.
  virtual History Accessed(const History& before, const Access& access, uint32_t blocks) = 0;
  // The same blocks come back after they had left the tree. `remembered` of them were not forgotten meanwhile.
  virtual History Revived(const History& before, const Access& access, uint32_t remembered, uint32_t blocks) = 0;
  // The request that touched them last goes on, and more of it is known now: no further access.
  virtual History Renewed(const History& before, const Access& access, uint32_t blocks) = 0;
  virtual History Hinted(const History& before, const Hint&, uint32_t) { return before; }
  // They leave the tree.
  virtual void Left(const History&, uint32_t) {}
  // Nothing will be heard of them any more.
  virtual void Forgotten(const History&, uint64_t /*now*/, uint32_t) {}

  // Requests as wholes, for policies that rehearse: one looked a prompt up, found these prefixes of it and so many
  // blocks in the tiers from the first to this one; one stores a prompt, of whose prefixes it had found the first `found`; a tier with so many blocks has no room.
  virtual void LookedUp(const Prefixes&, const Access&, const uint32_t (&/*found*/)[2]) {}
  virtual void Stored(const Prefixes&, size_t /*found*/, const Access&) {}
  virtual void Full(int /*tier*/, uint32_t /*blocks*/) {}
  virtual bool rehearses() const { return false; }
  virtual const Rehearsal* rehearsal(int /*tier*/) const { return nullptr; }

  // How many blocks are remembered after they left, for each one in the tree.
  virtual double ghost_ratio() const { return 0; }
  // The queue among the candidates of a run whose last block is at `depth`. By default that of its history.
  virtual uint16_t QueueAt(const History& history, uint32_t /*depth*/) const { return history.queue; }
  // The order of runs within a queue: the lowest goes first.
  virtual uint64_t RankOf(const History& history) const = 0;
  // The node whose last run goes first, or kNone where there is none.
  virtual uint32_t Choose(const Candidates& candidates, int tier, uint64_t now) = 0;
  // Before a run leaves: true where it stays after all, with another history.
  virtual bool Spares(History*, uint32_t) { return false; }
  // What a block is worth now; the lowest goes first. Comparable between trees of one policy.
  // `depth` is its index in the prefix.
  virtual double ValueOf(const History& history, uint32_t depth, uint64_t now) const = 0;

  virtual size_t bytes() const = 0;

  // Saving what was learnt, in pieces, and taking it up in another process. First Load, which replaces all that the
  // policy knows; then Restored or Born for every run that is there; then Resume, with
  // RestoredGhost for each that is remembered before it. `shift` is added to saved ticks.
  virtual uint32_t piece_count() const { return 0; }
  virtual void Save(uint32_t /*piece*/, std::string*) const {}
  // Throws std::invalid_argument, with nothing changed, for pieces that no policy like this one saved.
  virtual void Load(SavedBytes pieces, int64_t /*shift*/) {
    if (!pieces.empty()) throw std::invalid_argument("tables of a policy that has none");
  }
  // Whether a policy like this one could have saved such a history.
  virtual bool Understands(const History& history) const { return history.queue == 0 && IsSane(history); }
  virtual void Restored(const History&, uint32_t /*blocks*/) {}
  virtual void RestoredGhost(const History&) {}
  virtual void Resume(uint64_t /*now*/) {}

 protected:
  static bool IsSane(const History& history) {
    return history.tick <= kTickMax && std::isfinite(history.gap) && history.gap >= -1 &&
           std::isfinite(history.weight) && history.weight >= 0;
  }
};

// A tick of another process in this one's time.
inline uint64_t ShiftedTick(uint64_t tick, int64_t shift) {
  const int64_t shifted = static_cast<int64_t>(tick) + shift;
  return static_cast<uint64_t>(std::min<int64_t>(std::max<int64_t>(shifted, 0), static_cast<int64_t>(kTickMax)));
}

// `prefix_blocks` is how many blocks lie between two fingerprints. Throws std::invalid_argument for a name that is not in
// PolicyNames().
std::unique_ptr<EvictionPolicy> MakePolicy(const std::string& name, uint32_t block_tokens, uint32_t prefix_blocks);
const std::vector<std::string>& PolicyNames();

}  // namespace kvstore
