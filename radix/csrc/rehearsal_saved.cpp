// Saving what is rehearsed, and taking it up again in another process: miniatures go on as they were.
//
// Records are little-endian. One tells the capacity in blocks (8 bytes), the mask of the sample (8), what was looked up and
// found (8 each), and of each contest four values (8 each) and who leads (1). The others are units: fingerprint (8), that of the parent
// (8) and whether there is one (1), history (24), the miniatures that it is in (2), whether it was touched lately (1).
// On disk: never change one.
//
// Units come in slices between which others are forgotten, so what is read may name parents that are not there.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "rehearsal.h"

namespace kvstore {

namespace {

constexpr uint32_t kPieceUnits = 32;
constexpr uint32_t kOnTheWay = kNone - 1;  // in place of a depth that is being looked for

double TakeNumber(SavedBytes* bytes) {
  const auto number = bytes->Take<double>();
  if (!std::isfinite(number)) throw std::invalid_argument("a saved rehearsal counts what is no number");
  return number;
}

double TakeCount(SavedBytes* bytes) {
  const double number = TakeNumber(bytes);
  if (number < 0) throw std::invalid_argument("a saved rehearsal counts below nothing");
  return number;
}

}  // namespace

void Contest::Save(std::string* bytes) const {
  for (double value : {request_lead_, lead_, lead_variance_, found_}) Put(bytes, value);
  Put(bytes, static_cast<uint8_t>(prefers_recency_));
}

void Contest::Load(SavedBytes* bytes) {
  request_lead_ = TakeNumber(bytes);
  lead_ = TakeNumber(bytes);
  lead_variance_ = TakeCount(bytes);
  found_ = TakeCount(bytes);
  const auto prefers = bytes->Take<uint8_t>();
  if (prefers > 1) throw std::invalid_argument("a saved contest is neither won nor lost");
  prefers_recency_ = prefers != 0;
}

uint32_t Rehearsal::piece_count() const {
  if (capacity_blocks_ == 0) return 0;
  return 1 + static_cast<uint32_t>((units_.size() + kPieceUnits - 1) / kPieceUnits);
}

void Rehearsal::Save(uint32_t piece, uint16_t mark, std::string* bytes) const {
  if (piece == 0) {
    Put(bytes, mark);
    Put(bytes, capacity_blocks_);
    Put(bytes, mask_);
    Put(bytes, looked_up_);
    Put(bytes, found_);
    for (const Contest& contest : contests_) contest.Save(bytes);
    return;
  }
  const size_t end = std::min<size_t>(units_.size(), size_t{piece} * kPieceUnits);
  for (size_t at = size_t{piece - 1} * kPieceUnits; at < end; ++at) {
    if (!units_[at].is_known) continue;
    Put(bytes, static_cast<uint16_t>(mark + 1));
    SaveUnit(units_[at], bytes);
  }
}

void Rehearsal::SaveUnit(const Unit& unit, std::string* bytes) const {
  const bool has_parent = unit.parent != kNone;
  Put(bytes, unit.fingerprint);
  Put(bytes, has_parent ? units_[unit.parent].fingerprint : uint64_t{0});
  Put(bytes, static_cast<uint8_t>(has_parent));
  Put(bytes, unit.history);
  Put(bytes, unit.cached_in);
  Put(bytes, static_cast<uint8_t>(unit.was_touched));
}

void Rehearsal::LoadCounts(SavedBytes* bytes) {
  const auto capacity = bytes->Take<uint64_t>();
  const auto mask = bytes->Take<uint64_t>();
  if (capacity == 0 || capacity > UINT32_MAX || (mask & (mask + 1)) != 0 || mask > UINT32_MAX) {
    throw std::invalid_argument("a saved rehearsal is of " + std::to_string(capacity) + " blocks, sampled by " +
                                std::to_string(mask));
  }
  capacity_blocks_ = capacity;
  mask_ = mask;
  looked_up_ = TakeCount(bytes);
  found_ = TakeCount(bytes);
  for (Contest& contest : contests_) contest.Load(bytes);
  SizeMiniatures();
}

void Rehearsal::LoadUnit(SavedBytes* bytes, int64_t shift) {
  const auto fingerprint = bytes->Take<uint64_t>();
  const auto parent = bytes->Take<uint64_t>();
  const auto has_parent = bytes->Take<uint8_t>();
  auto history = bytes->Take<History>();
  const auto cached_in = bytes->Take<uint16_t>();
  const auto was_touched = bytes->Take<uint8_t>();
  if (has_parent > 1 || was_touched > 1 || cached_in >> kMiniatures != 0 || !policy_->Understands(history)) {
    throw std::invalid_argument("a saved unit of a rehearsal is none");
  }
  if (!IsSampled(fingerprint) || at_.count(fingerprint) > 0) return;
  history.tick = ShiftedTick(history.tick, shift);
  const uint32_t at = NewUnit(fingerprint, kNone, history);
  units_[at].was_touched = was_touched != 0;
  units_[at].cached_in = cached_in;
  units_[at].depth = has_parent ? kNone : 0;  // known when its parent's is
  loaded_parents_.resize(units_.size());
  loaded_parents_[at] = parent;
}

// Finds the depths of this unit and of all above it; forgets those whose way up ends at none that is known, or goes in
// circles.
void Rehearsal::ReachOrForget(uint32_t at) {
  std::vector<uint32_t> way;
  while (units_[at].depth == kNone) {
    units_[at].depth = kOnTheWay;
    way.push_back(at);
    const auto parent = at_.find(loaded_parents_[at]);
    if (parent == at_.end() || units_[parent->second].depth == kOnTheWay) {
      for (uint32_t lost : way) Forget(lost);
      return;
    }
    units_[at].parent = parent->second;
    at = parent->second;
  }
  for (auto below = way.rbegin(); below != way.rend(); ++below) {
    units_[*below].depth = units_[units_[*below].parent].depth + 1;
  }
}

// Puts the units together: who is below whom, and in each miniature what has its parent there, too.
void Rehearsal::Resume() {
  for (uint32_t at = 0; at < units_.size(); ++at) {
    if (units_[at].is_known) ReachOrForget(at);
  }
  std::vector<uint32_t> order;
  for (uint32_t at = 0; at < units_.size(); ++at) {
    if (units_[at].is_known) order.push_back(at);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t one, uint32_t other) { return units_[one].depth < units_[other].depth; });
  for (uint32_t at : order) {
    Unit& unit = units_[at];
    if (unit.parent == kNone) continue;
    Unit& parent = units_[unit.parent];
    ++parent.children;
    unit.cached_in &= parent.cached_in;
    for (size_t each = 0; each < kMiniatures; ++each) parent.below[each] += IsIn(unit, each);
  }
  for (uint32_t at : order) {
    const Unit& unit = units_[at];
    for (size_t each = 0; each < kMiniatures; ++each) {
      if (!IsIn(unit, each)) continue;
      miniatures_[each].Grow();
      if (unit.below[each] == 0) miniatures_[each].AddCandidate(at, unit.depth, unit.history);
    }
  }
  loaded_parents_ = {};
}

}  // namespace kvstore
