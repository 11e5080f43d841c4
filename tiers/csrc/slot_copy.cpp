#include "slot_copy.h"

#include <algorithm>
#include <vector>

#include "block_copy.h"

namespace kvstore {

namespace {

// A run of bytes that is contiguous in the tier and in the rows.
struct Span {
  uint64_t inside;
  uint64_t outside;
  uint64_t bytes;
};

void Append(std::vector<Span>& spans, const Span& span) {
  if (!spans.empty()) {
    Span& last = spans.back();
    if (last.inside + last.bytes == span.inside && last.outside + last.bytes == span.outside) {
      last.bytes += span.bytes;
      return;
    }
  }
  spans.push_back(span);
}

// Where an extent lies in the table; neighbours in `slots` are mostly in one extent, so the last answer is tried first.
bool Find(const SlotTable& table, int64_t slot, size_t& extent) {
  const auto holds = [&](size_t at) { return table.firsts[at] <= slot && slot < table.firsts[at] + table.counts[at]; };
  if (extent < table.extent_count && holds(extent)) return true;
  const int64_t* after = std::upper_bound(table.firsts, table.firsts + table.extent_count, slot);
  if (after == table.firsts) return false;
  extent = static_cast<size_t>(after - table.firsts) - 1;
  return holds(extent);
}

bool Spans(const SlotTable& table, const uint32_t* slots, size_t slot_count, const Rows& rows,
           std::vector<Span>& spans) {
  size_t extent = table.extent_count;
  for (size_t row = 0; row < slot_count; ++row) {
    if (!Find(table, slots[row], extent)) return false;
    const auto index = static_cast<uint64_t>(slots[row] - table.firsts[extent]);
    uint64_t outside = rows.address + row * rows.stride;
    for (size_t part = rows.first_part; part < rows.end_part; ++part) {
      const uint64_t bytes = table.part_bytes[part];
      Append(spans, {table.starts[extent * table.part_count + part] + index * bytes, outside, bytes});
      outside += bytes;
    }
  }
  return true;
}

}  // namespace

bool WriteSlots(const SlotTable& table, const uint32_t* slots, size_t slot_count, const Rows& rows) {
  std::vector<Span> spans;
  if (!Spans(table, slots, slot_count, rows, spans)) return false;
  std::vector<CopyRun> runs;
  runs.reserve(spans.size());
  for (const Span& span : spans) {
    runs.push_back({reinterpret_cast<unsigned char*>(span.inside),
                    reinterpret_cast<const unsigned char*>(span.outside), span.bytes});
  }
  CopyRuns(runs);
  return true;
}

bool ReadSlots(const SlotTable& table, const uint32_t* slots, size_t slot_count, const Rows& rows) {
  std::vector<Span> spans;
  if (!Spans(table, slots, slot_count, rows, spans)) return false;
  std::vector<CopyRun> runs;
  runs.reserve(spans.size());
  for (const Span& span : spans) {
    runs.push_back({reinterpret_cast<unsigned char*>(span.outside),
                    reinterpret_cast<const unsigned char*>(span.inside), span.bytes});
  }
  CopyRuns(runs);
  return true;
}

}  // namespace kvstore
