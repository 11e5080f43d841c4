// The nodes of one tree whose last block in a tier may leave it next, in the queues that the policy gave their runs. Of
// each queue both ends are at hand: two binary heaps, in which a node occurs at most once; each node remembers its
// places, so that its entry can be moved or removed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "node.h"
#include "policy.h"

namespace kvstore {

// The lowest first; among equal ranks of the policy the lower slot.
struct VictimRank {
  uint64_t rank;
  uint32_t slot;

  bool operator<(const VictimRank& other) const { return std::tie(rank, slot) < std::tie(other.rank, other.slot); }
};

// One end of a queue on top.
class VictimHeap {
 public:
  VictimHeap(NodePool* nodes, int tier, VictimEnd end) : nodes_(nodes), tier_(tier), end_(end) {}

  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }
  size_t bytes() const { return entries_.capacity() * sizeof(Entry); }
  uint32_t top_node() const { return entries_.front().node; }
  VictimRank top_rank() const { return entries_.front().rank; }

  // The rank under which `node` is kept, or null.
  const VictimRank* Find(uint32_t node) const {
    const uint32_t at = (*nodes_)[node].victim_place[tier_][static_cast<int>(end_)];
    return at < entries_.size() && entries_[at].node == node ? &entries_[at].rank : nullptr;
  }

  // Whether the entry at `at` names a node of `queue`, comes after the one above it and has the same rank in `other`.
  bool IsSoundAt(size_t at, uint16_t queue, const VictimHeap& other) const {
    const Entry& entry = entries_[at];
    const Node* node = nodes_->Find(entry.node);
    if (node == nullptr || !node->is_live || node->victim_queue[tier_] != queue) return false;
    if (node->victim_place[tier_][static_cast<int>(end_)] != at) return false;
    if (at > 0 && Before(entry.rank, entries_[(at - 1) / 2].rank)) return false;
    const VictimRank* rank = other.Find(entry.node);
    return rank != nullptr && !(*rank < entry.rank) && !(entry.rank < *rank);
  }

  // Inserts `node`, or moves it to `rank`.
  void Set(uint32_t node, VictimRank rank) {
    uint32_t at = Place(node);
    if (at == kNone) {
      at = static_cast<uint32_t>(entries_.size());
      entries_.push_back(Entry{rank, node});
    }
    entries_[at].rank = rank;
    Settle(at);
  }

  // REQUIRES: `node` is in the heap.
  void Remove(uint32_t node) {
    const uint32_t at = Place(node);
    Place(node) = kNone;
    const Entry last = entries_.back();
    entries_.pop_back();
    if (at < entries_.size()) {
      entries_[at] = last;
      Settle(at);
    }
    if (entries_.capacity() > 4 * entries_.size() + 64) entries_.shrink_to_fit();
  }

 private:
  friend class Surgeon;

  struct Entry {
    VictimRank rank;
    uint32_t node;
  };

  bool Before(const VictimRank& one, const VictimRank& other) const {
    return end_ == VictimEnd::kFirst ? one < other : other < one;
  }

  uint32_t& Place(uint32_t node) { return (*nodes_)[node].victim_place[tier_][static_cast<int>(end_)]; }

  // Moves the entry at `at` up or down to where it belongs.
  void Settle(uint32_t at) {
    const Entry entry = entries_[at];
    while (at > 0 && Before(entry.rank, entries_[(at - 1) / 2].rank)) {
      Put(at, entries_[(at - 1) / 2]);
      at = (at - 1) / 2;
    }
    for (uint32_t child = FirstChild(at); child != kNone && Before(entries_[child].rank, entry.rank);
         child = FirstChild(at)) {
      Put(at, entries_[child]);
      at = child;
    }
    Put(at, entry);
  }

  uint32_t FirstChild(uint32_t at) const {
    const size_t left = 2 * static_cast<size_t>(at) + 1;
    if (left >= entries_.size()) return kNone;
    const bool right = left + 1 < entries_.size() && Before(entries_[left + 1].rank, entries_[left].rank);
    return static_cast<uint32_t>(left + (right ? 1 : 0));
  }

  void Put(uint32_t at, Entry entry) {
    entries_[at] = entry;
    Place(entry.node) = at;
  }

  NodePool* nodes_;
  int tier_;
  VictimEnd end_;
  std::vector<Entry> entries_;
};

// All queues of one tier.
class VictimQueues : public Candidates {
 public:
  VictimQueues(NodePool* nodes, int tier) : nodes_(nodes), tier_(tier) {}

