// Breaks a sound tree in one place at a time and prints "name: problems found" for each; test_audit.py compiles and
// reads it. Whatever is broken, the audit must say so and must not crash or hang.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "radix_tree.h"

namespace kvstore {

constexpr uint32_t kBlockTokens = 16;
constexpr Key128 kRoot = {{1}};
constexpr uint32_t kDoomedSlots = 1000;
constexpr Key128 kClearedRoots[] = {{{2}}, {{3}}};

IdSpan SpanOf(const Ids& ids) { return IdSpan{ids.data(), ids.size()}; }

Ids Prompt(uint32_t first_token, uint32_t blocks) {
  Ids tokens(blocks * kBlockTokens);
  std::iota(tokens.begin(), tokens.end(), first_token);
  return tokens;
}

// A tree of a trunk of four blocks and two branches of four, one of them with a staged block at its end, and a detached
// block; the trunk's key is kept. Beside it a cleared root, and a condemned subtree of two branches of forty blocks, one of
// them with its keys. And access to all of it.
class Surgeon {
 public:
  Surgeon() : tree(kBlockTokens, Key128{{7}}, 0x5EED, 32, "survival", Limits{1, 512}) {
    for (const Key128& root : kClearedRoots) Store(Prompt(0, 2), doomed_slot, 1, root);
    tree.Clear();  // takes one of them apart
    doomed = Store(Fork(7000, 40), doomed_slot, 1);
    Store(Fork(8000, 40), doomed_slot, 1);
    tree.Keys(IdSpan{&doomed.back(), 1});
    tree.Drop(IdSpan{&doomed[2], 1});
    dead = block(doomed[40]).node;
    left = Store(Prompt(0, 8), 0, 9);
    right = Store(Fork(1000, 4), 8, 5);
    gone = Store(Prompt(5000, 1), 100, 1);
    tree.Lease(SpanOf(gone));
    tree.Drop(SpanOf(gone));
    Ids longer = Prompt(0, 9);
    tree.Stage(kRoot, Span<uint32_t>{longer.data(), longer.size()}, 0, 9);
    tree.Place(SpanOf(right), 1, SpanOf(Slots(50, right.size())));
    tree.Keys(SpanOf(left));
    tree.Keys(SpanOf(right));
    trunk = block(left[0]).node;
    leaf = block(right[7]).node;
  }

  Block& block(uint32_t id) { return tree.blocks_[id]; }
  Node& node(uint32_t id) { return tree.nodes_[id]; }
  Node& root() { return node(tree.roots_.begin()->second); }
  BlockPool& blocks() { return tree.blocks_; }
  ChildTable& table() { return tree.children_; }
  VictimQueues& victims(int tier) { return tree.victims_[tier]; }
  VictimHeap& heap(VictimEnd end) {
    const uint16_t queue = node(leaf).victim_queue[0];
    return victims(0).queues_[queue]->heaps[static_cast<int>(end)];
  }
  void RankWrongly(VictimEnd end) { heap(end).entries_[heap(end).Place(leaf)].rank.rank += 100; }
  void Disorder(VictimEnd end) {
    // A second entry under a rank of its own, below the first, which then trades ranks with it.
    victims(0).Set(trunk, node(leaf).victim_queue[0], VictimRank{UINT64_MAX, 0});
    std::vector<VictimHeap::Entry>& entries = heap(end).entries_;
    std::swap(entries.front().rank, entries.back().rank);
  }
  void LoseFrom(VictimEnd end) { heap(end).Remove(leaf); }
  void Enqueue(uint16_t queue) {
    const Block& last = block(right[7]);
    victims(0).Set(leaf, queue, VictimRank{5, last.slot[0]});
  }
  std::vector<History>& runs(uint32_t node_id) { return node(node_id).runs.runs_; }
  uint32_t& tier_blocks(int tier) { return tree.tier_blocks_[tier]; }
  size_t& edge_bytes() { return tree.edge_bytes_; }
  void ForgetIdentity() { tree.detached_.erase(gone[0]); }
  void ForgetRoot() { tree.roots_.clear(); }
  void ForgetCondemned() { tree.condemned_.clear(); }
  void ForgetCleared() { tree.cleared_.clear(); }
  void CondemnLiveRoot() { tree.condemned_.emplace(tree.roots_.begin()->second, kRoot); }
  void CondemnNothing() { tree.condemned_.emplace(66'666'666, kRoot); }
  Node& condemned_root() { return node(tree.condemned_.begin()->first); }
  // A third branch of the trunk.
  void Branch() { Store(Fork(2000, 4), 200, 5); }
  Ids ChildrenOf(uint32_t node_id) {
    Ids children;
    for (uint32_t at = node(node_id).first_child; at != kNone; at = node(at).next_sibling) children.push_back(at);
    return children;
  }
  // The first child of the trunk stays, the others link each other in a ring.
  void Encircle() {
    const Ids children = ChildrenOf(trunk);
    node(children.front()).next_sibling = kNone;
    node(children.back()).next_sibling = children[1];
    node(children[1]).previous_sibling = children.back();
  }
  void SplitForNothing() { tree.Split(leaf, 1); }
  uint32_t Tag(uint32_t node_id) { return tree.Tag(node(node_id).parent, node(node_id).tokens.data()); }

