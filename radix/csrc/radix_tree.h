// A compressed radix tree over token ids: which blocks exist for a prefix, where each one lies, who may go first.
// One tree serves one namespace, and knows no Python. Every call checks its arguments first and throws
// std::invalid_argument before anything changes.
//
// Callers serialise all calls with one lock of theirs, but for Match and removals(), which need none: a call holds
// `shape_mutex_` while it changes what Match reads.
//
// What one call does is bounded, in blocks visited: Limits::slice_blocks, plus what its arguments name (blocks of the
// prompt, ids, and up to Limits::edge_blocks for each edge in which one of them lies). So a subtree that leaves is cut
// off at once, which Match then cannot reach, and taken apart in slices: `condemned()` says that there is more to Reap.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "child_table.h"
#include "ghosts.h"
#include "node.h"
#include "policy.h"
#include "pool.h"
#include "saved_runs.h"
#include "siphash.h"
#include "victim_queues.h"

namespace kvstore {

using Ids = std::vector<uint32_t>;

// A borrowed run of values.
template <typename T>
struct Span {
  const T* data;
  size_t size;

  const T* begin() const { return data; }
  const T* end() const { return data + size; }
  const T& operator[](size_t index) const { return data[index]; }
};
using IdSpan = Span<uint32_t>;
using TokenSpan = Span<uint32_t>;

// Where DropUnheld goes on: valid while `removals` is what it was.
struct Resume {
  uint32_t block;
  uint64_t removals;
};

// What a call took out of the tree.
struct Removed {
  uint32_t blocks = 0;                 // left the tree for good
  uint32_t kept = 0;                   // were to be evicted and stay
  Ids slots[kTierCount];               // to be freed
  std::vector<Key128> displaced_keys;  // left the tier that was asked for and stay in another
  std::vector<Key128> dropped_keys;    // committed blocks among `blocks`, ancestors first
  std::optional<Resume> resume;        // DropUnheld alone: there is more to do
};

// Some of what was looked for, and the block id at which to go on looking; kNone where that was all.
struct Slice {
  Ids ids;
  uint32_t next;
};

// Some of what is saved of the policy, and where to go on; kSavedAll where that was all.
struct Saved {
  std::string bytes;
  uint64_t next;
};
constexpr uint64_t kSavedAll = UINT64_MAX;

// All that was saved, put together again; see snapshot.cpp for the bytes. `shift` is added to its ticks.
struct Snapshot {
  std::string_view tables;
  std::string_view runs;
  std::string_view ghosts;
  int64_t shift;
};

// Bounds of the work of one call; smaller ones are for tests.
struct Limits {
  uint32_t slice_blocks = 4096;  // visited in one go, 1 to 2 ms of removing
  uint32_t edge_blocks = 1024;   // in one node: what splitting, merging and growing one copies
};

struct Staged {
  uint32_t existing_blocks = 0;
  Ids ids;
};

class RadixTree {
 public:
  // `policy` decides what leaves a tier first, by name (policy.h). `hash_bits` below 32 makes hash collisions likelier, for tests; they cost time and decide nothing.
  RadixTree(uint32_t block_tokens, const Key128& ns_key, uint64_t hash_seed, uint32_t hash_bits,
            const std::string& policy = "lru", Limits limits = {});
  ~RadixTree();
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  uint32_t block_tokens() const { return block_tokens_; }
  uint32_t block_count() const { return blocks_.used() - static_cast<uint32_t>(detached_.size()); }
  uint32_t node_count() const { return nodes_.used() - root_count() - condemned_root_count(); }
  uint32_t root_count() const { return static_cast<uint32_t>(roots_.size()); }
  size_t memory_bytes() const;
  const std::string& policy_name() const { return policy_name_; }
  size_t policy_bytes() const;  // what the policy has learnt and remembers, ghosts included

  // Blocks visited by all calls so far. A Match counts the blocks that it found and each node that it compared with.
  uint64_t steps() const { return steps_ + matched_steps_.load(std::memory_order_relaxed); }

  // Whether blocks that left wait for Reap. The counts of blocks and nodes include them until then.
  bool condemned() const { return !condemned_.empty() || !cleared_.empty(); }

  // Grows whenever blocks leave the tree. Where it is the same before a Match and under the callers' lock afterwards,
  // the ids of that Match are still those of the prompt.
  uint64_t removals() const { return removals_.load(std::memory_order_acquire); }

  uint32_t tier_blocks(int64_t tier) const { return tier_blocks_[CheckTier(tier)]; }