  const std::vector<uint16_t>& open_queues() const override { return open_; }
  QueueEnd First(uint16_t queue) const override { return EndOf(queue, VictimEnd::kFirst); }
  QueueEnd Last(uint16_t queue) const override { return EndOf(queue, VictimEnd::kLast); }
  uint64_t Version(uint16_t queue) const override { return queues_[queue]->version; }

  size_t size() const { return size_; }
  bool contains(uint32_t node) const { return (*nodes_)[node].victim_queue[tier_] != kNoQueue; }

  // The rank under which `node` is kept, or null.
  const VictimRank* Find(uint32_t node) const {
    const uint16_t queue = (*nodes_)[node].victim_queue[tier_];
    if (queue >= queues_.size() || !queues_[queue]) return nullptr;
    return queues_[queue]->heaps[0].Find(node);
  }

  // Inserts `node`, or moves it to another queue or rank.
  void Set(uint32_t node, uint16_t queue, VictimRank rank) {
    uint16_t& current = (*nodes_)[node].victim_queue[tier_];
    if (current != queue) {
      Remove(node);
      current = queue;
      ++size_;
    }
    Queue& entered = Open(queue);
    for (VictimHeap& heap : entered.heaps) heap.Set(node, rank);
    entered.version = ++version_;
  }

  // Does nothing where `node` is in no queue.
  void Remove(uint32_t node) {
    uint16_t& current = (*nodes_)[node].victim_queue[tier_];
    if (current == kNoQueue) return;
    Queue& left = *queues_[current];
    for (VictimHeap& heap : left.heaps) heap.Remove(node);
    left.version = ++version_;
    if (left.heaps[0].empty()) Close(&left);
    current = kNoQueue;
    --size_;
  }

  // For audits: one end of a queue, an entry at a time.
  uint16_t queue_count() const { return static_cast<uint16_t>(queues_.size()); }
  size_t EntryCount(uint16_t queue, int end) const { return queues_[queue] ? queues_[queue]->heaps[end].size() : 0; }
  bool IsSoundAt(uint16_t queue, int end, size_t at) const {
    const VictimHeap(&heaps)[2] = queues_[queue]->heaps;
    return heaps[end].IsSoundAt(at, queue, heaps[1 - end]);
  }

  // Whether both ends of all queues have as many nodes as there are. O(open queues).
  bool IsCounted() const {
    size_t counts[2] = {0, 0};
    for (uint16_t queue : open_) {
      for (size_t end = 0; end < 2; ++end) counts[end] += queues_[queue]->heaps[end].size();
    }
    return counts[0] == size_ && counts[1] == size_;
  }

  size_t bytes() const {
    size_t bytes = queues_.capacity() * sizeof(queues_[0]) + open_.capacity() * sizeof(uint16_t);
    for (const std::unique_ptr<Queue>& queue : queues_) {
      if (queue) bytes += sizeof(Queue) + queue->heaps[0].bytes() + queue->heaps[1].bytes();
    }
    return bytes;
  }

 private:
  friend class Surgeon;

  struct Queue {
    VictimHeap heaps[2];
    uint64_t version = 0;
    uint32_t open_at = kNone;  // its place in `open_`
  };

  QueueEnd EndOf(uint16_t queue, VictimEnd end) const {
    if (queue >= queues_.size() || !queues_[queue]) return QueueEnd{};
    const VictimHeap& heap = queues_[queue]->heaps[static_cast<int>(end)];
    return heap.empty() ? QueueEnd{} : QueueEnd{heap.top_node(), heap.top_rank().rank};
  }

  Queue& Open(uint16_t queue) {
    if (queue >= queues_.size()) queues_.resize(queue + 1);
    if (!queues_[queue]) {
      queues_[queue] = std::make_unique<Queue>(
          Queue{{VictimHeap(nodes_, tier_, VictimEnd::kFirst), VictimHeap(nodes_, tier_, VictimEnd::kLast)}});
    }
    if (queues_[queue]->open_at == kNone) {
      queues_[queue]->open_at = static_cast<uint32_t>(open_.size());
      open_.push_back(queue);
    }
    return *queues_[queue];
  }

  void Close(Queue* queue) {
    open_[queue->open_at] = open_.back();
    queues_[open_.back()]->open_at = queue->open_at;
    queue->open_at = kNone;
    open_.pop_back();
  }

  NodePool* nodes_;
  int tier_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::vector<uint16_t> open_;
  uint64_t version_ = 0;
  size_t size_ = 0;
};

}  // namespace kvstore
