// The copies of copy_kernels.cuh, made by the CPU: one memcpy for each row, shared out among threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

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

struct CopyRun {
  unsigned char* target;
  const unsigned char* source;
  size_t bytes;
};

// Copies runs one after the other, on the calling thread. Targets must not overlap.
void CopyRuns(const std::vector<CopyRun>& runs);

}  // namespace kvstore
