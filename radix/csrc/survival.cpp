#include "survival.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "rehearsal.h"

namespace kvstore {

namespace {

constexpr double kAgeRatio = 1.5;
constexpr double kTicksPerSecond = 1e6;
constexpr double kUnitTokens = 512;
constexpr size_t kCohortsMax = 48;
constexpr double kFadeWeight = 16384;  // ended lives of a queue, after which old ones count half

constexpr double kPromptUnitsMin = 0.25;
constexpr double kPromptDamping = 0.4;

// Uses that are taken for granted at the hazard of the next larger group, until a queue has its own.
constexpr double kPriorUses = 0.7;
constexpr double kPriorRiskUses = 10;
constexpr double kPriorQueueUses = 100;
constexpr double kEndedRisk = 0.05;  // of what was said to be over, until it turns out otherwise
// Of a block at the beginning of each step.
constexpr std::array<double, 8> kStepCosts = {1, 1.4142, 2, 2.8284, 4, 5.6569, 8, 11.3137};

constexpr uint32_t kSavedVersion = 2;  // of the tables; on disk: never renumber
constexpr uint16_t kRehearsalMarks[2] = {0xFFFC, 0xFFFE};  // in place of a queue, for each tier; on disk, too

struct AgeScale {
  Bins edge{};
  Bins width{};

  AgeScale() {
    for (int bin = 1; bin < kAgeBins; ++bin) edge[bin] = std::pow(kAgeRatio, bin - 1);
    for (int bin = 0; bin + 1 < kAgeBins; ++bin) width[bin] = edge[bin + 1] - edge[bin];
    width[kAgeBins - 1] = edge[kAgeBins - 1] * (kAgeRatio - 1);
  }
};
const AgeScale kScale;

double SecondsBetween(uint64_t from, uint64_t to) { return to > from ? static_cast<double>(to - from) / kTicksPerSecond : 0; }

double TakeAmount(SavedBytes* bytes) {
  const auto amount = bytes->Take<double>();
  if (!std::isfinite(amount) || amount < 0) throw std::invalid_argument("a saved life table counts below nothing");
  return amount;
}

void TakeAmounts(SavedBytes* bytes, Bins* bins) {
  for (double& amount : *bins) amount = TakeAmount(bytes);
}

int PowerOfTwo(double value, int limit) { return std::min(limit, std::max(0, std::ilogb(value))); }

}  // namespace

int AgeBin(double seconds) {
  const auto next = std::upper_bound(kScale.edge.begin(), kScale.edge.end(), seconds);
  return std::max(0, static_cast<int>(next - kScale.edge.begin()) - 1);
}

// ---- the index ----

namespace {

// A stretch of ages of what is alive where it begins: how likely it is used there, for how long it is expected to stay,
// and how likely it comes out alive.
struct Stretch {
  double used;
  double seconds;
  double alive;

