// What the tree remembers of the requests that touched its blocks, on behalf of the eviction policy.
#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "mix.h"
#include "radix_tree.h"

namespace kvstore {

// ---- what callers ask for ----

void RadixTree::Touch(IdSpan ids, uint64_t tick, int64_t prompt_blocks) {
  CheckTick(tick);
  CheckIds(ids);
  if (prompt_blocks < static_cast<int64_t>(ids.size) || prompt_blocks >= kNone) {
    throw std::invalid_argument("prompt_blocks is " + std::to_string(prompt_blocks) + ", expected at least " +
                                std::to_string(ids.size) + ", the blocks touched");
  }
  last_tick_ = std::max(last_tick_, tick);
  const Access access{tick, static_cast<uint32_t>(prompt_blocks), static_cast<uint32_t>(ids.size)};
  if (policy_->rehearses()) {
    const auto in_first = [this](uint32_t id) { return blocks_[id].slot[0] != kNoSlot; };
    const auto first = static_cast<uint32_t>(std::count_if(ids.begin(), ids.end(), in_first));
    policy_->LookedUp(FingerprintsOf(ids), access, {first, access.known_blocks});
  }
  ChangeHistories(ids, [&](const History& history, uint32_t blocks) {
    return history.tick == tick ? history : policy_->Accessed(history, access, blocks);
  });
}

uint32_t RadixTree::HintNextUse(uint32_t id, const Hint& hint) {
  CheckTick(hint.tick);
  CheckIds(IdSpan{&id, 1});
  if (!hint.ended && !(hint.seconds >= 0)) {
    throw std::invalid_argument("seconds is " + std::to_string(hint.seconds) + ", expected 0 or more, or none for never");
  }
  if (blocks_[id].state != BlockState::kAttached || IsCondemned(blocks_[id].node)) return 0;
  last_tick_ = std::max(last_tick_, hint.tick);
  uint32_t bottom = blocks_[id].node;
  while (nodes_[bottom].child_count == 1) bottom = nodes_[bottom].first_child;
  if (nodes_[bottom].child_count > 1) return 0;  // others go on from here
  uint32_t hinted = 0;
  for (uint32_t at = bottom; nodes_[at].parent != kNone && nodes_[at].child_count <= 1; at = nodes_[at].parent) {
    const Ids ids = nodes_[at].ids;
    ChangeHistories(IdSpan{ids.data(), ids.size()}, [&](const History& history, uint32_t blocks) {
      return policy_->Hinted(history, hint, blocks);
    });
    hinted += static_cast<uint32_t>(ids.size());
  }
  return hinted;
}

// Gives the blocks of `ids` that are in the tree other histories, a stretch of an edge at a time.
template <typename Change>
void RadixTree::ChangeHistories(IdSpan ids, Change change) {
  for (size_t at = 0; at < ids.size;) {
    const Block& first = blocks_[ids[at]];
    if (first.state != BlockState::kAttached) {
      ++at;
      continue;
    }
    Node& node = nodes_[first.node];
    const size_t count = EqualIds(node, first.depth - node.depth, IdSpan{ids.data + at, ids.size - at});
    AccountEdge(first.node, -1);
    node.runs.Update(node.depth, first.depth, first.depth + static_cast<uint32_t>(count),
                     [&](const History& history, uint32_t from, uint32_t to) { return change(history, to - from); });
    AccountEdge(first.node, 1);
    Refresh(first.node);
    at += count;
  }
}

// How many of the ids are those of the node's blocks from `from` on.
size_t RadixTree::EqualIds(const Node& node, uint32_t from, IdSpan ids) {
  const size_t limit = std::min<size_t>(ids.size, node.block_count() - from);
  const uint32_t* own = node.ids.data() + from;
  if (std::memcmp(own, ids.data, limit * sizeof(*own)) == 0) return limit;
  return static_cast<size_t>(std::mismatch(own, own + limit, ids.data).first - own);
}

// ---- births ----

// The histories of the blocks that Insert will add, from what is remembered of them. Existing blocks of the path get no
// further access by it: the request that found them goes on.
RadixTree::Births RadixTree::PlanBirths(const Cursor& cursor, const Ids& existing, uint64_t tick) {
  Births births;
  births.begin = cursor.depth;
  const std::vector<Ghost> ghosts = TakeGhosts(cursor, &births.fingerprints);
  const Access access{tick, cursor.block_count, ghosts.empty() ? cursor.depth : ghosts.back().depth + 1};
  ChangeHistories(IdSpan{existing.data(), existing.size()}, [&](const History& history, uint32_t blocks) {
    return history.tick == tick ? history : policy_->Renewed(history, access, blocks);
  });
  if (policy_->rehearses()) {
    Prefixes prefixes = FingerprintsOf(IdSpan{existing.data(), existing.size()});
    const size_t found = prefixes.size();
    prefixes.insert(prefixes.end(), births.fingerprints.begin(), births.fingerprints.end());
    policy_->Stored(prefixes, found, access);
  }
  uint32_t begin = cursor.depth;
  uint32_t remembered = 0;
  for (size_t at = 0; at < ghosts.size(); ++at) {
    ++remembered;
    if (at + 1 < ghosts.size() && ghosts[at + 1].history == ghosts[at].history) continue;  // one run
    const uint32_t end = ghosts[at].depth + 1;
    births.runs.Append(policy_->Revived(ghosts[at].history, access, remembered, end - begin), end);
    begin = end;
    remembered = 0;
  }
  if (begin < cursor.block_count) {
    births.runs.Append(policy_->Born(access, cursor.block_count - begin), cursor.block_count);
  }
  return births;
}

// Takes what is remembered of the blocks behind the cursor, and makes the fingerprints there.
std::vector<RadixTree::Ghost> RadixTree::TakeGhosts(const Cursor& cursor, std::vector<uint64_t>* fingerprints) {
  std::vector<Ghost> ghosts;
  if (!remembers_ || cursor.depth == cursor.block_count) return ghosts;
  uint64_t fingerprint = FingerprintAt(nodes_[cursor.node], cursor.taken);
  std::vector<uint64_t> all;
  all.reserve(cursor.block_count - cursor.depth);
  for (uint32_t depth = cursor.depth; depth < cursor.block_count; ++depth) {
    fingerprint = FingerprintThrough(fingerprint, cursor.tokens + static_cast<size_t>(depth) * block_tokens_, 1);
    if ((depth + 1) % fingerprint_blocks_ == 0) fingerprints->push_back(fingerprint);
    ghosts_.Prefetch(fingerprint);
    all.push_back(fingerprint);
  }
  for (uint32_t depth = cursor.depth; depth < cursor.block_count && !ghosts_.empty(); ++depth) {
    const std::optional<History> history = ghosts_.Take(all[depth - cursor.depth]);
    if (history) ghosts.push_back(Ghost{depth, *history});
  }
  return ghosts;
}

// REQUIRES: the node does not have the blocks yet.
void RadixTree::AppendHistories(Node* node, uint32_t count, const Births& births) {
  const uint32_t begin = node->end();
  const uint32_t end = begin + count;
  births.runs.ForEach(births.begin, begin, end, [&](const History& history, uint32_t, uint32_t to) {
    node->runs.Append(history, to);
  });
  if (!remembers_ || count == 0) return;
  if (node->block_count() == 0) {
    const Node& parent = nodes_[node->parent];
    node->start_fingerprint = FingerprintAt(parent, parent.block_count());
  }
  const auto first = births.fingerprints.begin() + Fingerprints(births.begin, begin);
  node->fingerprints.insert(node->fingerprints.end(), first, first + Fingerprints(begin, end));
}

// ---- shape ----

// REQUIRES: head and tail have their blocks and depths already; the histories lie with the tail.
void RadixTree::SplitHistories(Node* head, Node* tail) {
  Runs runs = tail->runs.SplitAt(tail->depth);
  head->runs = std::move(tail->runs);
  tail->runs = std::move(runs);
  if (!remembers_) return;
  const uint32_t kept = Fingerprints(head->depth, head->end());
  std::vector<uint64_t>& all = tail->fingerprints;
  head->fingerprints.assign(all.begin(), all.begin() + kept);
  all = std::vector<uint64_t>(all.begin() + kept, all.end());
  head->start_fingerprint = tail->start_fingerprint;
  tail->start_fingerprint = FingerprintAt(*head, head->block_count());
}

// REQUIRES: the nodes have their own blocks and depths still.
void RadixTree::MergeHistories(Node* head, Node* tail) {
  tail->runs.Prepend(head->runs);
  tail->start_fingerprint = head->start_fingerprint;
  tail->fingerprints.insert(tail->fingerprints.begin(), head->fingerprints.begin(), head->fingerprints.end());
}

// The blocks of the node from `count` on leave the tree. They are remembered for a while.
void RadixTree::DropHistories(Node* node, uint32_t count) {
  const uint32_t begin = node->depth + count;
  if (begin >= node->end()) return;
  uint64_t fingerprint = remembers_ ? FingerprintAt(*node, count) : 0;
  const double ghosts_max = policy_->ghost_ratio() * block_count();
  const auto forget = [this](const History& history) { policy_->Forgotten(history, last_tick_, 1); };
  node->runs.ForEach(node->depth, begin, node->end(), [&](const History& history, uint32_t from, uint32_t to) {
    policy_->Left(history, to - from);
    if (!remembers_) return;
    std::vector<uint64_t> left;
    left.reserve(to - from);
    for (uint32_t depth = from; depth < to; ++depth) {
      const uint32_t* tokens = node->tokens.data() + static_cast<size_t>(depth - node->depth) * block_tokens_;
      fingerprint = FingerprintThrough(fingerprint, tokens, 1);
      ghosts_.Prefetch(fingerprint);
      left.push_back(fingerprint);
    }
    uint32_t thinned = 0;
    for (uint64_t each : left) {
      if (!ghosts_.Keeps(each)) {
        ++thinned;
      } else {
        ghosts_.Add(each, history, ghosts_max, forget);
      }
    }
    if (thinned > 0) policy_->Forgotten(history, last_tick_, thinned);
  });
  node->runs.Truncate(node->depth, begin);
  if (remembers_) node->fingerprints.resize(Fingerprints(node->depth, begin));
}

// ---- fingerprints ----

// Those kept on the way to the last of these blocks, which are a prefix.
Prefixes RadixTree::FingerprintsOf(IdSpan path) const {
  Prefixes prefixes;
  for (size_t at = 0; at < path.size;) {
    const Block& block = blocks_[path[at]];
    if (block.state != BlockState::kAttached || block.depth != at) break;
    const Node& node = nodes_[block.node];
    const auto end = static_cast<uint32_t>(std::min<size_t>(node.end(), path.size));
    const auto kept = node.fingerprints.begin();
    prefixes.insert(prefixes.end(), kept, kept + Fingerprints(node.depth, end));
    at = node.end();
  }
  return prefixes;
}

// Of the prefix that ends with the node's block `count - 1`.
uint64_t RadixTree::FingerprintAt(const Node& node, uint32_t count) const {
  const uint32_t kept = Fingerprints(node.depth, node.depth + count);
  const uint32_t begin = kept == 0 ? 0 : (node.depth / fingerprint_blocks_ + kept) * fingerprint_blocks_ - node.depth;
  const uint64_t fingerprint = kept == 0 ? node.start_fingerprint : node.fingerprints[kept - 1];
  return FingerprintThrough(fingerprint, node.tokens.data() + static_cast<size_t>(begin) * block_tokens_, count - begin);
}

uint64_t RadixTree::FingerprintThrough(uint64_t fingerprint, const uint32_t* tokens, uint32_t count) const {
  for (uint32_t block = 0; block < count; ++block, tokens += block_tokens_) {
    fingerprint = MixTokens(fingerprint, hash_seed_, tokens, block_tokens_);
  }
  return fingerprint;
}

}  // namespace kvstore