  RadixTree tree;
  Ids left;
  Ids right;
  Ids gone;
  Ids doomed;
  uint32_t trunk = 0;
  uint32_t leaf = 0;
  uint32_t dead = 0;
  uint32_t doomed_slot = kDoomedSlots;  // the next one free

 private:
  // A prompt that leaves the others after four blocks.
  static Ids Fork(uint32_t first_token, uint32_t blocks) {
    Ids tokens = Prompt(0, 4);
    for (uint32_t token : Prompt(first_token, blocks)) tokens.push_back(token);
    return tokens;
  }

  static Ids Slots(uint32_t first, size_t count) {
    Ids slots(count);
    std::iota(slots.begin(), slots.end(), first);
    return slots;
  }

  Ids Store(const Ids& tokens, uint32_t first_slot, uint64_t tick, const Key128& root = kRoot) {
    Staged staged = tree.Stage(root, Span<uint32_t>{tokens.data(), tokens.size()}, 0, tick);
    const Ids fresh(staged.ids.begin() + staged.existing_blocks, staged.ids.end());
    if (first_slot >= kDoomedSlots) doomed_slot += static_cast<uint32_t>(fresh.size());
    tree.Place(SpanOf(fresh), 0, SpanOf(Slots(first_slot, fresh.size())));
    tree.Release(SpanOf(staged.ids));
    return staged.ids;
  }
};

struct Corruption {
  const char* name;
  std::function<void(Surgeon&)> plant;
};

const std::vector<Corruption> kCorruptions = {
    {"a token changed", [](Surgeon& s) { s.node(s.trunk).tokens[5] ^= 1; }},
    {"a first token changed", [](Surgeon& s) { s.node(s.leaf).tokens[0] ^= 1; }},
    {"tokens lost", [](Surgeon& s) { s.node(s.leaf).tokens.pop_back(); }},
    {"two ids swapped", [](Surgeon& s) { std::swap(s.node(s.leaf).ids[0], s.node(s.leaf).ids[1]); }},
    {"an id of no block", [](Surgeon& s) { s.node(s.leaf).ids[2] = 77'777'777; }},
    {"a block freed", [](Surgeon& s) { s.blocks().Free(s.right[6]); }},
    {"a block of another node", [](Surgeon& s) { s.block(s.right[6]).node = s.trunk; }},
    {"a wrong depth", [](Surgeon& s) { ++s.block(s.right[6]).depth; }},
    {"a block detached in place", [](Surgeon& s) { s.block(s.right[6]).state = BlockState::kDetached; }},
    {"a run that ends before its blocks", [](Surgeon& s) { --s.runs(s.leaf).back().end; }},
    {"a run of other blocks", [](Surgeon& s) { ++s.runs(s.leaf).back().end; }},
    {"a run of no block", [](Surgeon& s) { s.runs(s.leaf).insert(s.runs(s.leaf).begin(), History{}); }},
    {"runs lost", [](Surgeon& s) { s.runs(s.leaf).clear(); }},
    {"a run of another tick", [](Surgeon& s) { s.runs(s.leaf).back().tick = 4000; }},
    {"a run of another queue", [](Surgeon& s) { s.runs(s.leaf).back().queue += 1; }},
    {"a wrong fingerprint", [](Surgeon& s) { s.node(s.leaf).fingerprints.front() ^= 1; }},
    {"a fingerprint lost", [](Surgeon& s) { s.node(s.leaf).fingerprints.pop_back(); }},
    {"a fingerprint too many", [](Surgeon& s) { s.node(s.leaf).fingerprints.push_back(1); }},
    {"a wrong fingerprint at the start", [](Surgeon& s) { s.node(s.leaf).start_fingerprint ^= 1; }},
    {"a hold more than its parent has", [](Surgeon& s) { s.block(s.right[6]).holds = 4000; }},
    {"a staged block without a hold", [](Surgeon& s) { s.block(s.node(s.block(s.left[7]).node).ids.back()).holds = 0; }},
    {"staged miscounted", [](Surgeon& s) { ++s.node(s.leaf).staged; }},
    {"residents miscounted", [](Surgeon& s) { --s.node(s.leaf).resident[0]; }},
    {"occupied children miscounted", [](Surgeon& s) { ++s.node(s.trunk).below[1]; }},
    {"an end before a resident", [](Surgeon& s) { s.node(s.leaf).resident_end[0] -= 2; }},
    {"children miscounted", [](Surgeon& s) { ++s.node(s.trunk).child_count; }},
    {"a sibling lost", [](Surgeon& s) { s.node(s.node(s.trunk).first_child).next_sibling = kNone; }},
    {"siblings in a circle",
     [](Surgeon& s) { s.node(s.node(s.trunk).first_child).next_sibling = s.node(s.trunk).first_child; }},
    {"a sibling in a ring of its own", [](Surgeon& s) { s.Encircle(); }},
    {"siblings in a ring of their own", [](Surgeon& s) { s.Branch(), s.Encircle(); }},
    {"a child of its own descendant", [](Surgeon& s) { s.node(s.leaf).first_child = s.trunk; }},
    {"a link to nowhere", [](Surgeon& s) { s.node(s.leaf).first_child = 88'888'888; }},
    {"a back link changed", [](Surgeon& s) { s.node(s.node(s.trunk).first_child).previous_sibling = s.leaf; }},
    {"another parent", [](Surgeon& s) { s.node(s.leaf).parent = 99'999'999; }},
    {"a node that begins elsewhere", [](Surgeon& s) { ++s.node(s.leaf).depth; }},
    {"an only child not merged", [](Surgeon& s) { s.SplitForNothing(); }},
    {"a node the table forgot", [](Surgeon& s) { s.table().Erase(s.Tag(s.leaf), s.leaf); }},
    {"a table entry too many", [](Surgeon& s) { s.table().Insert(123, s.leaf); }},
    {"a victim forgotten", [](Surgeon& s) { s.victims(1).Remove(s.leaf); }},
    {"a victim that is none", [](Surgeon& s) { s.victims(0).Set(s.trunk, 0, VictimRank{1, 1}); }},
    {"a victim ranked wrongly", [](Surgeon& s) { s.RankWrongly(VictimEnd::kFirst); }},
    {"a victim ranked wrongly from the last", [](Surgeon& s) { s.RankWrongly(VictimEnd::kLast); }},
    {"a victim in the wrong queue", [](Surgeon& s) { s.Enqueue(7); }},
    {"a victim known at one end alone", [](Surgeon& s) { s.LoseFrom(VictimEnd::kLast); }},
    {"victims out of order", [](Surgeon& s) { s.Disorder(VictimEnd::kFirst); }},
    {"victims out of order from the last", [](Surgeon& s) { s.Disorder(VictimEnd::kLast); }},
    {"a wrong key", [](Surgeon& s) { s.node(s.trunk).end_key.bytes[3] ^= 1; }},
    {"a root of another key", [](Surgeon& s) { s.root().end_key.bytes[0] ^= 1; }},
    {"a key within an edge wrong", [](Surgeon& s) { s.node(s.dead).marks->back().bytes[3] ^= 1; }},
    {"a key within an edge of no block", [](Surgeon& s) { s.node(s.dead).marks->push_back(kRoot); }},
    {"what is condemned lost", [](Surgeon& s) { s.ForgetCondemned(); }},
    {"what is cleared lost", [](Surgeon& s) { s.ForgetCleared(); }},
    {"a live root condemned", [](Surgeon& s) { s.CondemnLiveRoot(); }},
    {"no node condemned", [](Surgeon& s) { s.CondemnNothing(); }},
    {"a condemned root with a parent", [](Surgeon& s) { s.condemned_root().parent = s.trunk; }},
    {"a condemned block freed", [](Surgeon& s) { s.blocks().Free(s.doomed[42]); }},
    {"a condemned block of a live node", [](Surgeon& s) { s.block(s.doomed[42]).node = s.trunk; }},
    {"a condemned block's slot given away", [](Surgeon& s) { s.block(s.left[0]).slot[0] = s.block(s.doomed[42]).slot[0]; }},
    {"a root lost", [](Surgeon& s) { s.ForgetRoot(); }},
    {"one slot for two blocks", [](Surgeon& s) { s.block(s.right[6]).slot[0] = s.block(s.left[0]).slot[0]; }},
    {"a detached block's slot given away", [](Surgeon& s) { s.block(s.left[0]).slot[0] = s.block(s.gone[0]).slot[0]; }},
    {"a slot lost", [](Surgeon& s) { s.block(s.right[6]).slot[1] = kNoSlot; }},
    {"leaving a tier it is not in", [](Surgeon& s) { s.block(s.left[5]).leaving = 2; }},
    {"a tier miscounted", [](Surgeon& s) { ++s.tier_blocks(1); }},
    {"bytes miscounted", [](Surgeon& s) { s.edge_bytes() += 64; }},
    {"a detached block without identity", [](Surgeon& s) { s.ForgetIdentity(); }},
    {"a detached block without a user", [](Surgeon& s) { s.block(s.gone[0]).holds = 0; }},
};

}  // namespace kvstore

namespace {

// What is found in one go, or a block at a time; 0 where either finds nothing.
size_t ProblemsOf(kvstore::RadixTree* tree) {
  const size_t at_once = tree->CheckIntegrity().size();
  std::optional<std::vector<std::string>> in_slices;
  while (!in_slices) in_slices = tree->CheckSlice();
  return std::min(at_once, in_slices->size());
}

}  // namespace

int main() {
  using namespace kvstore;
  Surgeon sound;
  std::printf("nothing: %zu\n", sound.tree.CheckIntegrity().size() + ProblemsOf(&sound.tree));
  for (const Corruption& corruption : kCorruptions) {
    auto surgeon = std::make_unique<Surgeon>();
    corruption.plant(*surgeon);
    std::printf("%s: %zu\n", corruption.name, ProblemsOf(&surgeon->tree));
    std::fflush(stdout);
    (void)surgeon.release();  // a broken tree need not survive its own end
  }
}
