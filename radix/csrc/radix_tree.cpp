#include "radix_tree.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "audit.h"
#include "mix.h"

namespace kvstore {

namespace {

constexpr uint32_t kFingerprintTokens = 128;
constexpr double kNearlyEqual = 1.01;
constexpr size_t kCompareBytes = 4096;  // what one memcmp spans while a prompt still agrees with an edge
constexpr size_t kRootEntryBytes = 56;  // a node and a bucket of the map of roots
constexpr size_t kDetachedEntryBytes = 112;  // the same of the map of detached blocks

}  // namespace

size_t RadixTree::KeyHash::operator()(const Key128& key) const {
  uint64_t low;
  uint64_t high;
  std::memcpy(&low, key.bytes, sizeof(low));
  std::memcpy(&high, key.bytes + sizeof(low), sizeof(high));
  return static_cast<size_t>(Mix(Mix(low ^ seed, kMixFactor) ^ high, kMixFactor));
}

bool RadixTree::KeyEqual::operator()(const Key128& left, const Key128& right) const {
  return std::memcmp(left.bytes, right.bytes, sizeof(left.bytes)) == 0;
}

RadixTree::RadixTree(uint32_t block_tokens, const Key128& ns_key, uint64_t hash_seed, uint32_t hash_bits,
                     const std::string& policy, Limits limits)
    : block_tokens_(block_tokens),
      ns_key_(ns_key),
      hash_seed_(hash_seed),
      tag_mask_(static_cast<uint32_t>((1ULL << std::min(hash_bits, 32u)) - 1)),
      limits_(limits),
      roots_(0, KeyHash{hash_seed}),
      policy_name_(policy),
      policy_(MakePolicy(policy, block_tokens, std::max(1u, kFingerprintTokens / std::max(1u, block_tokens)))),
      fingerprint_blocks_(std::max(1u, kFingerprintTokens / std::max(1u, block_tokens))),
      remembers_(policy_->ghost_ratio() > 0),
      victims_{VictimQueues(&nodes_, 0), VictimQueues(&nodes_, 1)} {
  if (block_tokens == 0) throw std::invalid_argument("block_tokens is 0, expected at least 1");
  if (hash_bits > 32) throw std::invalid_argument("hash_bits is above 32");
  if (limits.slice_blocks == 0 || limits.edge_blocks == 0) {
    throw std::invalid_argument("slice_blocks or edge_blocks is 0, expected at least 1");
  }
}

RadixTree::~RadixTree() = default;

size_t RadixTree::memory_bytes() const {
  return sizeof(*this) + blocks_.bytes() + nodes_.bytes() + edge_bytes_ + children_.bytes() + victims_[0].bytes() +
         victims_[1].bytes() + (root_count() + condemned_root_count()) * kRootEntryBytes +
         detached_.size() * (kDetachedEntryBytes + block_tokens_ * sizeof(uint32_t));
}

size_t RadixTree::policy_bytes() const { return policy_->bytes() + ghosts_.bytes(); }

// ---- what callers ask for ----

Ids RadixTree::Match(const Key128& root, TokenSpan tokens) const {
  const std::shared_lock lock(shape_mutex_);
  return FindCommitted(root, tokens);
}

std::optional<Ids> RadixTree::TryMatch(const Key128& root, TokenSpan tokens) const {
  const std::shared_lock lock(shape_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return std::nullopt;
  return FindCommitted(root, tokens);
}

Ids RadixTree::Slots(IdSpan ids, int64_t tier) const {
  const int index = CheckTier(tier);
  CheckIds(ids);
  Ids slots(ids.size);
  for (size_t i = 0; i < ids.size; ++i) slots[i] = blocks_[ids[i]].slot[index];
  return slots;
}

size_t RadixTree::Leading(IdSpan ids, int64_t tier) const {
  const int index = CheckTier(tier);
  CheckIds(ids);
  size_t count = 0;
  while (count < ids.size && blocks_[ids[count]].slot[index] != kNone) ++count;
  return count;
}

void RadixTree::Lease(IdSpan ids) {
  CheckIds(ids);
  AddHolds(ids);
}

// Blocks that come into a tier, or stay in it after all. Those of one prefix come in a row, so a node is brought up to date
// once, when the next one begins.
class RadixTree::Arrivals {
 public:
  Arrivals(RadixTree& tree, int tier) : tree_(tree), tier_(tier) {}

  void Add(const Block& block) {
    if (block.node != node_) Settle();
    node_ = block.node;
    ++count_;
    end_ = std::max(end_, block.depth + 1);
  }
  // REQUIRES: the node of the last one is still there.
  void Settle() {
    if (count_ > 0) tree_.BecomeResident(node_, tier_, count_, end_);
    count_ = end_ = 0;
  }

 private:
  RadixTree& tree_;
  const int tier_;
  uint32_t node_ = kNone;
  uint32_t count_ = 0;
  uint32_t end_ = 0;
};

Removed RadixTree::Release(IdSpan ids) {
  TakeHolds(ids);
  Removed removed;
  const bool was_condemned = condemned();
  std::unique_lock lock(shape_mutex_, std::defer_lock);  // most releases change no shape
  uint32_t refreshed = kNone;
  for (uint32_t id : ids) {
    const Block* block = FindUsed(id);
    if (block == nullptr || block->holds > 0) continue;
    const bool leaves = block->staged() || block->state == BlockState::kDetached;
    if (leaves && !lock.owns_lock()) lock.lock();
    if (block->state == BlockState::kDetached) {
      if (!block->in_use()) FreeDetached(id, &removed);
    } else if (block->staged()) {
      if (!IsCondemned(block->node)) Cut(id, &removed);  // never committed, and nobody is left who might
      refreshed = kNone;
    } else if (block->node != refreshed) {
      refreshed = block->node;
      Refresh(refreshed);
    }
  }
  if (!was_condemned) ReapSome(limits_.slice_blocks, &removed);
  steps_ += ids.size;
  return removed;
}

Staged RadixTree::Stage(const Key128& root, TokenSpan tokens, int64_t from_block, uint64_t tick) {
  if (from_block < 0) throw std::invalid_argument("from_block is negative");
  CheckTick(tick);
  Staged staged;
  Cursor cursor = StartAt(FindRoot(root), tokens);
  while (Descend(&cursor)) {
    const Ids& ids = nodes_[cursor.node].ids;
    staged.ids.insert(staged.ids.end(), ids.begin(), ids.begin() + cursor.taken);
  }
  staged.existing_blocks = cursor.depth;
  steps_ += cursor.block_count;
  if (cursor.depth < from_block) {
    staged.ids.clear();
    return staged;
  }
  last_tick_ = std::max(last_tick_, tick);
  AddHolds(IdSpan{staged.ids.data(), staged.ids.size()});
  if (cursor.depth < cursor.block_count) {
    const std::unique_lock lock(shape_mutex_);
    if (cursor.node == kNone) cursor.node = NewRoot(root);
    const Births births = PlanBirths(cursor, staged.ids, tick);
    Insert(cursor, births, &staged.ids);
  } else {
    PlanBirths(cursor, staged.ids, tick);  // of none, but it is the latest that touched the others
  }
  return staged;
}

std::vector<uint8_t> RadixTree::Place(IdSpan ids, int64_t tier, IdSpan slots) {
  const int index = CheckTier(tier);
  CheckIds(ids);
  if (ids.size != slots.size) throw std::invalid_argument("ids and slots differ in length");
  if (std::find(slots.begin(), slots.end(), kNoSlot) != slots.end()) {
    throw std::invalid_argument("a slot to place is NO_SLOT");
  }
  std::vector<uint8_t> placed(ids.size);
  const std::unique_lock lock(shape_mutex_);
  Arrivals arrivals{*this, index};
  uint32_t node_id = kNone;
  bool is_condemned = false;
  for (size_t i = 0; i < ids.size; ++i) {
    Block& block = blocks_[ids[i]];
    if (block.state != BlockState::kAttached || block.slot[index] != kNoSlot) continue;
    if (block.node != node_id) {
      node_id = block.node;
      is_condemned = IsCondemned(node_id);
    }
    if (is_condemned) continue;
    if (block.staged()) --nodes_[node_id].staged;
    block.slot[index] = slots[i];
    ++tier_blocks_[index];
    BlockChanged(ids[i]);
    arrivals.Add(block);
    placed[i] = 1;
  }
  arrivals.Settle();
  steps_ += ids.size;
  return placed;
}

std::optional<double> RadixTree::VictimValue(int64_t tier, uint64_t tick) {
  CheckTick(tick);
  const int index = CheckTier(tier);
  last_tick_ = std::max(last_tick_, tick);
  const uint32_t node_id = ChooseVictim(index);
  if (node_id == kNone) return std::nullopt;
  return NextVictimValue(node_id, index);
}

double RadixTree::ValueOf(uint32_t id, uint64_t tick) { return Values(IdSpan{&id, 1}, tick).front(); }

std::vector<double> RadixTree::Values(IdSpan ids, uint64_t tick) {
  CheckTick(tick);
  CheckIds(ids);
  last_tick_ = std::max(last_tick_, tick);
  std::vector<double> values(ids.size);
  for (size_t i = 0; i < ids.size; ++i) {
    const Block& block = blocks_[ids[i]];
    if (block.state != BlockState::kAttached || IsCondemned(block.node)) continue;
    values[i] = policy_->ValueOf(nodes_[block.node].runs.At(block.depth), block.depth, last_tick_);
  }
  return values;
}

std::vector<uint16_t> RadixTree::Uses(IdSpan ids) const {
  CheckIds(ids);
  std::vector<uint16_t> uses(ids.size);
  for (size_t i = 0; i < ids.size; ++i) {
    const Block& block = blocks_[ids[i]];
    if (block.state != BlockState::kAttached || IsCondemned(block.node)) continue;
    uses[i] = nodes_[block.node].runs.At(block.depth).accesses;
  }
  return uses;
}

std::vector<uint8_t> RadixTree::Carries(IdSpan ids, int64_t tier) {
  const int index = CheckTier(tier);
  CheckIds(ids);
  std::vector<uint8_t> carries(ids.size);
  for (size_t i = 0; i < ids.size; ++i) {
    const Block& block = blocks_[ids[i]];
    if (block.state != BlockState::kAttached || IsCondemned(block.node)) continue;
    Node& node = nodes_[block.node];
    carries[i] = node.below[index] > 0 ||
                 (node.resident[index] > 0 && blocks_[LastResident(&node, index)].depth > block.depth);
  }
  return carries;
}

Ids RadixTree::Parents(IdSpan ids) const {
  CheckIds(ids);
  Ids parents(ids.size, kNone);
  for (size_t i = 0; i < ids.size; ++i) {
    const Block& block = blocks_[ids[i]];
    if (block.state != BlockState::kAttached || IsCondemned(block.node)) continue;
    const Node& node = nodes_[block.node];
    if (block.depth > node.depth) {
      parents[i] = node.ids[block.depth - node.depth - 1];
    } else if (const Node& above = nodes_[node.parent]; !above.ids.empty()) {
      parents[i] = above.ids.back();
    }
  }
  return parents;
}

Ids RadixTree::TakeVictims(int64_t tier, int64_t limit, double worth) {
  const int index = CheckTier(tier);
  const size_t limit_blocks = CheckLimit(limit);
  if (std::isnan(worth)) throw std::invalid_argument("worth is not a number");
  Ids victims;
  policy_->Full(index, tier_blocks_[index]);
  while (victims.size() < limit_blocks) {
    const uint32_t node_id = ChooseVictim(index);
    if (node_id == kNone || NextVictimValue(node_id, index) > worth * kNearlyEqual) break;
    TakeRun(node_id, index, limit_blocks - victims.size(), &victims);
  }
  return victims;
}

Removed RadixTree::Evict(IdSpan ids, int64_t tier) {
  const int index = CheckTier(tier);
  CheckIds(ids);
  const std::unique_lock lock(shape_mutex_);
  Removed removed;
  Ids displaced;
  std::vector<uint64_t> last_copies;  // depth, then id
  Arrivals stayed{*this, index};
  for (uint32_t id : ids) {
    if (FindUsed(id) == nullptr) continue;  // named twice, and gone by now
    Block& block = blocks_[id];
    if (!block.leaves(index)) {
      ++removed.kept;
      continue;
    }
    block.leaving &= ~(1u << index);
    const bool is_attached = block.state == BlockState::kAttached;
    const bool goes_anyway = is_attached && IsCondemned(block.node);
    if (is_attached && !goes_anyway && block.holds == 0 && block.slot[1 - index] != kNoSlot) {
      removed.slots[index].push_back(std::exchange(block.slot[index], kNoSlot));
      --tier_blocks_[index];
      BlockChanged(id);
      displaced.push_back(id);
      continue;
    }
    if (is_attached) stayed.Add(block);
    if (block.holds > 0) {
      ++removed.kept;
    } else if (is_attached) {
      if (!goes_anyway) last_copies.push_back(uint64_t{block.depth} << 32 | id);
    } else if (!block.in_use()) {
      FreeDetached(id, &removed);
    }
  }
  stayed.Settle();
  const std::vector<Key128> keys = Keys(IdSpan{displaced.data(), displaced.size()});
  for (size_t row = 0; row < displaced.size(); ++row) removed.displaced_keys.push_back(keys[2 * row + 1]);
  // The topmost takes its whole subtree along, so a run of victims is one cut. They mostly come deepest first.
  std::reverse(last_copies.begin(), last_copies.end());
  if (!std::is_sorted(last_copies.begin(), last_copies.end())) std::stable_sort(last_copies.begin(), last_copies.end());
  CutAll(Ids(last_copies.begin(), last_copies.end()), &removed);
  steps_ += ids.size;
  return removed;
}

bool RadixTree::PrepareKeys(IdSpan ids) {
  CheckIds(ids);
  const uint64_t steps_max = steps_ + limits_.slice_blocks;
  uint32_t node_id = kNone;
  for (uint32_t id : ids) {
    if (blocks_[id].state != BlockState::kAttached || blocks_[id].node == node_id) continue;
    node_id = blocks_[id].node;
    if (!MakeEndKeys(nodes_[node_id].parent, steps_max)) return false;
  }
  return true;
}

std::vector<Key128> RadixTree::Keys(IdSpan ids) {
  CheckIds(ids);
  std::vector<Key128> keys(2 * ids.size);
  FillAttachedKeys(ids, &keys);
  for (size_t row = 0; row < ids.size; ++row) {
    if (blocks_[ids[row]].state != BlockState::kDetached) continue;
    const Identity& identity = detached_.at(ids[row]);
    keys[2 * row] = identity.parent_key;
    keys[2 * row + 1] = identity.key;
  }
  return keys;
}

Ids RadixTree::Tokens(IdSpan ids) const {
  CheckIds(ids);
  Ids tokens(ids.size * block_tokens_);
  for (size_t row = 0; row < ids.size; ++row) {
    const Block& block = blocks_[ids[row]];
    const bool attached = block.state == BlockState::kAttached;
    const uint32_t* from = attached ? nodes_[block.node].tokens.data() : detached_.at(ids[row]).tokens.data();
    if (attached) from += static_cast<size_t>(block.depth - nodes_[block.node].depth) * block_tokens_;
    std::copy_n(from, block_tokens_, tokens.data() + row * block_tokens_);
  }
  return tokens;
}

Key128 RadixTree::RootOf(uint32_t id) const {
  CheckIds(IdSpan{&id, 1});
  const Block& block = blocks_[id];
  if (block.state == BlockState::kDetached) return detached_.at(id).root;
  return RootKeyOf(block.node);
}

// ---- arguments ----

int RadixTree::CheckTier(int64_t tier) {
  if (tier < 0 || tier >= kTierCount) throw std::invalid_argument("tier " + std::to_string(tier) + " is out of range");
  return static_cast<int>(tier);
}

void RadixTree::CheckTick(uint64_t tick) {
  if (tick > kTickMax) throw std::invalid_argument("tick is " + std::to_string(tick) + ", above 2^48 - 1");
}

size_t RadixTree::CheckLimit(int64_t limit) {
  if (limit < 0) throw std::invalid_argument("limit is negative");
  return static_cast<size_t>(limit);
}

uint32_t RadixTree::CheckFirstId(int64_t first_id) {
  if (first_id < 0 || first_id > kNone) {
    throw std::invalid_argument("first_id is " + std::to_string(first_id) + ", which is no block id");
  }
  return static_cast<uint32_t>(first_id);
}

const Block* RadixTree::FindUsed(uint32_t id) const {
  const Block* block = blocks_.Find(id);
  return block == nullptr || block->state == BlockState::kFree ? nullptr : block;
}

void RadixTree::CheckIds(IdSpan ids) const {
  for (uint32_t id : ids) {
    if (FindUsed(id) == nullptr) {
      throw std::invalid_argument("block id " + std::to_string(id) + " is unknown or was freed");
    }
  }
}

// One hold more on each block, or on none where one of them has as many as can be counted.
void RadixTree::AddHolds(IdSpan ids) {
  for (size_t i = 0; i < ids.size; ++i) {
    if (blocks_[ids[i]].holds == kHoldsMax) {
      while (i-- > 0) --blocks_[ids[i]].holds;
      throw std::invalid_argument("a block is leased " + std::to_string(kHoldsMax) + " times already");
    }
    ++blocks_[ids[i]].holds;
  }
}

// One hold less on each block, or on none where one of them is unknown or has none left.
void RadixTree::TakeHolds(IdSpan ids) {
  for (size_t i = 0; i < ids.size; ++i) {
    if (FindUsed(ids[i]) == nullptr || blocks_[ids[i]].holds == 0) {
      for (size_t taken = 0; taken < i; ++taken) ++blocks_[ids[taken]].holds;
      CheckIds(ids);
      throw std::invalid_argument("a block to release is not leased that often");
    }
    --blocks_[ids[i]].holds;
  }
}

// ---- walking ----

Ids RadixTree::FindCommitted(const Key128& root, TokenSpan tokens) const {
  Ids ids;
  Cursor cursor = StartAt(FindRoot(root), tokens);
  while (Descend(&cursor)) {
    const Node& node = nodes_[cursor.node];
    const uint32_t visible = node.staged == 0 ? cursor.taken : LeadingCommitted(node, cursor.taken);
    ids.insert(ids.end(), node.ids.begin(), node.ids.begin() + visible);
    if (visible < cursor.taken) break;
  }
  matched_steps_.fetch_add(cursor.steps, std::memory_order_relaxed);
  return ids;
}

RadixTree::Cursor RadixTree::StartAt(uint32_t root_node, TokenSpan tokens) const {
  return Cursor{tokens.data, static_cast<uint32_t>(tokens.size / block_tokens_), root_node};
}

// Steps into the child that continues the prompt. False where there is none, or the present node ends the way.
bool RadixTree::Descend(Cursor* cursor) const {
  if (cursor->node == kNone || cursor->depth == cursor->block_count) return false;
  if (cursor->taken < nodes_[cursor->node].block_count()) return false;
  const uint32_t* next = cursor->tokens + static_cast<size_t>(cursor->depth) * block_tokens_;
  const uint32_t child = FindChild(cursor->node, next, &cursor->steps);
  if (child == kNone) return false;
  cursor->node = child;
  cursor->taken = EqualBlocks(nodes_[child], next, cursor->block_count - cursor->depth);
  cursor->depth += cursor->taken;
  cursor->steps += cursor->taken;
  return true;
}

uint32_t RadixTree::FindRoot(const Key128& root) const {
  const auto found = roots_.find(root);
  return found == roots_.end() ? kNone : found->second;
}

// Counts the nodes that it compared in `steps`.
uint32_t RadixTree::FindChild(uint32_t parent, const uint32_t* first_block, uint32_t* steps) const {
  return children_.Find(Tag(parent, first_block), [&](uint32_t child) {
    ++*steps;
    const Node& node = nodes_[child];
    return node.parent == parent &&
           std::memcmp(node.tokens.data(), first_block, block_tokens_ * sizeof(uint32_t)) == 0;
  });
}

// Leading blocks of `node` that are equal to the prompt at `tokens`, of which `limit` blocks are left.
uint32_t RadixTree::EqualBlocks(const Node& node, const uint32_t* tokens, uint32_t limit) const {
  const size_t block_bytes = block_tokens_ * sizeof(uint32_t);
  limit = std::min(limit, node.block_count());
  uint32_t stride = static_cast<uint32_t>(std::max<size_t>(1, kCompareBytes / block_bytes));
  uint32_t equal = 0;
  while (equal < limit) {
    const uint32_t step = std::min(stride, limit - equal);
    const size_t offset = static_cast<size_t>(equal) * block_tokens_;
    if (std::memcmp(node.tokens.data() + offset, tokens + offset, step * block_bytes) == 0) {
      equal += step;
    } else if (step == 1) {
      break;
    } else {
      stride = step / 2;  // the difference lies in this step: close in on it
    }
  }
  return equal;
}

uint32_t RadixTree::LeadingCommitted(const Node& node, uint32_t limit) const {
  uint32_t count = 0;
  while (count < limit && !blocks_[node.ids[count]].staged()) ++count;
  return count;
}

uint32_t RadixTree::Tag(uint32_t parent, const uint32_t* first_block) const {
  const uint64_t hash = MixTokens(parent, hash_seed_, first_block, block_tokens_);
  return static_cast<uint32_t>(hash >> 32 ^ hash) & tag_mask_;
}

// ---- keys ----

uint32_t RadixTree::RootNodeOf(uint32_t node_id) const {
  while (nodes_[node_id].parent != kNone) node_id = nodes_[node_id].parent;
  return node_id;
}

Key128 RadixTree::RootKeyOf(uint32_t node_id) const {
  const uint32_t top = RootNodeOf(node_id);
  const auto found = condemned_.find(top);
  return found == condemned_.end() ? nodes_[top].end_key : found->second;
}

// The key of the node's last block, made from the nearest ancestor whose own is known, and kept.
Key128 RadixTree::EndKeyOf(uint32_t node_id) {
  MakeEndKeys(node_id, UINT64_MAX);
  return nodes_[node_id].end_key;
}

// Makes the keys at the end of the node and of all above it, topmost first. False where the steps did not suffice.
bool RadixTree::MakeEndKeys(uint32_t node_id, uint64_t steps_max) {
  Ids unknown;
  for (uint32_t at = node_id; !nodes_[at].has_end_key; at = nodes_[at].parent) unknown.push_back(at);
  for (auto at = unknown.rbegin(); at != unknown.rend(); ++at) {
    if (steps_ >= steps_max) return false;
    Node& node = nodes_[*at];
    node.end_key = ChainThrough(node, 0, node.block_count(), nodes_[node.parent].end_key);
    node.has_end_key = true;
  }
  return true;
}

// The key of the node's block `count - 1`, or the one before the node where `count` is 0. Keeps marks on the way, so
// that the next key hereabouts costs less than kMarkBlocks hashes.
Key128 RadixTree::KeyAfter(uint32_t node_id, uint32_t count) {
  Node& node = nodes_[node_id];
  if (count == node.block_count() && node.has_end_key) return node.end_key;
  uint32_t at = std::min(node.mark_count(), count / kMarkBlocks) * kMarkBlocks;
  Key128 key = at > 0 ? (*node.marks)[at / kMarkBlocks - 1] : KeyBefore(node_id);
  if (at + kMarkBlocks <= count) {
    AccountEdge(node_id, -1);
    if (!node.marks) node.marks = std::make_unique<std::vector<Key128>>();
    for (; at + kMarkBlocks <= count; at += kMarkBlocks) {
      key = ChainThrough(node, at, at + kMarkBlocks, key);
      node.marks->push_back(key);
    }
    node.marks->shrink_to_fit();
    AccountEdge(node_id, 1);
  }
  return ChainThrough(node, at, count, key);
}

Key128 RadixTree::ChainThrough(const Node& node, uint32_t from, uint32_t to, Key128 key) const {
  if (to > from) steps_ += to - from;
  for (uint32_t at = from; at < to; ++at) {
    key = BlockKey(ns_key_.bytes, key, node.tokens.data() + static_cast<size_t>(at) * block_tokens_, block_tokens_);
  }
  return key;
}

// In the order of the edges each key is made once, whatever the order of `ids`.
void RadixTree::FillAttachedKeys(IdSpan ids, std::vector<Key128>* keys) {
  std::vector<std::pair<uint64_t, size_t>> order;
  order.reserve(ids.size);
  for (size_t row = 0; row < ids.size; ++row) {
    const Block& block = blocks_[ids[row]];
    if (block.state != BlockState::kAttached) continue;
    order.emplace_back(static_cast<uint64_t>(block.node) << 32 | block.depth, row);
  }
  std::sort(order.begin(), order.end());
  uint32_t node_id = kNone;
  uint32_t done = 0;  // blocks of the node that `key` covers
  Key128 parent_key{};
  Key128 key{};
  for (const auto& [place, row] : order) {
    const Block& block = blocks_[ids[row]];
    if (block.node != node_id) {
      node_id = block.node;
      done = 0;
    }
    const Node& node = nodes_[node_id];
    const uint32_t index = block.depth - node.depth;
    if (index >= done) {  // else it is the block of the row before, named twice
      parent_key = done == index && done > 0 ? key : KeyAfter(node_id, index);
      key = ChainThrough(node, index, index + 1, parent_key);
      done = index + 1;
    }
    (*keys)[2 * row] = parent_key;
    (*keys)[2 * row + 1] = key;
  }
}

}  // namespace kvstore
