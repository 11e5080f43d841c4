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
  ChangeHistories(ids, [&](const History& history, uint32_t samples) {
    return history.tick == tick ? history : policy_->Accessed(history, access, samples);
  });
}

uint32_t RadixTree::HintNextUse(uint32_t id, const Hint& hint) {
  CheckTick(hint.tick);
  CheckIds(IdSpan{&id, 1});
  if (blocks_[id].state != BlockState::kAttached) return 0;
  last_tick_ = std::max(last_tick_, hint.tick);
  uint32_t bottom = blocks_[id].node;
  while (nodes_[bottom].child_count == 1) bottom = nodes_[bottom].first_child;
  if (nodes_[bottom].child_count > 1) return 0;  // others go on from here
  uint32_t blocks = 0;
  for (uint32_t at = bottom; nodes_[at].parent != kNone && nodes_[at].child_count <= 1; at = nodes_[at].parent) {
    const Ids ids = nodes_[at].ids;
    ChangeHistories(IdSpan{ids.data(), ids.size()}, [&](const History& history, uint32_t samples) {
      return policy_->Hinted(history, hint, samples);
    });
    blocks += static_cast<uint32_t>(ids.size());
  }
  return blocks;
}

// Gives the blocks of `ids` that are in the tree other histories, a stretch of an edge at a time.
template <typename Change>
void RadixTree::ChangeHistories(IdSpan ids, Change change) {
  for (size_t at = 0; at < ids.size;) {
    const Block& first = blocks_[ids[at]];
    size_t end = at + 1;
    while (end < ids.size && blocks_[ids[end]].node == first.node &&
           blocks_[ids[end]].depth == blocks_[ids[end - 1]].depth + 1) {
      ++end;
    }
    if (first.state == BlockState::kAttached) {
      Node& node = nodes_[first.node];
      const uint32_t stretch_end = first.depth + static_cast<uint32_t>(end - at);
      AccountEdge(node, -1);
      node.runs.Update(node.depth, first.depth, stretch_end, [&](const History& history, uint32_t from, uint32_t to) {
        return change(history, Samples(from, to));
      });
      AccountEdge(node, 1);
      Refresh(first.node);
    }
    at = end;
  }
}

// ---- births ----

// The histories of the blocks that Insert will add, from what is remembered of them.
// Existing blocks of the path get no further access by it: the request that found them goes on.
RadixTree::Births RadixTree::PlanBirths(const Cursor& cursor, const Ids& existing, uint64_t tick) {
  Births births;
  births.begin = cursor.depth;
  Access access{tick, cursor.block_count, cursor.depth};
  std::vector<std::pair<uint32_t, History>> remembered;  // by the end of the blocks that they stand for
  if (remembers_ && cursor.depth < cursor.block_count) {
    uint64_t fingerprint = FingerprintAt(nodes_[cursor.node], cursor.taken);
    uint32_t depth = cursor.depth;
    while (depth / sample_blocks_ < cursor.block_count / sample_blocks_) {
      const uint32_t next = (depth / sample_blocks_ + 1) * sample_blocks_;
      fingerprint = FingerprintThrough(fingerprint, cursor.tokens + static_cast<size_t>(depth) * block_tokens_, next - depth);
      births.fingerprints.push_back(fingerprint);
      if (const std::optional<History> ghost = ghosts_.Take(fingerprint)) remembered.emplace_back(next, *ghost);
      depth = next;
    }
  }
  if (!remembered.empty()) access.known_blocks = remembered.back().first;
  ChangeHistories(IdSpan{existing.data(), existing.size()}, [&](const History& history, uint32_t samples) {
    return history.tick == tick ? history : policy_->Renewed(history, access, samples);
  });
  uint32_t begin = cursor.depth;
  for (size_t at = 0; at < remembered.size(); ++at) {
    const auto& [end, ghost] = remembered[at];
    if (at + 1 < remembered.size() && remembered[at + 1].second == ghost) continue;  // one run
    births.runs.Append(policy_->Revived(ghost, access, Samples(begin, end)), end);
    begin = end;
  }
  if (begin < cursor.block_count) {
    births.runs.Append(policy_->Born(access, Samples(begin, cursor.block_count)), cursor.block_count);
  }
  return births;
}

