// Copies between the slots of a host pool and rows of bytes; see kvstore/tiers/host_copy.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

// Extents by their first slot, ascending: extent e holds slots [firsts[e], firsts[e] + counts[e]), and part p of its slot i
// begins at starts[e * part_count + p] + i * part_bytes[p].
struct SlotTable {
  const int64_t* firsts;
  const int64_t* counts;
  const uint64_t* starts;
  size_t extent_count;
  const uint64_t* part_bytes;
  size_t part_count;
};

// Rows of contiguous bytes, `stride` apart, each with the parts [first_part, end_part) of a slot one after the other.
struct Rows {
  uint64_t address;
  uint64_t stride;
  size_t first_part;
  size_t end_part;
};

// Each copies one row for each slot, on the calling thread. False, and nothing is copied, if a slot is in no extent.
bool WriteSlots(const SlotTable& table, const uint32_t* slots, size_t slot_count, const Rows& rows);
bool ReadSlots(const SlotTable& table, const uint32_t* slots, size_t slot_count, const Rows& rows);

}  // namespace kvstore
