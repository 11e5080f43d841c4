// The histories of an edge: stretches of its blocks, each with one history, in the order of the blocks. Depths are those
// of blocks in their prefix, so that they survive splits and merges of edges.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "policy.h"

namespace kvstore {

class Runs {
 public:
  bool empty() const { return runs_.empty(); }
  size_t size() const { return runs_.size(); }
  size_t bytes() const { return runs_.capacity() * sizeof(History); }
  uint32_t end() const { return runs_.back().end; }
  const std::vector<History>& all() const { return runs_; }

  // The run that the block at `depth` lies in. REQUIRES: there is one.
  const History& At(uint32_t depth) const { return runs_[IndexOf(depth)]; }

  // Where that run begins, on an edge that begins at `edge_begin`.
  uint32_t BeginOf(uint32_t depth, uint32_t edge_begin) const {
    const size_t index = IndexOf(depth);
    return index == 0 ? edge_begin : runs_[index - 1].end;
  }

  // Adds blocks up to `end`, behind all others.
  void Append(const History& history, uint32_t end) {
    if (!runs_.empty() && runs_.back() == history) {
      runs_.back().end = end;
      return;
    }
    runs_.push_back(history);
    runs_.back().end = end;
  }

  // Replaces the histories of the blocks [begin, end) by change(history, begin of the run, end of it).
  template <typename Change>
  void Update(uint32_t edge_begin, uint32_t begin, uint32_t end, Change change) {
    if (begin == edge_begin && end >= runs_.back().end && runs_.size() == 1) {  // an edge is most often one run
      const uint32_t run_end = runs_.back().end;
      runs_.back() = change(runs_.back(), begin, run_end);
      runs_.back().end = run_end;
      return;
    }
    std::vector<History> before;
    before.swap(runs_);
    runs_.reserve(before.size());
    uint32_t run_begin = edge_begin;
    for (const History& run : before) {
      const uint32_t first = std::max(run_begin, begin);
      const uint32_t last = std::min(run.end, end);
      if (first >= last) {
        Append(run, run.end);
      } else {
        if (run_begin < first) Append(run, first);
        Append(change(run, first, last), last);
        if (last < run.end) Append(run, run.end);
      }
      run_begin = run.end;
    }
  }

  // Calls visit(history, begin, end) for each run within [begin, end).
  template <typename Visit>
  void ForEach(uint32_t edge_begin, uint32_t begin, uint32_t end, Visit visit) const {
    uint32_t run_begin = edge_begin;
    for (const History& run : runs_) {
      const uint32_t first = std::max(run_begin, begin);
      const uint32_t last = std::min(run.end, end);
      if (first < last) visit(run, first, last);
      run_begin = run.end;
    }
  }

  // Takes the blocks from `depth` on away and returns their runs.
  Runs SplitAt(uint32_t depth) {
    Runs tail;
    const size_t index = IndexOf(depth - 1);
    if (runs_[index].end > depth) tail.runs_.push_back(runs_[index]);
    tail.runs_.insert(tail.runs_.end(), runs_.begin() + static_cast<std::ptrdiff_t>(index) + 1, runs_.end());
    runs_.resize(index + 1);
    runs_.back().end = depth;
    runs_.shrink_to_fit();
    return tail;
  }

  // Keeps the blocks before `depth` alone.
  void Truncate(uint32_t edge_begin, uint32_t depth) {
    if (depth <= edge_begin) {
      runs_.clear();
    } else if (!runs_.empty() && depth < end()) {
      SplitAt(depth);
    }
  }

  void Prepend(const Runs& head) {
    Runs joined = head;
    for (const History& run : runs_) joined.Append(run, run.end);
    *this = std::move(joined);
  }

 private:
  friend class Surgeon;  // of the tests

  size_t IndexOf(uint32_t depth) const {
    const auto found = std::upper_bound(runs_.begin(), runs_.end(), depth,
                                        [](uint32_t value, const History& run) { return value < run.end; });
    return static_cast<size_t>(found - runs_.begin());
  }

  std::vector<History> runs_;
};

}  // namespace kvstore
