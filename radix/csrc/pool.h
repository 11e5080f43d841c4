// Records of one size in chunks, named by dense 32-bit ids that are reused. References stay valid until the record is
// freed; a chunk without records gives its memory back, so that churn leaves nothing behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <stdexcept>
#include <vector>

namespace kvstore {

constexpr uint32_t kNone = 0xFFFFFFFFu;

// T has a default constructor and `uint32_t& FreeLink()`: a field that the pool may use while the record is free.
template <typename T, unsigned kChunkBits>
class Pool {
 public:
  // Returns the id of a default-constructed record, in the lowest chunk that has room.
  uint32_t Allocate() {
    if (open_.empty()) AddChunk();
    const uint32_t index = *open_.begin();
    Chunk& chunk = chunks_[index];
    if (!chunk.items) chunk.items = std::make_unique<T[]>(kChunkSize);
    uint32_t offset = chunk.free_head;
    if (offset == kNone) {
      offset = chunk.fresh++;
    } else {
      chunk.free_head = chunk.items[offset].FreeLink();
      chunk.items[offset] = T{};
    }
    if (++chunk.used == kChunkSize) open_.erase(open_.begin());
    ++used_;
    return (index << kChunkBits) | offset;
  }

  // REQUIRES: `id` is in use.
  void Free(uint32_t id) {
    const uint32_t index = id >> kChunkBits;
    Chunk& chunk = chunks_[index];
    T& item = chunk.items[id & kMask];
    item = T{};
    item.FreeLink() = chunk.free_head;
    chunk.free_head = id & kMask;
    if (chunk.used == kChunkSize) open_.insert(index);
    --used_;
    if (--chunk.used == 0) ReleaseChunk(index);
  }

  T& operator[](uint32_t id) { return chunks_[id >> kChunkBits].items[id & kMask]; }
  const T& operator[](uint32_t id) const { return chunks_[id >> kChunkBits].items[id & kMask]; }

  // The record of `id`, free or in use, or null where there is no memory for it.
  const T* Find(uint32_t id) const {
    const size_t index = id >> kChunkBits;
    if (index >= chunks_.size() || !chunks_[index].items) return nullptr;
    return &chunks_[index].items[id & kMask];
  }

  uint32_t used() const { return used_; }

  // Calls visit(id, record) for every record in memory, free ones included, in the order of ids.
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (size_t index = 0; index < chunks_.size(); ++index) {
      const Chunk& chunk = chunks_[index];
      if (!chunk.items) continue;
      for (uint32_t offset = 0; offset < chunk.fresh; ++offset) {
        visit(static_cast<uint32_t>(index << kChunkBits) | offset, chunk.items[offset]);
      }
    }
  }

  // The same from the record `first` on, until visit() returns false; returns the id behind the last one visited, or
  // kNone where there are no more.
  template <typename Visit>
  uint32_t VisitFrom(uint32_t first, Visit visit) const {
    uint32_t offset = first & kMask;
    for (size_t index = first >> kChunkBits; index < chunks_.size(); ++index, offset = 0) {
      const Chunk& chunk = chunks_[index];
      if (!chunk.items) continue;
      for (; offset < chunk.fresh; ++offset) {
        const uint32_t id = static_cast<uint32_t>(index << kChunkBits) | offset;
        if (!visit(id, chunk.items[offset])) return id + 1;
      }
    }
    return kNone;
  }

  size_t bytes() const {
    return chunks_.capacity() * sizeof(Chunk) + open_.size() * kOpenEntryBytes + resident_chunks() * kChunkSize * sizeof(T);
  }

 private:
  static constexpr uint32_t kChunkSize = 1u << kChunkBits;
  static constexpr uint32_t kMask = kChunkSize - 1;
  static constexpr size_t kOpenEntryBytes = 40;  // a node of the set

  struct Chunk {
    std::unique_ptr<T[]> items;
    uint32_t used = 0;
    uint32_t fresh = 0;  // records from here on were never used
    uint32_t free_head = kNone;
  };

  void AddChunk() {
    if (chunks_.size() >= (kNone >> kChunkBits)) throw std::length_error("the pool is out of 32-bit ids");
    open_.insert(static_cast<uint32_t>(chunks_.size()));
    chunks_.emplace_back();
  }

  void ReleaseChunk(uint32_t index) {
    chunks_[index] = Chunk{};
    while (!chunks_.empty() && chunks_.back().used == 0) {
      open_.erase(static_cast<uint32_t>(chunks_.size() - 1));
      chunks_.pop_back();
    }
    if (chunks_.capacity() > 4 * chunks_.size() + 16) chunks_.shrink_to_fit();
  }

  size_t resident_chunks() const {
    size_t count = 0;
    for (const Chunk& chunk : chunks_) count += chunk.items != nullptr;
    return count;
  }

  std::vector<Chunk> chunks_;
  std::set<uint32_t> open_;  // chunks that have room; the lowest is filled first, so that high ones drain
  uint32_t used_ = 0;
};

}  // namespace kvstore
