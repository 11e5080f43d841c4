// The default policy: how likely is a block to be used again, for the time that it takes up room until then?
//
// What is alike has one queue: blocks seen once, by how much of their prompt was new; blocks seen again, by the number of
// accesses and the usual gap between them, too. For each queue the policy counts how often blocks were used again at
// which age (a life table: hits over exposure, by bins of age). From the hazards it derives, for every age, the highest
// rate of hits per second of room that keeping a block could bring, over all times at which it might be given up: the
// Gittins index (Gittins, 1979; for caches Beckmann et al., LHD, NSDI 2018, is close). The block with the lowest index
// goes. Sparse queues lean on those near them, those on all. Nothing is trained beforehand and no text is looked at.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "policy.h"

namespace kvstore {

constexpr int kAgeBins = 32;
using Bins = std::array<double, kAgeBins>;

// Ages in seconds fall into bins that grow by half: 0-1, 1-1.5, ... the last one begins at 2 days.
int AgeBin(double seconds);

// For what is in the middle of each bin of age, the Gittins index: the highest ratio of P(use) to expected time, over all
// ages at which it might be given up. The hazards are uses per second, `risk` raises or lowers all of them.
Bins GittinsIndices(const Bins& hazards, double risk);

// The lives of the blocks in one queue: those that ended, by the age at which they did, and those that go on.
class LifeTable {
 public:
  void Begin(uint64_t tick, double weight);
  void EndByUse(uint64_t born, uint64_t now, double weight);
  void EndUnused(uint64_t born, uint64_t now, double weight);

  // Uses and seconds of exposure in each bin of age, of ended and of living ones.
  void Sum(uint64_t now, Bins* uses, Bins* exposure) const;
  size_t bytes() const;

  // Saved are the lives that ended, and when those began that go on; Restore brings these back one by one.
  void Save(std::string* bytes) const;
  void Load(SavedBytes* bytes, int64_t shift);
  void Restore(uint64_t tick, double weight);

 private:
  // Lives that began at about the same time. Older cohorts span more, as bins do.
  struct Cohort {
    uint64_t first_tick;
    double mean_tick;
    double weight;
  };

  void End(uint64_t born, uint64_t now, double weight);
  Cohort* CohortOf(uint64_t born);  // null where it was before all of them
  void MergeCohorts();
  void Fade();

  Bins uses_{};
  Bins ends_{};      // with or without a use
  Bins ended_age_{};  // sum of the ages of these
  double ended_weight_ = 0;
  std::vector<Cohort> cohorts_;  // by time
};

// What a hit is worth: every block the same, or what computing it again costs, which grows with its depth.
enum class HitWorth : uint8_t { kBlocks, kFlops };

// The depth at which attending to all tokens before costs as much as all else that a token takes: 2 P / (4 L H) tokens for
// P parameters, L layers and a hidden size of H, which is about 30k for models of 8 and 53k for models of 70 billion.
constexpr uint32_t kEvenTokens = 32768;

class SurvivalPolicy : public EvictionPolicy {
 public:
  SurvivalPolicy(uint32_t block_tokens, uint32_t prefix_blocks, HitWorth worth = HitWorth::kBlocks);
  ~SurvivalPolicy() override;

  // What the histories become, without a trace in the statistics.
  History First(const Access& access) const;
  History Again(const History& before, const Access& access) const;
  History Onward(const History& before, const Access& access) const;

