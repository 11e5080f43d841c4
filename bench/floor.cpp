// What the machine itself takes: a compressed radix tree that does nothing but find how deep a prompt is stored.
// It has no ids, no slots, no recency, no removal; memcmp down the edges and one hash for each node on the way.
// bench_radix.py compiles it as a shared library; clocks are read in here, so that the caller's cost is left out.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

namespace {

using Tokens = std::vector<uint32_t>;

struct Node {
  Tokens tokens;
};

// How deep a prompt is stored: `blocks` in all, of which `inside` lie in `node`.
struct Place {
  Node* node;
  uint32_t inside;
  uint32_t blocks;
};

class FloorTree {
 public:
  explicit FloorTree(uint32_t block_tokens) : block_tokens_(block_tokens) {}

  Place Find(const uint32_t* tokens, uint32_t blocks) const {
    Place place{nullptr, 0, 0};
    while (place.blocks < blocks) {
      const uint32_t* rest = tokens + size_t{place.blocks} * block_tokens_;
      Node* child = Child(place.node, rest);
      if (child == nullptr) break;
      const uint32_t in_node = static_cast<uint32_t>(child->tokens.size() / block_tokens_);
      place.node = child;
      place.inside = EqualBlocks(child->tokens.data(), rest, std::min(in_node, blocks - place.blocks));
      place.blocks += place.inside;
      if (place.inside < in_node) break;
    }
    return place;
  }

  // Returns how many blocks were new.
  uint32_t Insert(const uint32_t* tokens, uint32_t blocks) {
    Place place = Find(tokens, blocks);
    if (place.blocks == blocks) return 0;
    if (place.node != nullptr && size_t{place.inside} * block_tokens_ < place.node->tokens.size()) Split(place);
    nodes_.push_back(std::make_unique<Node>());
    nodes_.back()->tokens.assign(tokens + size_t{place.blocks} * block_tokens_, tokens + size_t{blocks} * block_tokens_);
    Link(place.node, nodes_.back().get());
    return blocks - place.blocks;
  }

 private:
  // The rest of the node becomes its child. The children of the node are found by its address, so the rest keeps it.
  void Split(Place& place) {
    nodes_.push_back(std::make_unique<Node>());
    Node* head = nodes_.back().get();
    Tokens& tokens = place.node->tokens;
    const auto cut = tokens.begin() + size_t{place.inside} * block_tokens_;
    head->tokens.assign(tokens.begin(), cut);
    auto found = children_.equal_range(Tag(parents_[place.node], tokens.data()));
    for (auto at = found.first; at != found.second; ++at) {
      if (at->second == place.node) at->second = head;
    }
    parents_[head] = parents_[place.node];
    tokens = Tokens(cut, tokens.end());
    Link(head, place.node);
    place.node = head;
  }

  void Link(Node* parent, Node* child) {
    parents_[child] = parent;
    children_.emplace(Tag(parent, child->tokens.data()), child);
  }

  Node* Child(const Node* parent, const uint32_t* first_block) const {
    auto found = children_.equal_range(Tag(parent, first_block));
    for (auto at = found.first; at != found.second; ++at) {
      if (std::memcmp(at->second->tokens.data(), first_block, block_tokens_ * sizeof(uint32_t)) == 0) return at->second;
    }
    return nullptr;
  }

  uint64_t Tag(const Node* parent, const uint32_t* first_block) const {
    uint64_t hash = reinterpret_cast<uintptr_t>(parent);
    for (uint32_t at = 0; at < block_tokens_; ++at) hash = (hash ^ first_block[at]) * 0x9E3779B97F4A7C15ULL;
    return hash ^ hash >> 32;
  }

  // All at once where all are equal; else by halves.
  uint32_t EqualBlocks(const uint32_t* one, const uint32_t* other, uint32_t count) const {
    const auto equal = [&](uint32_t from, uint32_t to) {
      const size_t first = size_t{from} * block_tokens_;
      return std::memcmp(one + first, other + first, size_t{to - from} * block_tokens_ * sizeof(uint32_t)) == 0;
    };
    if (equal(0, count)) return count;
    uint32_t low = 0;
    uint32_t high = count;  // the first difference lies in [low, high)
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      (equal(low, middle) ? low : high) = middle;
    }
    return low;
  }

  const uint32_t block_tokens_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::unordered_multimap<uint64_t, Node*> children_;
  std::unordered_map<const Node*, const Node*> parents_;
};

uint64_t NowNs() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // namespace

extern "C" {

FloorTree* floor_new(uint32_t block_tokens) { return new FloorTree(block_tokens); }

void floor_delete(FloorTree* tree) { delete tree; }

// Returns the blocks that were new; `ns` is what it took.
uint32_t floor_insert(FloorTree* tree, const uint32_t* tokens, uint32_t blocks, uint64_t* ns) {
  const uint64_t start = NowNs();
  const uint32_t added = tree->Insert(tokens, blocks);
  *ns = NowNs() - start;
  return added;
}

// Returns the leading blocks that are stored; `ns` is what it took.
uint32_t floor_match(const FloorTree* tree, const uint32_t* tokens, uint32_t blocks, uint64_t* ns) {
  const uint64_t start = NowNs();
  const uint32_t found = tree->Find(tokens, blocks).blocks;
  *ns = NowNs() - start;
  return found;
}

}  // extern "C"