  // With a hazard so much, a life ends by a use within the stretch with probability x / (1 + x), x = hazard * width.
  static Stretch Of(double hazard, double width) {
    const double alive = 1 / (1 + hazard * width);
    return Stretch{1 - alive, alive * width, alive};
  }
  bool Pays(const Stretch& next) const { return next.used * seconds > used * next.seconds; }
  Stretch Then(const Stretch& next) const {
    return Stretch{used + alive * next.used, seconds + alive * next.seconds, alive * next.alive};
  }
};

}  // namespace

// From the last bin to the first, with the best stretches that follow in hand, their rates falling: going on pays as long
// as the next one has a higher rate than what there is so far. O(bins), where trying all ends is O(bins^2).
Bins GittinsIndices(const Bins& hazards, double risk) {
  Bins indices;
  std::array<Stretch, kAgeBins> following;
  size_t count = 0;
  for (size_t bin = kAgeBins; bin-- > 0;) {
    Stretch from_middle = Stretch::Of(hazards[bin] * risk, kScale.width[bin] / 2);
    for (size_t next = count; next > 0 && from_middle.Pays(following[next - 1]); --next) {
      from_middle = from_middle.Then(following[next - 1]);
    }
    indices[bin] = from_middle.used / from_middle.seconds;
    Stretch whole = Stretch::Of(hazards[bin] * risk, kScale.width[bin]);
    while (count > 0 && whole.Pays(following[count - 1])) whole = whole.Then(following[--count]);
    following[count++] = whole;
  }
  return indices;
}

// ---- life tables ----

void LifeTable::Begin(uint64_t tick, double weight) {
  if (cohorts_.empty() || tick > cohorts_.back().first_tick) {
    cohorts_.push_back(Cohort{tick, static_cast<double>(tick), weight});
    if (cohorts_.size() > kCohortsMax) MergeCohorts();
    return;
  }
  cohorts_.back().weight += weight;
}

void LifeTable::EndByUse(uint64_t born, uint64_t now, double weight) {
  uses_[AgeBin(SecondsBetween(born, now))] += weight;
  End(born, now, weight);
}

void LifeTable::EndUnused(uint64_t born, uint64_t now, double weight) { End(born, now, weight); }

void LifeTable::End(uint64_t born, uint64_t now, double weight) {
  if (Cohort* cohort = CohortOf(born)) cohort->weight = std::max(0.0, cohort->weight - weight);
  const double age = SecondsBetween(born, now);
  ends_[AgeBin(age)] += weight;
  ended_age_[AgeBin(age)] += age * weight;
  ended_weight_ += weight;
  if (ended_weight_ > kFadeWeight) Fade();
}

LifeTable::Cohort* LifeTable::CohortOf(uint64_t born) {
  const auto after = std::upper_bound(cohorts_.begin(), cohorts_.end(), born,
                                      [](uint64_t tick, const Cohort& cohort) { return tick < cohort.first_tick; });
  return after == cohorts_.begin() ? nullptr : &*(after - 1);
}

// Joins the two neighbours whose ages differ least in proportion; empty ones first.
void LifeTable::MergeCohorts() {
  const double now = cohorts_.back().mean_tick;
  size_t best = 0;
  double best_ratio = std::numeric_limits<double>::infinity();
  for (size_t at = 0; at + 2 < cohorts_.size(); ++at) {
    const bool is_empty = cohorts_[at].weight <= 0 || cohorts_[at + 1].weight <= 0;
    const double ratio = is_empty ? 0 : (now - cohorts_[at].mean_tick) / (now - cohorts_[at + 1].mean_tick);
    if (ratio < best_ratio) {
      best_ratio = ratio;
      best = at;
    }
  }
  Cohort& kept = cohorts_[best];
  const Cohort& joined = cohorts_[best + 1];
  const double weight = kept.weight + joined.weight;
  if (weight > 0) kept.mean_tick += (joined.mean_tick - kept.mean_tick) * joined.weight / weight;
  kept.weight = weight;
  cohorts_.erase(cohorts_.begin() + static_cast<std::ptrdiff_t>(best) + 1);
}

void LifeTable::Fade() {
  for (Bins* bins : {&uses_, &ends_, &ended_age_}) {
    for (double& value : *bins) value /= 2;
  }
  ended_weight_ /= 2;
}

void LifeTable::Sum(uint64_t now, Bins* uses, Bins* exposure) const {
  *uses = uses_;
  Bins ends = ends_;
  Bins age_sum = ended_age_;
  int bin = kAgeBins - 1;
  for (const Cohort& cohort : cohorts_) {  // the oldest first
    const double age = std::max(0.0, (static_cast<double>(now) - cohort.mean_tick) / kTicksPerSecond);
    while (kScale.edge[bin] > age) --bin;
    ends[bin] += cohort.weight;
    age_sum[bin] += age * cohort.weight;
  }
  double later = 0;
  for (bin = kAgeBins - 1; bin >= 0; --bin) {
    (*exposure)[bin] = later * kScale.width[bin] + std::max(0.0, age_sum[bin] - kScale.edge[bin] * ends[bin]);
    later += ends[bin];
  }
}

size_t LifeTable::bytes() const { return sizeof(*this) + cohorts_.capacity() * sizeof(Cohort); }

void LifeTable::Save(std::string* bytes) const {
  Put(bytes, uses_);
  Put(bytes, ends_);
  Put(bytes, ended_age_);
  Put(bytes, ended_weight_);
  Put(bytes, static_cast<uint32_t>(cohorts_.size()));
  for (const Cohort& cohort : cohorts_) {
    Put(bytes, cohort.first_tick);
    Put(bytes, cohort.mean_tick);
  }
}

void LifeTable::Load(SavedBytes* bytes, int64_t shift) {
  TakeAmounts(bytes, &uses_);
  TakeAmounts(bytes, &ends_);
  TakeAmounts(bytes, &ended_age_);
  ended_weight_ = TakeAmount(bytes);
  const auto count = bytes->Take<uint32_t>();
  if (count > kCohortsMax) throw std::invalid_argument("a saved life table has too many cohorts");
  uint64_t previous_tick = 0;
  for (uint32_t at = 0; at < count; ++at) {
    const auto first_tick = bytes->Take<uint64_t>();
    const double mean_tick = TakeAmount(bytes);
    if (first_tick < previous_tick || first_tick > kTickMax || mean_tick > static_cast<double>(kTickMax)) {
      throw std::invalid_argument("the cohorts of a saved life table are in no order");
    }
    previous_tick = first_tick;
    cohorts_.push_back(Cohort{ShiftedTick(first_tick, shift), std::max(0.0, mean_tick + static_cast<double>(shift)), 0});
  }
}

void LifeTable::Restore(uint64_t tick, double weight) {
  if (Cohort* cohort = CohortOf(tick)) cohort->weight += weight;
}

// ---- histories ----

SurvivalPolicy::SurvivalPolicy(uint32_t block_tokens, uint32_t prefix_blocks, HitWorth worth)
    : worth_(worth),
      block_units_(block_tokens / kUnitTokens),
      block_depths_(static_cast<double>(block_tokens) / kEvenTokens),
      prefix_blocks_(prefix_blocks),
      queues_(static_cast<size_t>(kKinds) * kNews),
      kinds_(kKinds) {
  for (std::unique_ptr<Rehearsal>& rehearsal : rehearsals_) rehearsal = std::make_unique<Rehearsal>(this, prefix_blocks);
  const size_t steps = worth == HitWorth::kFlops ? kCostSteps : 1;
  for (std::vector<Offer>& offers : offers_) offers.resize(steps * queues_.size());
}

SurvivalPolicy::~SurvivalPolicy() = default;

uint16_t SurvivalPolicy::QueueOf(uint16_t accesses, float gap, const Access& access) const {
  const uint32_t new_blocks = access.prompt_blocks - std::min(access.prompt_blocks, access.known_blocks);
  const int news = PowerOfTwo(new_blocks * block_units_ + 1, kNews - 1);
  int kind = kKindSeenOnce;
  if (accesses > 1) {
    const int count = std::min(kCounts - 1, static_cast<int>(2 * std::log2(static_cast<double>(accesses))) - 2);
    const int gaps = std::min(kGaps - 1, static_cast<int>(0.7 * std::log2(static_cast<double>(gap) + 1)));
    kind = 1 + count * kGaps + gaps;
  }
  return static_cast<uint16_t>(kind * kNews + news);
}

// A long prompt is many blocks but one event: each of its blocks counts for less.
float SurvivalPolicy::WeightOf(const Access& access) const {
  const double prompt_units = std::max(kPromptUnitsMin, access.prompt_blocks * block_units_);
  return static_cast<float>(block_units_ * std::pow(prompt_units, -kPromptDamping));
}

History SurvivalPolicy::First(const Access& access) const {
  History history;
  history.tick = access.tick;
  history.accesses = 1;
  history.queue = QueueOf(1, -1, access);
  history.weight = WeightOf(access);
  return history;
}

History SurvivalPolicy::Again(const History& before, const Access& access) const {
  const double seconds = SecondsBetween(before.tick, access.tick);
  History history = before;
  history.tick = std::max(before.tick, access.tick);
  history.gap = static_cast<float>(before.gap < 0 ? seconds : (before.gap + seconds) / 2);
  if (history.accesses < UINT16_MAX) ++history.accesses;
  history.queue = QueueOf(history.accesses, history.gap, access);
  history.weight = WeightOf(access);
  return history;
}

History SurvivalPolicy::Onward(const History& before, const Access& access) const {
  History history = before;
  history.tick = std::max(before.tick, access.tick);
  history.queue = QueueOf(history.accesses, history.gap, access);
  return history;
}

History SurvivalPolicy::Begin(History history, uint32_t blocks) {
  Open(history.queue).lives.Begin(history.tick, static_cast<double>(history.weight) * blocks);
  RefreshNext(history.tick);
  return history;
}

History SurvivalPolicy::Born(const Access& access, uint32_t blocks) { return Begin(First(access), blocks); }

History SurvivalPolicy::Accessed(const History& before, const Access& access, uint32_t blocks) {
  return Revived(before, access, blocks, blocks);
}

History SurvivalPolicy::Revived(const History& before, const Access& access, uint32_t remembered, uint32_t blocks) {
  Open(before.queue).lives.EndByUse(before.tick, access.tick, static_cast<double>(before.weight) * remembered);
  return Begin(Again(before, access), blocks);
}

History SurvivalPolicy::Renewed(const History& before, const Access& access, uint32_t blocks) {
  Open(before.queue).lives.EndUnused(before.tick, access.tick, static_cast<double>(before.weight) * blocks);
  return Begin(Onward(before, access), blocks);
}

History SurvivalPolicy::Hinted(const History& before, const Hint& hint, uint32_t blocks) {
  Open(before.queue).lives.EndUnused(before.tick, hint.tick, static_cast<double>(before.weight) * blocks);
  const int kind = hint.ended ? kKindEnded : kKindExpected + PowerOfTwo(hint.seconds + 1, kExpected - 1);
  History history = before;
  history.tick = std::max(before.tick, hint.tick);
  history.queue = static_cast<uint16_t>(kind * kNews);
  return Begin(history, blocks);
}

void SurvivalPolicy::Forgotten(const History& history, uint64_t now, uint32_t blocks) {
  Open(history.queue).lives.EndUnused(history.tick, now, static_cast<double>(history.weight) * blocks);
}

// ---- rehearsing ----

void SurvivalPolicy::LookedUp(const Prefixes& prefixes, const Access& access, const uint32_t (&found)[2]) {
  for (int tier = 0; tier < 2; ++tier) rehearsals_[tier]->Look(prefixes, access, found[tier]);
}

void SurvivalPolicy::Stored(const Prefixes& prefixes, size_t found, const Access& access) {
  for (std::unique_ptr<Rehearsal>& rehearsal : rehearsals_) rehearsal->Store(prefixes, found, access);
}

void SurvivalPolicy::Full(int tier, uint32_t blocks) { rehearsals_[tier]->SetCapacity(blocks); }

// ---- what the tables tell ----

int SurvivalPolicy::GroupOf(int kind) {
  if (kind == kKindSeenOnce) return 0;
  if (kind < kKindEnded) return 1 + (kind - 1) / kGaps;
  return kind == kKindEnded ? kGroups - 2 : kGroups - 1;
}

int SurvivalPolicy::RiskGroupOf(int kind) {
  if (kind >= kKindEnded) return kRiskGroups - 1;
  return std::min(GroupOf(kind), kRiskGroups - 1);
}

SurvivalPolicy::Queue& SurvivalPolicy::Open(uint16_t queue) {
  std::unique_ptr<Queue>& opened = queues_[queue];
  if (!opened) {
    opened = std::make_unique<Queue>();
    opened_.push_back(queue);
    Refresh(queue, refreshed_tick_);
  }
  return *opened;
}

// The tables move slowly, so a request pays for one queue and not for all.
void SurvivalPolicy::RefreshNext(uint64_t now) {
  if (now == refreshed_tick_) return;
  refreshed_tick_ = now;
  next_refresh_ = (next_refresh_ + 1) % opened_.size();
  Refresh(opened_[next_refresh_], now);
}

// Brings the totals up to date with what the queue has seen since it was last looked at.
void SurvivalPolicy::Recount(uint16_t queue, uint64_t now) {
  Queue& own = *queues_[queue];
  const int kind = KindOf(queue);
  Bins uses;
  Bins exposure;
  own.lives.Sum(now, &uses, &exposure);
  for (Totals* totals : {&all_, &groups_[static_cast<size_t>(GroupOf(kind))], &kinds_[static_cast<size_t>(kind)]}) {
    for (int bin = 0; bin < kAgeBins; ++bin) {
      totals->uses[bin] = std::max(0.0, totals->uses[bin] + uses[bin] - own.uses[bin]);
      totals->exposure[bin] = std::max(0.0, totals->exposure[bin] + exposure[bin] - own.exposure[bin]);
    }
  }
  own.uses = uses;
  own.exposure = exposure;
}

double SurvivalPolicy::Prior(int kind, int bin, double general) const {
  if (kind == kKindEnded) return kEndedRisk * general;
  if (kind < kKindExpected) return general;
  const double seconds = std::ldexp(1.0, kind - kKindExpected);
  const double age = kScale.edge[bin] + kScale.width[bin] / 2;
  return age < seconds / 2 || age > seconds * 4 ? general : std::max(general, 1 / seconds);
}

// Uses per second at each age, of blocks of one kind.
Bins SurvivalPolicy::Hazards(int kind) const {
  const Totals& group = groups_[static_cast<size_t>(GroupOf(kind))];
  const Totals& own = kinds_[static_cast<size_t>(kind)];
  double uses = 1;
  double exposure = 1;
  for (int bin = 0; bin < kAgeBins; ++bin) {
    uses += all_.uses[bin];
    exposure += all_.exposure[bin];
  }
  Bins hazards;
  double general = uses / exposure;  // at ages that nothing has reached, that of the last ones that something has
  for (int bin = 0; bin < kAgeBins; ++bin) {
    general = (all_.uses[bin] + 1) / (all_.exposure[bin] + 1 / general);
    const double prior = Prior(kind, bin, general);
    const double shared = (group.uses[bin] + kPriorUses) / (group.exposure[bin] + kPriorUses / prior);
    hazards[bin] = (own.uses[bin] + kPriorUses) / (own.exposure[bin] + kPriorUses / shared);
  }
  return hazards;
}

void SurvivalPolicy::Refresh(uint16_t queue, uint64_t now) {
  Recount(queue, now);
  Queue& own = *queues_[queue];
  const Bins hazards = Hazards(KindOf(queue));
  double uses = 0;
  double expected = 0;
  for (int bin = 0; bin < kAgeBins; ++bin) {
    uses += own.uses[bin];
    expected += own.exposure[bin] * hazards[bin];
  }
  // How much likelier this queue is used again than its kind; at first as much as others with as many new tokens.
  const auto row = static_cast<size_t>(RiskGroupOf(KindOf(queue)));
  const auto column = static_cast<size_t>(queue % kNews);
  double& risk_expected = risk_expected_[row][column];
  double& risk_uses = risk_uses_[row][column];
  risk_expected = std::max(0.0, risk_expected + expected - own.expected_uses);
  own.expected_uses = expected;
  risk_uses = std::max(0.0, risk_uses + uses - own.total_uses);
  own.total_uses = uses;
  const double shared = (risk_uses + kPriorRiskUses) / (risk_expected + kPriorRiskUses);
  const double risk = (uses + kPriorQueueUses * shared) / (expected + kPriorQueueUses);
  const Bins indices = GittinsIndices(hazards, risk);
  for (size_t bin = 0; bin < kAgeBins; ++bin) own.index[bin] = static_cast<float>(indices[bin]);
}

double SurvivalPolicy::IndexOf(uint16_t queue, double seconds) const {
  const std::unique_ptr<Queue>& own = queues_[queue];
  return own ? static_cast<double>(own->index[static_cast<size_t>(AgeBin(seconds))]) : 0;
}

double SurvivalPolicy::ValueOf(const History& history, uint32_t depth, uint64_t now) const {
  if (rehearsals_[0]->prefers_recency()) return 1 / (1 + SecondsBetween(history.tick, now));
  return IndexOf(history.queue, SecondsBetween(history.tick, now)) * kStepCosts[CostStepOf(depth)];
}

size_t SurvivalPolicy::CostStepOf(uint32_t depth) const {
  if (worth_ == HitWorth::kBlocks) return 0;
  return std::min(kCostSteps - 1, static_cast<size_t>(2 * std::log2(1 + depth * block_depths_)));
}

uint16_t SurvivalPolicy::QueueAt(const History& history, uint32_t depth) const {
  return static_cast<uint16_t>(CostStepOf(depth) * queues_.size() + history.queue);
}

// ---- choosing ----

// The index rises and falls once at most over the ages in a queue, as good as always: its lowest is at one of the ends.
SurvivalPolicy::Offer SurvivalPolicy::BestOf(const Candidates& candidates, uint16_t queue, uint64_t now) const {
  const QueueEnd oldest = candidates.First(queue);
  const QueueEnd newest = candidates.Last(queue);
  const auto of_history = static_cast<uint16_t>(queue % queues_.size());
  const double cost = kStepCosts[queue / queues_.size()];
  const double of_oldest = IndexOf(of_history, SecondsBetween(oldest.rank, now)) * cost;
  const double of_newest = IndexOf(of_history, SecondsBetween(newest.rank, now)) * cost;
  Offer offer;
  offer.version = candidates.Version(queue);
  offer.node = of_newest < of_oldest ? newest.node : oldest.node;
  offer.index = static_cast<float>(std::min(of_oldest, of_newest));
  return offer;
}

// What was said to be over goes first all the same.
uint32_t SurvivalPolicy::LeastRecent(const Candidates& candidates) const {
  QueueEnd best;
  for (uint16_t queue : candidates.open_queues()) {
    const QueueEnd first = candidates.First(queue);
    if (KindOf(static_cast<uint16_t>(queue % queues_.size())) == kKindEnded) return first.node;
    if (best.node == kNone || first.rank < best.rank) best = first;
  }
  return best.node;
}

uint32_t SurvivalPolicy::Choose(const Candidates& candidates, int tier, uint64_t now) {
  if (rehearsals_[tier]->prefers_recency()) return LeastRecent(candidates);
  std::vector<Offer>& offers = offers_[tier];
  if (offers_tick_[tier] != now) {
    for (Offer& offer : offers) offer.version = 0;
    offers_tick_[tier] = now;
  }
  const Offer* best = nullptr;
  for (uint16_t queue : candidates.open_queues()) {
    Offer& offer = offers[queue];
    if (offer.version != candidates.Version(queue)) offer = BestOf(candidates, queue, now);
    if (best == nullptr || offer.index < best->index) best = &offer;
  }
  return best == nullptr ? kNone : best->node;
}

// ---- saving ----

// The first piece is the version, then one of each queue, with what was derived from its table when it was last looked at,
// so that the order of victims is what it was; then those of the rehearsals.
uint32_t SurvivalPolicy::piece_count() const {
  return 1 + static_cast<uint32_t>(opened_.size()) + rehearsals_[0]->piece_count() + rehearsals_[1]->piece_count();
}

void SurvivalPolicy::Save(uint32_t piece, std::string* bytes) const {
  if (piece == 0) {
    Put(bytes, kSavedVersion);
    return;
  }
  piece -= 1;
  if (piece >= opened_.size()) {
    piece -= static_cast<uint32_t>(opened_.size());
    const uint32_t of_first = rehearsals_[0]->piece_count();
    const size_t tier = piece < of_first ? 0 : 1;
    rehearsals_[tier]->Save(tier == 0 ? piece : piece - of_first, kRehearsalMarks[tier], bytes);
    return;
  }
  const uint16_t queue = opened_[piece];
  const Queue& own = *queues_[queue];
  Put(bytes, queue);
  own.lives.Save(bytes);
  Put(bytes, own.total_uses);
  Put(bytes, own.expected_uses);
  Put(bytes, own.index);
}

std::unique_ptr<SurvivalPolicy::Queue> SurvivalPolicy::TakeQueue(SavedBytes* pieces, int64_t shift) {
  auto queue = std::make_unique<Queue>();
  queue->lives.Load(pieces, shift);
  queue->total_uses = TakeAmount(pieces);
  queue->expected_uses = TakeAmount(pieces);
  for (float& value : queue->index) {
    value = pieces->Take<float>();
    if (!std::isfinite(value) || value < 0) throw std::invalid_argument("a saved index is below 0");
  }
  return queue;
}

void SurvivalPolicy::Load(SavedBytes pieces, int64_t shift) {
  const auto version = pieces.Take<uint32_t>();
  if (version != kSavedVersion) {
    throw std::invalid_argument("life tables have version " + std::to_string(version) + ", expected " +
                                std::to_string(kSavedVersion));
  }
  std::vector<std::unique_ptr<Queue>> loaded(queues_.size());
  std::vector<uint16_t> opened;
  std::unique_ptr<Rehearsal> rehearsals[2];
  for (auto& rehearsal : rehearsals) rehearsal = std::make_unique<Rehearsal>(this, prefix_blocks_);
  while (!pieces.empty()) {
    const auto mark = pieces.Take<uint16_t>();
    if (mark >= kRehearsalMarks[0]) {
      Rehearsal& rehearsal = *rehearsals[mark >= kRehearsalMarks[1]];
      const bool is_unit = mark % 2 != 0;
      is_unit ? rehearsal.LoadUnit(&pieces, shift) : rehearsal.LoadCounts(&pieces);
      continue;
    }
    if (mark >= loaded.size() || loaded[mark]) {
      throw std::invalid_argument("a life table is of queue " + std::to_string(mark) + ", which is twice there or none");
    }
    loaded[mark] = TakeQueue(&pieces, shift);
    opened.push_back(mark);
  }
  for (size_t tier = 0; tier < 2; ++tier) {
    rehearsals[tier]->Resume();
    rehearsals_[tier].swap(rehearsals[tier]);
  }
  Forget();
  queues_.swap(loaded);
  opened_.swap(opened);
  for (uint16_t queue : opened_) {
    Recount(queue, 0);
    const auto row = static_cast<size_t>(RiskGroupOf(KindOf(queue)));
    const auto column = static_cast<size_t>(queue % kNews);
    risk_uses_[row][column] += queues_[queue]->total_uses;
    risk_expected_[row][column] += queues_[queue]->expected_uses;
  }
}

void SurvivalPolicy::Forget() {
  next_refresh_ = 0;
  all_ = Totals{};
  groups_.fill(Totals{});
  kinds_.assign(kinds_.size(), Totals{});
  for (auto& row : risk_uses_) row.fill(0);
  for (auto& row : risk_expected_) row.fill(0);
  for (std::vector<Offer>& offers : offers_) offers.assign(offers.size(), Offer{});
}

void SurvivalPolicy::Restored(const History& history, uint32_t blocks) {
  Open(history.queue).lives.Restore(history.tick, static_cast<double>(history.weight) * blocks);
}

void SurvivalPolicy::Resume(uint64_t now) {
  for (uint16_t queue : opened_) Recount(queue, now);
}

size_t SurvivalPolicy::bytes() const {
  size_t bytes = sizeof(*this) + queues_.size() * sizeof(queues_[0]) + kinds_.size() * sizeof(Totals) +
                 2 * offers_[0].size() * sizeof(Offer) + opened_.capacity() * sizeof(uint16_t);
  for (const std::unique_ptr<Rehearsal>& rehearsal : rehearsals_) bytes += rehearsal->bytes();
  for (uint16_t queue : opened_) bytes += sizeof(Queue) + queues_[queue]->lives.bytes();
  return bytes;
}

}  // namespace kvstore