  Ids Match(const Key128& root, TokenSpan tokens) const;
  std::optional<Ids> TryMatch(const Key128& root, TokenSpan tokens) const;  // nothing where it would have to wait
  void Touch(IdSpan ids, uint64_t tick, int64_t prompt_blocks);
  // Tells the policy what is known of the next use of the prompt that ends with this block. It is told of the blocks
  // that no other prompt has in common with it; returns how many.
  uint32_t HintNextUse(uint32_t id, const Hint& hint);
  Ids Slots(IdSpan ids, int64_t tier) const;
  size_t Leading(IdSpan ids, int64_t tier) const;  // how many of the first ones have a slot in the tier
  void Lease(IdSpan ids);
  Removed Release(IdSpan ids);

  Staged Stage(const Key128& root, TokenSpan tokens, int64_t from_block, uint64_t tick);
  std::vector<uint8_t> Place(IdSpan ids, int64_t tier, IdSpan slots);

  // What other capacities of a tier would have found; null where the policy does not rehearse.
  const Rehearsal* rehearsal(int64_t tier) const { return policy_->rehearsal(CheckTier(tier)); }
  // What the block that leaves the tier first is worth at `tick`; see EvictionPolicy::ValueOf.
  std::optional<double> VictimValue(int64_t tier, uint64_t tick);
  double ValueOf(uint32_t id, uint64_t tick);  // of a block in the tree
  // What each block is worth, how often it was used as far as the policy counts (0 where it does not, or the block was
  // removed), and whether a block below it is in the tier and stays there.
  std::vector<double> Values(IdSpan ids, uint64_t tick);
  std::vector<uint16_t> Uses(IdSpan ids) const;
  std::vector<uint8_t> Carries(IdSpan ids, int64_t tier);
  Ids Parents(IdSpan ids) const;  // kNone where there is none, or the block was removed
  // Up to `limit` victims; none that is worth more than `worth`, but for a hundredth.
  Ids TakeVictims(int64_t tier, int64_t limit, double worth);
  Slice TakeRange(int64_t tier, int64_t first_slot, int64_t slot_count, int64_t first_id = 0);
  Removed Evict(IdSpan ids, int64_t tier);

  Removed Drop(IdSpan ids);
  Removed DropUnheld(const Key128& root, TokenSpan tokens, int64_t from_block,
                     std::optional<Resume> resume = std::nullopt);
  Removed Clear();
  Removed Reap();

  Slice MissingIn(int64_t tier, int64_t source_tier, int64_t first_id = 0) const;
  Slice Boundaries(int64_t every, int64_t first_id = 0) const;
  bool PrepareKeys(IdSpan ids);  // false where there is more to do before Keys and Evict need no keys of other edges
  std::vector<Key128> Keys(IdSpan ids);  // (parent key, own key) of each id
  Ids Tokens(IdSpan ids) const;
  Key128 RootOf(uint32_t id) const;

  // What the policy has learnt, remembers of runs with blocks in `tier`, and of blocks that left; each from 0 on. The
  // tree may change between calls: what changed is saved as it was or as it is, or not at all.
  Saved SaveTables(uint64_t first) const;
  Saved SaveRuns(int64_t tier, uint64_t first);
  Saved SaveGhosts(uint64_t first) const;
  // Gives the policy back what it knew, in a tree made with the same `hash_seed` that has what is left of the blocks.
  // Those that the snapshot does not know are as new at `tick`. Throws std::invalid_argument with nothing changed.
  // O(blocks + runs): for trees that nobody else uses yet.
  void Restore(const Snapshot& snapshot, uint64_t tick);

  // A text for each broken invariant, the first hundred; empty when all hold. O(blocks).
  std::vector<std::string> CheckIntegrity();
  // The same a slice at a time, with other calls in between: nothing while there is more. What was checked by then is not
  // looked at again.
  std::optional<std::vector<std::string>> CheckSlice();

 private:
  struct KeyHash {
    uint64_t seed;
    size_t operator()(const Key128& key) const;
  };
  struct KeyEqual {
    bool operator()(const Key128& left, const Key128& right) const;
  };

  using RootMap = std::unordered_map<Key128, uint32_t, KeyHash, KeyEqual>;

  // What is left of a block that was removed while in use, so that its users can still verify its bytes.
  struct Identity {
    Key128 root;
    Key128 parent_key;
    Key128 key;
    Ids tokens;
  };

  // A place in the tree on the way down a prompt: `taken` blocks of `node` are equal to the prompt, `depth` in all.
  struct Cursor {
    const uint32_t* tokens;
    uint32_t block_count;
    uint32_t node;
    uint32_t taken = 0;
    uint32_t depth = 0;
    uint32_t steps = 0;
  };

