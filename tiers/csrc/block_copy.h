// The copies of copy_kernels.cuh, made by the CPU: one memcpy for each row, shared out among threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy_piece.cuh"

namespace kvstore {

struct BlockCopy {
  const Piece* pieces;
  size_t piece_count;
  const int64_t* block_ids;
  const int64_t* row_ids;
  size_t block_count;
  uint64_t packed_address;
  int64_t packed_stride;
};

// Copies from the engine's memory into packed rows. `threads` includes the calling one; less help where the system gives
// no thread. Returns when all is copied.
void Gather(const BlockCopy& copy, unsigned int threads);

// The same from packed rows into the engine's memory.
void Scatter(const BlockCopy& copy, unsigned int threads);

// Copies `count` runs of bytes, each from an address to another, on the calling thread. Targets must not overlap.
void CopyRuns(const uint64_t* targets, const uint64_t* sources, const uint64_t* sizes, size_t count);

}  // namespace kvstore