// REQUIRES: the tokens of the blocks are not in the node yet.
void RadixTree::AppendHistories(Node* node, const uint32_t* tokens, uint32_t count, const Births& births) {
  const uint32_t begin = node->end();
  const uint32_t end = begin + count;
  births.runs.ForEach(births.begin, begin, end, [&](const History& history, uint32_t, uint32_t to) {
    node->runs.Append(history, to);
  });
  samples_ += Samples(begin, end);
  if (!remembers_ || count == 0) return;
  uint64_t fingerprint = node->block_count() == 0 ? nodes_[node->parent].end_fingerprint : node->end_fingerprint;
  uint32_t hashed = begin;
  const uint32_t first_sample = births.begin / sample_blocks_;
  for (uint32_t sample = begin / sample_blocks_; sample < end / sample_blocks_; ++sample) {
    fingerprint = births.fingerprints[sample - first_sample];
    node->fingerprints.push_back(fingerprint);
    hashed = (sample + 1) * sample_blocks_;
  }
  const uint32_t* rest = tokens + static_cast<size_t>(hashed - begin) * block_tokens_;
  node->end_fingerprint = FingerprintThrough(fingerprint, rest, end - hashed);
}

// ---- shape ----

// REQUIRES: head and tail have their blocks and depths already; the histories lie with the tail.
void RadixTree::SplitHistories(Node* head, Node* tail) {
  Runs runs = tail->runs.SplitAt(tail->depth);
  head->runs = std::move(tail->runs);
  tail->runs = std::move(runs);
  if (!remembers_) return;
  head->end_fingerprint = 0;
  const uint32_t kept = Samples(head->depth, head->end());
  std::vector<uint64_t>& all = tail->fingerprints;
  head->fingerprints.assign(all.begin(), all.begin() + kept);
  all = std::vector<uint64_t>(all.begin() + kept, all.end());
  head->end_fingerprint = FingerprintAt(*head, head->block_count());
}

// REQUIRES: the nodes have their own blocks and depths still.
void RadixTree::MergeHistories(Node* head, Node* tail) {
  tail->runs.Prepend(head->runs);
  tail->fingerprints.insert(tail->fingerprints.begin(), head->fingerprints.begin(), head->fingerprints.end());
}

// The blocks of the node from `count` on leave the tree. What stands for them is remembered for a while.
void RadixTree::DropHistories(Node* node, uint32_t count) {
  const uint32_t begin = node->depth + count;
  if (begin >= node->end()) return;
  const auto forget = [this](const History& history) { policy_->Forgotten(history, last_tick_, 1); };
  samples_ -= Samples(begin, node->end());
  const double ghosts_max = policy_->ghost_ratio() * samples_;
  node->runs.ForEach(node->depth, begin, node->end(), [&](const History& history, uint32_t from, uint32_t to) {
    policy_->Left(history, Samples(from, to));
    if (!remembers_) return;
    for (uint32_t sample = from / sample_blocks_; sample < to / sample_blocks_; ++sample) {
      ghosts_.Add(node->fingerprints[sample - node->depth / sample_blocks_], history, ghosts_max, forget);
    }
  });
  node->runs.Truncate(node->depth, begin);
  if (!remembers_) return;
  node->fingerprints.resize(Samples(node->depth, begin));
  if (count > 0) node->end_fingerprint = FingerprintAt(*node, count);
}

// ---- fingerprints ----

// Of the prefix that ends with the node's block `count - 1`.
uint64_t RadixTree::FingerprintAt(const Node& node, uint32_t count) const {
  if (count == node.block_count() && node.end_fingerprint != 0) return node.end_fingerprint;
  const uint32_t samples = Samples(node.depth, node.depth + count);
  const uint32_t begin = samples == 0 ? 0 : (node.depth / sample_blocks_ + samples) * sample_blocks_ - node.depth;
  const uint64_t fingerprint = samples == 0 ? nodes_[node.parent].end_fingerprint : node.fingerprints[samples - 1];
  return FingerprintThrough(fingerprint, node.tokens.data() + static_cast<size_t>(begin) * block_tokens_, count - begin);
}

uint64_t RadixTree::FingerprintThrough(uint64_t fingerprint, const uint32_t* tokens, uint32_t count) const {
  for (uint32_t block = 0; block < count; ++block, tokens += block_tokens_) {
    fingerprint = MixTokens(fingerprint, hash_seed_, tokens, block_tokens_) | 1;  // never 0, which means unknown
  }
  return fingerprint;
}

}  // namespace kvstore
