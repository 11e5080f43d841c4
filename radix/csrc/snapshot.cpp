// Saving what the eviction policy knows, in slices, and taking it up again in another process.
//
// A snapshot names no blocks that exist: what does, the disk tells. It has three parts, values little-endian:
//   tables  what the policy has learnt, in its own form
//   runs    for each: the key of its first block (16 bytes), its history (24), where `end` is the number of its blocks
//   ghosts  the mask that thins them out (8), then for each: the fingerprint (8), its history (24); the oldest first
// A history is tick (8), gap (4), weight (4), accesses (2), queue (2), end (4). On disk: never change one.
//
// A run is named by its first block, since it is shortened from its end. Blocks further down have its history as far as
// it reached, until another run begins.
#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "radix_tree.h"

namespace kvstore {

namespace {

// A slice hashes or copies this many blocks and what it has begun, twice as many more at most: 5 us, on a slow core 10.
constexpr uint32_t kSaveSteps = 32;
constexpr uint32_t kReachBlocks = 32;
constexpr uint32_t kSavePieces = 2;    // tables of 2 KiB
constexpr uint32_t kSaveGhosts = 32;  // each found in a map
constexpr size_t kRunBytes = sizeof(Key128) + sizeof(History);
constexpr size_t kGhostBytes = sizeof(uint64_t) + sizeof(History);

static_assert(std::is_trivially_copyable_v<History> && sizeof(Key128) == 16, "both are saved as they lie in memory");

void CheckRecords(std::string_view bytes, size_t header_bytes, size_t record_bytes, const char* what) {
  if (bytes.size() < header_bytes || (bytes.size() - header_bytes) % record_bytes != 0) {
    throw std::invalid_argument(std::string("saved ") + what + " have " + std::to_string(bytes.size()) + " bytes, expected " +
                                std::to_string(header_bytes) + " and a multiple of " + std::to_string(record_bytes));
  }
}

}  // namespace

// ---- saving ----

Saved RadixTree::SaveTables(uint64_t first) const {
  Saved saved{{}, kSavedAll};
  const uint32_t count = policy_->piece_count();
  const uint64_t end = first < count ? std::min<uint64_t>(count, first + kSavePieces) : count;
  for (uint64_t piece = first; piece < end; ++piece) policy_->Save(static_cast<uint32_t>(piece), &saved.bytes);
  if (end < count) saved.next = end;
  steps_ += kSavePieces;
  return saved;
}

// `first` is a node and an index within it.
Saved RadixTree::SaveRuns(int64_t tier, uint64_t first) {
  const int index_of_tier = CheckTier(tier);
  Saved saved{{}, kSavedAll};
  const uint64_t steps_max = steps_ + std::min(kSaveSteps, limits_.slice_blocks);
  const auto first_node = static_cast<uint32_t>(first >> 32);
  const uint32_t behind = nodes_.VisitFrom(first_node, [&](uint32_t id, const Node&) {
    ++steps_;
    uint32_t index = id == first_node ? static_cast<uint32_t>(first) : 0;
    if (!SaveNode(id, index_of_tier, steps_max, &index, &saved.bytes)) {
      saved.next = static_cast<uint64_t>(id) << 32 | index;
      return false;
    }
    return steps_ < steps_max;
  });
  if (saved.next == kSavedAll && behind != kNone) saved.next = static_cast<uint64_t>(behind) << 32;
  return saved;
}

// Saves the runs that begin in the node at `index` or behind. False, with `index` moved on or keys made that are kept,
// where there is more to do.
bool RadixTree::SaveNode(uint32_t node_id, int tier, uint64_t steps_max, uint32_t* index, std::string* bytes) {
  const Node& node = nodes_[node_id];
  if (*index >= node.block_count() || node.resident[tier] == 0 || IsCondemned(node_id)) return true;
  if (!ReachEndKeys(node.parent, steps_max) || !ReachKey(node_id, *index, steps_max)) return false;
  Key128 key = KeyAfter(node_id, *index);
  uint32_t hashed = *index;
  uint32_t begin = 0;
  for (const History& run : node.runs.all()) {
    const uint32_t at = begin;
    const uint32_t end = run.end - node.depth;
    begin = end;
    if (at < *index || blocks_[node.ids[at]].slot[tier] == kNoSlot) continue;
    if (at - hashed > kMarkBlocks) {
      *index = at;
      if (!ReachKey(node_id, at, steps_max)) return false;
      key = KeyAfter(node_id, at);
      hashed = at;
    }
    key = ChainThrough(node, hashed, at + 1, key);
    hashed = at + 1;
    History history = run;
    history.end = end - at;
    Put(bytes, key);
    Put(bytes, history);
    if (steps_ >= steps_max && end < node.block_count()) {
      *index = end;
      return false;
    }
  }
  return true;
}

// Keeps marks on the way to a key of the node, so that KeyAfter need not make them in one go. False where there is more
// to do. REQUIRES: the one above has its end key.
bool RadixTree::ReachKey(uint32_t node_id, uint32_t count, uint64_t steps_max) {
  while (true) {
    const uint32_t marked = nodes_[node_id].mark_count() * kMarkBlocks;
    if (marked + kReachBlocks >= count) return true;
    KeyAfter(node_id, marked + kReachBlocks);
    if (steps_ >= steps_max) return false;
  }
}

// As MakeEndKeys, but that a long edge is not hashed in one go.
bool RadixTree::ReachEndKeys(uint32_t node_id, uint64_t steps_max) {
  Ids unknown;
  for (uint32_t at = node_id; !nodes_[at].has_end_key; at = nodes_[at].parent) unknown.push_back(at);
  for (auto at = unknown.rbegin(); at != unknown.rend(); ++at) {
    Node& node = nodes_[*at];
    if (!ReachKey(*at, node.block_count(), steps_max)) return false;
    node.end_key = KeyAfter(*at, node.block_count());
    node.has_end_key = true;
    if (steps_ >= steps_max) return false;
  }
  return true;
}

Saved RadixTree::SaveGhosts(uint64_t first) const {
  Saved saved{{}, kSavedAll};
  if (first == 0) Put(&saved.bytes, ghosts_.mask());
  const uint64_t next = ghosts_.VisitFrom(first, kSaveGhosts, [&](uint64_t fingerprint, const History& history) {
    Put(&saved.bytes, fingerprint);
    Put(&saved.bytes, history);
  });
  if (next != 0) saved.next = next;
  steps_ += kSaveGhosts;
  return saved;
}

// ---- restoring ----

void RadixTree::Restore(const Snapshot& snapshot, uint64_t tick) {
  CheckTick(tick);
  constexpr auto kShiftMax = static_cast<int64_t>(kTickMax);
  if (snapshot.shift > kShiftMax || snapshot.shift < -kShiftMax) {
    throw std::invalid_argument("shift is " + std::to_string(snapshot.shift) + ", above 2^48 - 1 either way");
  }
  const SavedRuns found = ParseRuns(snapshot);
  const SavedGhosts ghosts = ParseGhosts(snapshot);
  policy_->Load(SavedBytes(snapshot.tables), snapshot.shift);
  last_tick_ = std::max(last_tick_, tick);
  std::vector<Way> ways;
  const auto add_children = [&](uint32_t node_id, const Way& above) {
    for (uint32_t child = nodes_[node_id].first_child; child != kNone; child = nodes_[child].next_sibling) {
      ways.push_back(Way{child, above.history, above.end});
    }
  };
  for (const auto& [key, root_node] : roots_) add_children(root_node, Way{root_node, nullptr, 0});
  while (!ways.empty()) {
    Way way = ways.back();
    ways.pop_back();
    RestoreNode(found, tick, &way);
    add_children(way.node, way);
  }
  ghosts_.StartAnew(ghosts.mask);
  for (const auto& [fingerprint, history] : ghosts.all) {
    if (ghosts_.Restore(fingerprint, history)) policy_->RestoredGhost(history);
  }
  policy_->Resume(tick);
}

// Gives the blocks of a node their histories. REQUIRES: the one above has its end key.
void RadixTree::RestoreNode(const SavedRuns& found, uint64_t tick, Way* way) {
  Node& node = nodes_[way->node];
  Runs runs;
  uint32_t begin = node.depth;
  const auto end_piece = [&](uint32_t end) {
    if (begin == end) return;
    if (way->history == nullptr) {
      runs.Append(policy_->Born(Access{tick, node.end(), begin}, end - begin), end);
    } else {
      runs.Append(*way->history, end);
      policy_->Restored(*way->history, end - begin);
    }
    begin = end;
  };
  Key128 key = KeyBefore(way->node);
  for (uint32_t depth = node.depth; depth < node.end(); ++depth) {
    key = ChainThrough(node, depth - node.depth, depth - node.depth + 1, key);
    if (const History* const history = found.Find(key)) {
      end_piece(depth);
      way->history = history;
      way->end = depth + history->end;
    } else if (way->history != nullptr && depth >= way->end) {
      end_piece(depth);
      way->history = nullptr;
    }
  }
  end_piece(node.end());
  node.end_key = key;
  node.has_end_key = true;
  AccountEdge(way->node, -1);
  node.runs = std::move(runs);
  AccountEdge(way->node, 1);
  Refresh(way->node);
}

// ---- reading what was saved ----

History RadixTree::TakeHistory(SavedBytes* bytes, int64_t shift) const {
  auto history = bytes->Take<History>();
  if (!policy_->Understands(history)) throw std::invalid_argument("a saved history is none of " + policy_name_);
  history.tick = ShiftedTick(history.tick, shift);
  return history;
}

SavedRuns RadixTree::ParseRuns(const Snapshot& snapshot) const {
  CheckRecords(snapshot.runs, 0, kRunBytes, "runs");
  SavedRuns found(snapshot.runs.size() / kRunBytes, hash_seed_);
  SavedBytes bytes(snapshot.runs);
  while (!bytes.empty()) {
    const auto key = bytes.Take<Key128>();
    const History history = TakeHistory(&bytes, snapshot.shift);
    if (history.end == 0 || history.end > limits_.edge_blocks) {
      throw std::invalid_argument("a saved run has " + std::to_string(history.end) + " blocks");
    }
    found.Add(key, history);
  }
  return found;
}

RadixTree::SavedGhosts RadixTree::ParseGhosts(const Snapshot& snapshot) const {
  CheckRecords(snapshot.ghosts, sizeof(uint64_t), kGhostBytes, "ghosts");
  SavedBytes bytes(snapshot.ghosts);
  SavedGhosts ghosts;
  ghosts.mask = bytes.Take<uint64_t>();
  const size_t count = (snapshot.ghosts.size() - sizeof(uint64_t)) / kGhostBytes;
  if ((ghosts.mask & (ghosts.mask + 1)) != 0 || ghosts.mask > UINT32_MAX || count > Ghosts::kGhostsMax ||
      (count > 0 && !remembers_)) {
    throw std::invalid_argument("saved ghosts are " + std::to_string(count) + ", thinned out by " +
                                std::to_string(ghosts.mask) + ", which " + policy_name_ + " does not do");
  }
  ghosts.all.reserve(count);
  while (!bytes.empty()) {
    const auto fingerprint = bytes.Take<uint64_t>();
    ghosts.all.emplace_back(fingerprint, TakeHistory(&bytes, snapshot.shift));
  }
  return ghosts;
}

}  // namespace kvstore