  // What is remembered of a block that is not in the tree.
  struct Ghost {
    uint32_t depth;
    History history;
  };

  // What blocks from depth `begin` on will be given when they are inserted.
  struct Births {
    uint32_t begin = 0;
    Runs runs;
    std::vector<uint64_t> fingerprints;  // as those of a node
  };

  // Arguments.
  static int CheckTier(int64_t tier);
  static void CheckTick(uint64_t tick);
  static size_t CheckLimit(int64_t limit);
  static uint32_t CheckFirstId(int64_t first_id);
  const Block* FindUsed(uint32_t id) const;
  void CheckIds(IdSpan ids) const;
  void AddHolds(IdSpan ids);
  void TakeHolds(IdSpan ids);

  // Walking.
  Ids FindCommitted(const Key128& root, TokenSpan tokens) const;
  Cursor StartAt(uint32_t root_node, TokenSpan tokens) const;
  bool Descend(Cursor* cursor) const;
  uint32_t FindRoot(const Key128& root) const;
  uint32_t FindChild(uint32_t parent, const uint32_t* first_block, uint32_t* steps) const;
  uint32_t EqualBlocks(const Node& node, const uint32_t* tokens, uint32_t limit) const;
  uint32_t LeadingCommitted(const Node& node, uint32_t limit) const;
  uint32_t Tag(uint32_t parent, const uint32_t* first_block) const;

  // Shape.
  uint32_t NewNode();
  uint32_t NewRoot(const Key128& root);
  void Insert(const Cursor& cursor, const Births& births, Ids* ids);
  uint32_t NewChild(uint32_t parent_id, const uint32_t* first_block, uint32_t depth);
  void Append(uint32_t node_id, const uint32_t* tokens, uint32_t count, const Births& births);
  uint32_t Split(uint32_t node_id, uint32_t at);
  void MergeWithOnlyChild(uint32_t node_id);
  void MergeIfFits(uint32_t node_id);
  void LinkChild(uint32_t parent_id, uint32_t child_id, const uint32_t* first_block);
  void UnlinkChild(uint32_t child_id);
  void ReplaceChild(uint32_t old_child, uint32_t new_child);
  void FreeNode(uint32_t node_id);
  void AccountEdge(uint32_t node_id, int sign);

  // Leaving the tree.
  void CutAll(const Ids& ids, Removed* removed);
  void Cut(uint32_t block_id, Removed* removed);
  void Uproot(uint32_t node_id, const Key128& key_before, const Key128& root, Removed* removed);
  void Disown(uint32_t node_id);
  void ReapSome(uint32_t block_count, Removed* removed);
  bool CondemnClearedRoot();
  bool IsCondemned(uint32_t node_id) const;
  uint32_t condemned_root_count() const;
  uint32_t DropBelow(uint32_t block_id, uint32_t from_block, Removed* removed);
  bool LiesBelow(uint32_t block_id, uint32_t top_id) const;
  uint32_t NextBeside(uint32_t node_id, uint32_t from_block) const;
  Key128 Describe(const Node& node, uint32_t from, Key128 key, const Key128& root, Removed* removed);
  void Truncate(uint32_t node_id, uint32_t count, Removed* removed);
  void Mend(uint32_t node_id);
  void Retire(uint32_t id, Removed* removed);
  void FreeDetached(uint32_t id, Removed* removed);
  void FreeBlock(uint32_t id, Removed* removed);

  // Scanning.
  void AddMissingPath(uint32_t id, int absent, int present, std::unordered_map<uint32_t, uint32_t>* done,
                      Ids* ids) const;

  // Histories; in history.cpp.
  uint32_t Fingerprints(uint32_t begin, uint32_t end) const {
    return end / fingerprint_blocks_ - begin / fingerprint_blocks_;
  }
  Prefixes FingerprintsOf(IdSpan path) const;
  uint64_t FingerprintThrough(uint64_t fingerprint, const uint32_t* tokens, uint32_t count) const;
  uint64_t FingerprintAt(const Node& node, uint32_t count) const;
  std::vector<Ghost> TakeGhosts(const Cursor& cursor, std::vector<uint64_t>* fingerprints);
  Births PlanBirths(const Cursor& cursor, const Ids& existing, uint64_t tick);
  void AppendHistories(Node* node, uint32_t count, const Births& births);
  void SplitHistories(Node* head, Node* tail);
  void MergeHistories(Node* head, Node* tail);
  void DropHistories(Node* node, uint32_t count);
  static size_t EqualIds(const Node& node, uint32_t from, IdSpan ids);
  template <typename Change>
  void ChangeHistories(IdSpan ids, Change change);

