#include "block_copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace kvstore {

namespace {

// Less than this is not worth a thread (starting one takes tens of microseconds), nor a trip to the shared counter.
constexpr uint64_t kShareBytes = 512 << 10;

enum class Direction { kGather, kScatter };

template <Direction direction>
void CopyPiece(const BlockCopy& copy, size_t block, const Piece& piece) {
  auto* paged = reinterpret_cast<unsigned char*>(piece.address + copy.block_ids[block] * piece.block_stride);
  auto* packed = reinterpret_cast<unsigned char*>(copy.packed_address + copy.row_ids[block] * copy.packed_stride +
                                                  piece.packed_offset);
  for (unsigned int row = 0; row < piece.rows; ++row) {
    if (direction == Direction::kGather) {
      std::memcpy(packed, paged, piece.row_bytes);
    } else {
      std::memcpy(paged, packed, piece.row_bytes);
    }
    paged += piece.row_stride;
    packed += piece.row_bytes;
  }
}

uint64_t BlockBytes(const BlockCopy& copy) {
  uint64_t bytes = 0;
  for (size_t piece = 0; piece < copy.piece_count; ++piece) {
    bytes += static_cast<uint64_t>(copy.pieces[piece].rows) * copy.pieces[piece].row_bytes;
  }
  return bytes;
}

// An item is one piece of one block. Threads take a share of neighbouring items at a time, so that one which is held up
// by the system leaves its work to the others.
template <Direction direction>
void Run(const BlockCopy& copy, unsigned int threads) {
  const size_t items = copy.block_count * copy.piece_count;
  if (items == 0) return;
  const uint64_t bytes = BlockBytes(copy) * copy.block_count;
  const size_t shares = std::clamp<size_t>(bytes / kShareBytes, 1, items);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t share = next++; share < shares; share = next++) {
      for (size_t item = items * share / shares; item < items * (share + 1) / shares; ++item) {
        CopyPiece<direction>(copy, item / copy.piece_count, copy.pieces[item % copy.piece_count]);
      }
    }
  };
  std::vector<std::thread> helpers;
  const size_t wanted = std::min<size_t>(threads, shares);
  helpers.reserve(wanted);
  try {
    while (helpers.size() + 1 < wanted) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // No more threads to be had: those that there are do the work.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

void Gather(const BlockCopy& copy, unsigned int threads) { Run<Direction::kGather>(copy, threads); }

void Scatter(const BlockCopy& copy, unsigned int threads) { Run<Direction::kScatter>(copy, threads); }

}  // namespace kvstore
