#include "rehearsal.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

namespace kvstore {

namespace {

constexpr double kHalfLifeRequests = 4000;
constexpr double kLeadDeviations = 1.5;      // beyond which a lead is no chance
constexpr size_t kUnitsMax = 1u << 15;        // known at once, but for those in miniatures
constexpr size_t kLooksPerUnit = 4;           // at known units, for each new one, to forget as many
constexpr double kSampleShrinkMax = 8;        // a sample this much too small tells too little: a tier shrank, over a restart
constexpr size_t kUnitBytes = 64;             // of a unit in the map

}  // namespace

// ---- one miniature ----

void Miniature::AddCandidate(uint32_t unit, uint32_t depth, const History& history) {
  queues_[QueueOf(history)].emplace(history.tick, ~depth, unit);
  ++candidates_;
}

void Miniature::RemoveCandidate(uint32_t unit, uint32_t depth, const History& history) {
  const auto queue = queues_.find(QueueOf(history));
  queue->second.erase(Candidate{history.tick, ~depth, unit});
  if (queue->second.empty()) queues_.erase(queue);
  --candidates_;
}

uint32_t Miniature::Choose(uint64_t now) const {
  if (order_ == VictimOrder::kRecency) return std::get<2>(*queues_.begin()->second.begin());
  double best = 0;
  uint32_t unit = kNone;
  const auto offer = [&](uint16_t queue, const Candidate& candidate) {
    const uint64_t tick = std::get<0>(candidate);
    const double index = policy_->IndexOf(queue, now > tick ? static_cast<double>(now - tick) / 1e6 : 0);
    if (unit != kNone && index >= best) return;
    best = index;
    unit = std::get<2>(candidate);
  };
  for (const auto& [queue, candidates] : queues_) {
    offer(queue, *candidates.begin());
    const uint64_t newest = std::get<0>(*candidates.rbegin());
    if (newest != std::get<0>(*candidates.begin())) offer(queue, *candidates.lower_bound(Candidate{newest, 0, 0}));
  }
  return unit;
}

// ---- which order is better ----

void Contest::Count(double by_survival, double by_recency) {
  request_lead_ += by_recency - by_survival;
  found_ += prefers_recency_ ? by_recency : by_survival;
}

// Recency takes over when it leads by more than chance explains, until it leads no more.
void Contest::Decide() {
  static const double fade = std::exp2(-1 / kHalfLifeRequests);
  lead_ = lead_ * fade + request_lead_;
  lead_variance_ = lead_variance_ * fade * fade + request_lead_ * request_lead_;
  request_lead_ = 0;
  prefers_recency_ = prefers_recency_ ? lead_ > 0 : lead_ > kLeadDeviations * std::sqrt(lead_variance_);
}

// ---- all of them ----

Rehearsal::Rehearsal(const SurvivalPolicy* policy, uint32_t unit_blocks) : policy_(policy), unit_blocks_(unit_blocks) {
  for (size_t scale = 0; scale < kScales; ++scale) {
    miniatures_.emplace_back(policy, VictimOrder::kSurvival);
    miniatures_.emplace_back(policy, VictimOrder::kRecency);
  }
}

void Rehearsal::SetCapacity(uint64_t blocks) {
  if (blocks == capacity_blocks_) return;
  capacity_blocks_ = blocks;
  const double units = static_cast<double>(blocks) / unit_blocks_;
  const double sampled = units / static_cast<double>(mask_ + 1);
  const bool is_coarse = mask_ > 0 && sampled * kSampleShrinkMax < kUnitsAtScaleOne;
  if (is_coarse || sampled > 2 * kUnitsAtScaleOne) {
    uint64_t mask = is_coarse ? 0 : mask_;
    while (units / static_cast<double>(mask + 1) > kUnitsAtScaleOne) mask = mask * 2 + 1;
    Restart(mask);
  }
  SizeMiniatures();
}

void Rehearsal::SizeMiniatures() {
  const double units = static_cast<double>(capacity_blocks_) / unit_blocks_ / static_cast<double>(mask_ + 1);
  for (size_t at = 0; at < kMiniatures; ++at) {
    miniatures_[at].set_capacity(std::max<size_t>(1, static_cast<size_t>(units * kScale[at / 2])));
  }
}

void Rehearsal::Look(const Prefixes& prefix, const Access& access, uint32_t found_blocks) {
  if (capacity_blocks_ == 0) return;
  looked_up_ += access.prompt_blocks;
  found_ += found_blocks;
  size_t found = prefix.size();
  std::vector<uint32_t> path = FindPath(prefix, &found);
  for (Contest& contest : contests_) contest.Decide();
  CountHits(path, 0);
  for (uint32_t at : path) {
    if (units_[at].history.tick != access.tick) SetHistory(at, policy_->Again(units_[at].history, access));
  }
  // Nothing of it will be stored here, but where less was found it would be.
  if (access.known_blocks == access.prompt_blocks) Keep(prefix, std::move(path), access);
}

void Rehearsal::Store(const Prefixes& prefix, size_t found, const Access& access) {
  if (capacity_blocks_ == 0) return;
  std::vector<uint32_t> path = FindPath(prefix, &found);
  CountHits(path, found);
  for (size_t place = 0; place < path.size(); ++place) {
    const History& history = units_[path[place]].history;
    if (history.tick == access.tick) continue;
    SetHistory(path[place], place < found ? policy_->Onward(history, access) : policy_->Again(history, access));
  }
  Keep(prefix, std::move(path), access);
}

// Puts the prompt into all miniatures. Of its units those of the path are known.
void Rehearsal::Keep(const Prefixes& prefix, std::vector<uint32_t> path, const Access& access) {
  uint32_t parent = path.empty() ? kNone : path.back();
  const size_t known = path.size();
  size_t place = 0;
  for (uint64_t fingerprint : prefix) {
    if (!IsSampled(fingerprint) || place++ < known) continue;
    parent = NewUnit(fingerprint, parent, policy_->First(access));
    path.push_back(parent);
  }
  for (size_t miniature = 0; miniature < kMiniatures; ++miniature) Insert(path, miniature, access.tick);
  ForgetIdleUnits(kLooksPerUnit * (path.size() - known));
}

// The known units of the prefix, in order; none is known below one that is not. `found` counts fingerprints before and
// units after.
std::vector<uint32_t> Rehearsal::FindPath(const Prefixes& prefix, size_t* found) const {
  std::vector<uint32_t> path;
  size_t units_found = 0;
  bool is_known = true;
  for (size_t at = 0; at < prefix.size(); ++at) {
    if (!IsSampled(prefix[at])) continue;
    units_found += at < *found;
    if (!is_known) continue;
    const auto unit = at_.find(prefix[at]);
    is_known = unit != at_.end();
    if (is_known) path.push_back(unit->second);
  }
  *found = units_found;
  return path;
}

// Counts what each miniature has of the path, of which the first `counted` units were counted before.
void Rehearsal::CountHits(const std::vector<uint32_t>& path, size_t counted) {
  const auto hits = [&](size_t miniature) {
    const size_t leading = LeadingIn(path, miniature);
    return leading > counted ? static_cast<double>(leading - counted) : 0;
  };
  for (size_t scale = 0; scale < kScales; ++scale) contests_[scale].Count(hits(2 * scale), hits(2 * scale + 1));
}

size_t Rehearsal::LeadingIn(const std::vector<uint32_t>& path, size_t miniature) const {
  size_t count = 0;
  while (count < path.size() && IsIn(units_[path[count]], miniature)) ++count;
  return count;
}

void Rehearsal::SetHistory(uint32_t at, const History& history) {
  Unit& unit = units_[at];
  for (size_t each = 0; each < kMiniatures; ++each) {
    if (!IsIn(unit, each) || unit.below[each] > 0) continue;
    miniatures_[each].RemoveCandidate(at, unit.depth, unit.history);
    miniatures_[each].AddCandidate(at, unit.depth, history);
  }
  unit.history = history;
  unit.was_touched = true;
}

uint32_t Rehearsal::NewUnit(uint64_t fingerprint, uint32_t parent, const History& history) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(units_.size()));
    units_.emplace_back();
  }
  const uint32_t at = free_.back();
  free_.pop_back();
  Unit unit;
  unit.fingerprint = fingerprint;
  unit.history = history;
  unit.parent = parent;
  unit.is_known = unit.was_touched = true;
  if (parent != kNone) {
    unit.depth = units_[parent].depth + 1;
    ++units_[parent].children;
  }
  units_[at] = unit;
  at_.emplace(fingerprint, at);
  return at;
}