  // Snapshots; in snapshot.cpp.
  struct SavedGhosts {
    uint64_t mask = 0;
    std::vector<std::pair<uint64_t, History>> all;
  };
  struct Way {
    uint32_t node;
    const History* history;  // of the run that reaches into the node from above, or null
    uint32_t end;            // of it
  };
  bool SaveNode(uint32_t node_id, int tier, uint64_t steps_max, uint32_t* index, std::string* bytes);
  bool ReachKey(uint32_t node_id, uint32_t count, uint64_t steps_max);
  bool ReachEndKeys(uint32_t node_id, uint64_t steps_max);
  History TakeHistory(SavedBytes* bytes, int64_t shift) const;
  SavedRuns ParseRuns(const Snapshot& snapshot) const;
  SavedGhosts ParseGhosts(const Snapshot& snapshot) const;
  void RestoreNode(const SavedRuns& found, uint64_t tick, Way* way);

  // Leaving a tier.
  void Take(uint32_t id, int tier);
  void BecomeResident(uint32_t node_id, int tier, uint32_t count, uint32_t end);
  void AddResident(uint32_t node_id, int tier, int64_t delta);
  void Propagate(uint32_t node_id, int tier, bool was_occupied);
  uint32_t LastResident(Node* node, int tier);
  void Refresh(uint32_t node_id);
  void RefreshTier(uint32_t node_id, int tier);
  uint32_t ChooseVictim(int tier);
  double NextVictimValue(uint32_t node_id, int tier);
  void TakeRun(uint32_t node_id, int tier, size_t limit, Ids* victims);

  // Keys.
  uint32_t RootNodeOf(uint32_t node_id) const;
  Key128 RootKeyOf(uint32_t node_id) const;
  Key128 EndKeyOf(uint32_t node_id);
  bool MakeEndKeys(uint32_t node_id, uint64_t steps_max);
  Key128 KeyAfter(uint32_t node_id, uint32_t count);
  Key128 KeyBefore(uint32_t node_id) { return EndKeyOf(nodes_[node_id].parent); }
  Key128 ChainThrough(const Node& node, uint32_t from, uint32_t to, Key128 key) const;
  void FillAttachedKeys(IdSpan ids, std::vector<Key128>* keys);

  class Arrivals;  // in radix_tree.cpp

  // For an audit under way, of records whose share of a sum changed.
  class Audit;  // in audit.h
  void BlockChanged(uint32_t id) {
    if (audit_ != nullptr) TellOfBlock(id);
  }
  void NodeChanged(uint32_t id) {
    if (audit_ != nullptr) TellOfNode(id);
  }
  void TellOfBlock(uint32_t id);
  void TellOfNode(uint32_t id);
  friend class Surgeon;  // of the tests: breaks one invariant at a time

  const uint32_t block_tokens_;
  const Key128 ns_key_;
  const uint64_t hash_seed_;
  const uint32_t tag_mask_;
  const Limits limits_;
  BlockPool blocks_;
  NodePool nodes_;
  ChildTable children_;
  RootMap roots_;
  // Roots that Match does not find: of each, what leaves the tree, and the key of the root that it belonged to. Else
  // their trees are like all others, with victims, holds and keys, until ReapSome takes them apart from the top.
  std::unordered_map<uint32_t, Key128> condemned_;
  std::vector<RootMap> cleared_;  // the same, whole maps of roots that were not entered there yet
  const std::string policy_name_;
  const std::unique_ptr<EvictionPolicy> policy_;
  const uint32_t fingerprint_blocks_;  // in a prefix, a fingerprint is kept after each so many
  const bool remembers_;  // whether the policy wants ghosts
  VictimQueues victims_[kTierCount];
  Ghosts ghosts_;
  uint64_t last_tick_ = 0;

  uint32_t tier_blocks_[kTierCount] = {0, 0};  // attached blocks with a slot in the tier
  std::unordered_map<uint32_t, Identity> detached_;
  size_t edge_bytes_ = 0;
  uint64_t links_ = 0;  // nodes that became children so far
  std::unique_ptr<Audit> audit_;  // null where none is under way
  mutable uint64_t steps_ = 0;
  mutable std::atomic<uint64_t> matched_steps_{0};  // of calls that the callers' lock does not cover
  std::atomic<uint64_t> removals_{0};
  mutable std::shared_mutex shape_mutex_;  // guards roots, nodes, children, the pools' chunks and slots against Match
};

}  // namespace kvstore
