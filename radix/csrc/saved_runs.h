// Histories by the key of the first block of their run, in one piece of memory: a million are found in the time that a
// map of nodes takes to be made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "mix.h"
#include "policy.h"
#include "siphash.h"

namespace kvstore {

class SavedRuns {
 public:
  // For at most `run_count` of them.
  SavedRuns(size_t run_count, uint64_t seed) : seed_(seed) {
    size_t size = 16;
    while (size < 2 * run_count) size *= 2;
    entries_.resize(size);
    runs_.reserve(run_count);
  }

  // Of two with one key the first stays.
  void Add(const Key128& key, const History& history) {
    const uint64_t hash = HashOf(key);
    const size_t place = PlaceOf(key, hash);
    if (entries_[place].run != kNone) return;
    entries_[place] = Entry{static_cast<uint32_t>(hash >> 32), static_cast<uint32_t>(runs_.size())};
    runs_.push_back(Run{key, history});
  }

  // Null where there is none. Valid as long as this.
  const History* Find(const Key128& key) const {
    const uint32_t run = entries_[PlaceOf(key, HashOf(key))].run;
    return run == kNone ? nullptr : &runs_[run].history;
  }

 private:
  struct Entry {
    uint32_t tag = 0;
    uint32_t run = kNone;
  };
  struct Run {
    Key128 key;
    History history;
  };

  uint64_t HashOf(const Key128& key) const {
    uint64_t words[2];
    std::memcpy(words, key.bytes, sizeof(words));
    return Mix(Mix(words[0] ^ seed_, kMixFactor) ^ words[1], kMixFactor);
  }

  // Where the key is, or where it would be.
  size_t PlaceOf(const Key128& key, uint64_t hash) const {
    const size_t mask = entries_.size() - 1;
    const auto tag = static_cast<uint32_t>(hash >> 32);
    size_t place = hash & mask;
    for (; entries_[place].run != kNone; place = (place + 1) & mask) {
      const Entry& entry = entries_[place];
      if (entry.tag == tag && std::memcmp(runs_[entry.run].key.bytes, key.bytes, sizeof(key.bytes)) == 0) break;
    }
    return place;
  }

  const uint64_t seed_;
  std::vector<Entry> entries_;
  std::vector<Run> runs_;
};

}  // namespace kvstore