void Rehearsal::Insert(const std::vector<uint32_t>& path, size_t miniature, uint64_t now) {
  const auto bit = static_cast<uint16_t>(1u << miniature);
  Miniature& cache = miniatures_[miniature];
  for (uint32_t at : path) {
    Unit& unit = units_[at];
    if (unit.cached_in & bit) continue;
    unit.cached_in |= bit;
    cache.Grow();
    cache.AddCandidate(at, unit.depth, unit.history);
    if (unit.parent == kNone) continue;
    Unit& parent = units_[unit.parent];
    if (parent.below[miniature]++ == 0) cache.RemoveCandidate(unit.parent, parent.depth, parent.history);
  }
  while (cache.size() > cache.capacity()) Evict(miniature, now);
}

// One unit, and those above it as far as they have the same history.
void Rehearsal::Evict(size_t miniature, uint64_t now) {
  Miniature& cache = miniatures_[miniature];
  uint32_t at = cache.Choose(now);
  const History history = units_[at].history;
  while (true) {
    Unit& unit = units_[at];
    cache.RemoveCandidate(at, unit.depth, unit.history);
    cache.Shrink();
    unit.cached_in = static_cast<uint16_t>(unit.cached_in & ~(1u << miniature));
    if (unit.parent == kNone) return;
    Unit& parent = units_[unit.parent];
    if (--parent.below[miniature] > 0) return;
    cache.AddCandidate(unit.parent, parent.depth, parent.history);
    if (cache.size() <= cache.capacity() || !(parent.history == history)) return;
    at = unit.parent;
  }
}