  History Born(const Access& access, uint32_t blocks) override;
  History Accessed(const History& before, const Access& access, uint32_t blocks) override;
  History Revived(const History& before, const Access& access, uint32_t remembered, uint32_t blocks) override;
  History Renewed(const History& before, const Access& access, uint32_t blocks) override;
  History Hinted(const History& before, const Hint& hint, uint32_t blocks) override;
  void Forgotten(const History& history, uint64_t now, uint32_t blocks) override;
  void LookedUp(const Prefixes& prefixes, const Access& access, const uint32_t (&found)[2]) override;
  void Stored(const Prefixes& prefixes, size_t found, const Access& access) override;
  void Full(int tier, uint32_t blocks) override;
  bool rehearses() const override { return true; }
  const Rehearsal* rehearsal(int tier) const override { return rehearsals_[tier].get(); }
  double ghost_ratio() const override { return 16; }
  uint64_t RankOf(const History& history) const override { return history.tick; }
  uint32_t Choose(const Candidates& candidates, int tier, uint64_t now) override;
  uint16_t QueueAt(const History& history, uint32_t depth) const override;
  double ValueOf(const History& history, uint32_t depth, uint64_t now) const override;
  size_t bytes() const override;
  uint32_t piece_count() const override;
  void Save(uint32_t piece, std::string* bytes) const override;
  void Load(SavedBytes pieces, int64_t shift) override;
  bool Understands(const History& history) const override {
    return history.queue < queues_.size() && history.accesses > 0 && IsSane(history);
  }
  void Restored(const History& history, uint32_t blocks) override;
  void RestoredGhost(const History& history) override { Restored(history, 1); }
  void Resume(uint64_t now) override;

  // Of a block of `queue` at an age in seconds.
  double IndexOf(uint16_t queue, double seconds) const;

 private:
  // Where a queue stands: `kind` shares the shape of the hazard, `news` raises or lowers it.
  static constexpr int kNews = 10;                  // powers of two of 512 new tokens
  static constexpr int kGaps = 16;
  static constexpr int kCounts = 6;                 // buckets of accesses of what was seen again
  static constexpr int kKindSeenOnce = 0;
  static constexpr int kKindEnded = 1 + kCounts * kGaps;  // a hint said that it is over
  static constexpr int kKindExpected = kKindEnded + 1;    // a hint said when it goes on, by powers of two of seconds
  static constexpr int kExpected = 16;
  static constexpr int kKinds = kKindExpected + kExpected;
  static constexpr int kGroups = 1 + kCounts + 2;   // of kinds: by accesses, ended, expected
  static constexpr int kRiskGroups = 3;             // seen once, twice, more often

  // Where hits are worth what they cost, candidates of a queue are told apart by their cost, in half powers of two.
  static constexpr size_t kCostSteps = 8;

  struct Queue {
    LifeTable lives;
    Bins uses{};
    Bins exposure{};
    double total_uses = 0;
    double expected_uses = 0;
    std::array<float, kAgeBins> index{};
  };

  struct Totals {
    Bins uses{};
    Bins exposure{};
  };

  // What a queue has to offer in one tier.
  struct Offer {
    uint64_t version = 0;
    uint32_t node = kNone;
    float index = 0;
  };

  static int KindOf(uint16_t queue) { return queue / kNews; }
  size_t CostStepOf(uint32_t depth) const;
  static int GroupOf(int kind);
  static int RiskGroupOf(int kind);
  uint16_t QueueOf(uint16_t accesses, float gap, const Access& access) const;
  float WeightOf(const Access& access) const;
  History Begin(History history, uint32_t blocks);
  Queue& Open(uint16_t queue);
  static std::unique_ptr<Queue> TakeQueue(SavedBytes* pieces, int64_t shift);
  void Forget();
  void RefreshNext(uint64_t now);
  void Refresh(uint16_t queue, uint64_t now);
  void Recount(uint16_t queue, uint64_t now);
  Bins Hazards(int kind) const;
  double Prior(int kind, int bin, double general) const;
  uint32_t LeastRecent(const Candidates& candidates) const;
  Offer BestOf(const Candidates& candidates, uint16_t queue, uint64_t now) const;

  const HitWorth worth_;
  const double block_units_;   // of 512 tokens
  const double block_depths_;  // of kEvenTokens
  const uint32_t prefix_blocks_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::vector<uint16_t> opened_;
  size_t next_refresh_ = 0;
  uint64_t refreshed_tick_ = 0;
  Totals all_;
  std::array<Totals, kGroups> groups_{};
  std::vector<Totals> kinds_;
  std::array<std::array<double, kNews>, kRiskGroups> risk_uses_{};
  std::array<std::array<double, kNews>, kRiskGroups> risk_expected_{};
  std::vector<Offer> offers_[2];
  uint64_t offers_tick_[2] = {0, 0};
  std::unique_ptr<Rehearsal> rehearsals_[2];  // for each tier
};

}  // namespace kvstore
