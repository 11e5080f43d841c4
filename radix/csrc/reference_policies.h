// The policies that others use, on prefix-closed runs, to compare with. Only leaves may go, so each of them differs a
// little from its paper: a run is one object, and what lies above a candidate waits for it.
#pragma once

#include <algorithm>

#include "policy.h"

namespace kvstore {

// One queue, the lowest rank first.
class OneQueuePolicy : public EvictionPolicy {
 public:
  History Revived(const History&, const Access& access, uint32_t, uint32_t blocks) override { return Born(access, blocks); }
  History Renewed(const History& before, const Access&, uint32_t) override { return before; }
  uint64_t RankOf(const History& history) const override { return history.tick; }
  uint32_t Choose(const Candidates& candidates, int, uint64_t) override { return candidates.First(0).node; }
  double ValueOf(const History& history, uint32_t, uint64_t) const override { return static_cast<double>(RankOf(history)); }
  size_t bytes() const override { return sizeof(*this); }
};

// Least recently used; blocks of one request from the tail.
class LruPolicy : public OneQueuePolicy {
 public:
  History Born(const Access& access, uint32_t) override { return At(access.tick); }
  History Accessed(const History& before, const Access& access, uint32_t) override {
    return At(std::max(before.tick, access.tick));
  }
  History Renewed(const History& before, const Access& access, uint32_t blocks) override {
    return Accessed(before, access, blocks);
  }

 private:
  static History At(uint64_t tick) {
    History history;
    history.tick = tick;
    return history;
  }
};

// First in, first out: `tick` is that of the birth.
class FifoPolicy : public OneQueuePolicy {
 public:
  History Born(const Access& access, uint32_t) override {
    History history;
    history.tick = access.tick;
    return history;
  }
  History Accessed(const History& before, const Access&, uint32_t) override { return before; }
};

// Least frequently used, among equals the least recently used.
class LfuPolicy : public OneQueuePolicy {
 public:
  History Born(const Access& access, uint32_t) override {
    History history;
    history.tick = access.tick;
    history.accesses = 1;
    return history;
  }
  History Accessed(const History& before, const Access& access, uint32_t) override {
    History history = before;
    history.tick = access.tick;
    if (history.accesses < UINT16_MAX) ++history.accesses;
    return history;
  }
  uint64_t RankOf(const History& history) const override {
    return static_cast<uint64_t>(history.accesses) << kTickBits | history.tick;
  }
};

// SIEVE (Zhang et al., NSDI 2024): a hand goes from the oldest to the newest, again and again; what was visited since it
// last passed stays where it is. `gap` counts how often a run was passed, so the hand is at the lowest rank.
class SievePolicy : public OneQueuePolicy {
 public:
  History Born(const Access& access, uint32_t) override {
    newest_tick_ = std::max(newest_tick_, access.tick);
    History history;
    history.tick = access.tick;
    history.gap = static_cast<float>(round_);
    return history;
  }
  History Accessed(const History& before, const Access&, uint32_t) override {
    History history = before;
    history.accesses = 1;
    return history;
  }
  bool Spares(History* history, uint32_t) override {
    round_ = static_cast<uint32_t>(history->gap);
    if (round_ == kRoundMax) return false;
    if (history->accesses == 0) {
      if (history->tick == newest_tick_) ++round_;  // the hand is through, and does not wait for what comes next
      return false;
    }
    history->accesses = 0;
    history->gap = static_cast<float>(round_ + 1);
    return true;
  }
  uint64_t RankOf(const History& history) const override {
    return static_cast<uint64_t>(history.gap) << kTickBits | history.tick;
  }

  uint32_t piece_count() const override { return 1; }
  void Save(uint32_t, std::string* bytes) const override { Put(bytes, round_); }
  void Load(SavedBytes pieces, int64_t) override {
    const auto round = pieces.Take<uint32_t>();
    if (round > kRoundMax || !pieces.empty()) throw std::invalid_argument("the hand of SIEVE is nowhere");
    round_ = round;
    newest_tick_ = 0;
  }
  void Restored(const History& history, uint32_t) override { newest_tick_ = std::max(newest_tick_, history.tick); }
  bool Understands(const History& history) const override {
    return OneQueuePolicy::Understands(history) && history.gap >= 0 && history.gap <= kRoundMax;
  }

 private:
  static constexpr uint32_t kRoundMax = (1u << (64 - kTickBits)) - 1;

  uint32_t round_ = 0;
  uint64_t newest_tick_ = 0;
};

// S3-FIFO (Yang et al., SOSP 2023): a small queue for what is new, a main one for what was used in it or came back soon.
// `tick` is that of entering the queue, in the main one a little later where several enter at once, so that they stay in
// the order in which they came.
class S3FifoPolicy : public EvictionPolicy {
 public:
  History Born(const Access& access, uint32_t blocks) override { return Enter(kSmall, access.tick, blocks); }
  History Accessed(const History& before, const Access&, uint32_t) override {
    History history = before;
    history.accesses = std::min<uint16_t>(kUsesMax, before.accesses + 1);
    return history;
  }
  History Revived(const History& before, const Access& access, uint32_t, uint32_t blocks) override {
    return Enter(before.queue == kSmall ? kMain : kSmall, access.tick, blocks);  // only the small queue has ghosts
  }
  History Renewed(const History& before, const Access&, uint32_t) override { return before; }
  void Left(const History& history, uint32_t blocks) override { blocks_[history.queue] -= blocks; }
  double ghost_ratio() const override { return 1; }
  uint64_t RankOf(const History& history) const override { return history.tick; }

  uint32_t Choose(const Candidates& candidates, int, uint64_t now) override {
    now_ = now;
    const uint32_t small = candidates.First(kSmall).node;
    const uint32_t main = candidates.First(kMain).node;
    const bool small_is_full = blocks_[kSmall] * 10 >= blocks_[kSmall] + blocks_[kMain];
    if (small == kNone || (main != kNone && !small_is_full)) return main;
    return small;
  }

  bool Spares(History* history, uint32_t blocks) override {
    if (history->accesses < (history->queue == kSmall ? 2 : 1)) return false;
    const uint16_t uses = history->queue == kSmall ? 0 : history->accesses - 1;
    Left(*history, blocks);
    *history = Enter(kMain, now_, blocks);
    history->accesses = uses;
    return true;
  }

  double ValueOf(const History& history, uint32_t, uint64_t) const override {
    return history.queue == kSmall ? 0 : static_cast<double>(history.tick);
  }
  size_t bytes() const override { return sizeof(*this); }

  void Load(SavedBytes pieces, int64_t shift) override {
    EvictionPolicy::Load(pieces, shift);
    blocks_[kSmall] = blocks_[kMain] = main_tick_ = 0;
  }
  bool Understands(const History& history) const override { return history.queue <= kMain && IsSane(history); }
  void Restored(const History& history, uint32_t blocks) override {
    blocks_[history.queue] += blocks;
    if (history.queue == kMain) main_tick_ = std::max(main_tick_, history.tick);
  }

 private:
  static constexpr uint16_t kSmall = 0;
  static constexpr uint16_t kMain = 1;
  static constexpr uint16_t kUsesMax = 3;

  History Enter(uint16_t queue, uint64_t tick, uint32_t blocks) {
    blocks_[queue] += blocks;
    if (queue == kMain) tick = main_tick_ = std::max(tick, main_tick_ + 1);
    History history;
    history.tick = tick;
    history.queue = queue;
    return history;
  }

  uint64_t blocks_[2] = {0, 0};
  uint64_t now_ = 0;
  uint64_t main_tick_ = 0;
};

}  // namespace kvstore