// Where too many are known, a hand goes round over them, and forgets what is in no miniature, has no known unit below it and
// was not touched since the hand came by.
void Rehearsal::ForgetIdleUnits(size_t looks) {
  for (; looks > 0 && at_.size() > kUnitsMax; --looks) {
    hand_ = (hand_ + 1) % units_.size();
    Unit& unit = units_[hand_];
    if (!unit.is_known || unit.cached_in != 0 || std::exchange(unit.was_touched, false) || unit.children > 0) continue;
    if (unit.parent != kNone) --units_[unit.parent].children;
    Forget(static_cast<uint32_t>(hand_));
  }
}

// REQUIRES: it is known, and nobody else's parent or candidate.
void Rehearsal::Forget(uint32_t at) {
  at_.erase(units_[at].fingerprint);
  units_[at].is_known = false;
  free_.push_back(at);
}

// Begins anew with another part of the units.
void Rehearsal::Restart(uint64_t mask) {
  mask_ = mask;
  looked_up_ = found_ = 0;
  contests_.fill(Contest{});
  at_.clear();
  units_.clear();
  free_.clear();
  hand_ = 0;
  for (size_t at = 0; at < kMiniatures; ++at) miniatures_[at] = Miniature(policy_, miniatures_[at].order());
}

// At the own capacity it is known what was found. A sample has too many or too few of the prefixes that everybody shares,
// and units of several blocks miss what is found behind the last whole one; both are alike at all sizes, so the miniatures
// tell the differences to what was found, in which they cancel out. Where each block is a unit and none is left out, what is
// left is that a miniature begins empty, with tables learnt elsewhere: smaller ones have long forgotten that and are right
// by themselves, larger ones lack as much as the own one at least.
Rehearsed Rehearsal::result() const {
  Rehearsed result{looked_up_, found_, {}};
  if (capacity_blocks_ == 0) return result;
  const double blocks_per_unit = static_cast<double>(mask_ + 1) * unit_blocks_;
  const double offset = found_ - contests_[kOwnScale].found() * blocks_per_unit;
  const bool is_whole = mask_ == 0 && unit_blocks_ == 1;
  for (size_t scale = 0; scale < kScales; ++scale) {
    const bool is_right = is_whole && scale < kOwnScale;
    const double rehearsed = contests_[scale].found() * blocks_per_unit + (is_right ? 0 : offset);
    const double found = scale == kOwnScale ? found_ : std::clamp(rehearsed, 0.0, looked_up_);
    const auto blocks = static_cast<uint64_t>(static_cast<double>(capacity_blocks_) * kScale[scale]);
    result.capacities.push_back(RehearsedCapacity{blocks, found});
  }
  return result;
}

size_t Rehearsal::bytes() const {
  size_t bytes = sizeof(*this) + units_.capacity() * sizeof(Unit) + at_.size() * kUnitBytes + free_.capacity() * sizeof(uint32_t);
  for (const Miniature& miniature : miniatures_) bytes += sizeof(Miniature) + miniature.bytes();
  return bytes;
}

}  // namespace kvstore
