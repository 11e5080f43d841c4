// Gather and scatter between an engine's paged KV memory and packed blocks, for all pieces of all blocks in one launch.
//
// A warp copies one tile (at most kTileBytes of one row) at a time and goes on with the next tile that no other warp has,
// so the grid is as large as the number of multiprocessors that the copy may take, whatever it copies. Accesses are 16
// bytes wide where source and destination are equally aligned; what lies before and behind is copied in bytes. There
// are no barriers and no shared memory: every thread depends on itself alone, which lets the same text run on a CPU.
//
// Numbers of tiles are 32 bits wide: the caller keeps tiles x blocks below 2^31 (divisions of 64 bits would cost more
// instructions than the copy of a tile). The pieces of one call are table[0..pieces), sorted by first_tile; that of
// table[pieces] tells where they end.
#include "copy_piece.cuh"

namespace kvstore {

constexpr unsigned int kWarpThreads = 32;
constexpr unsigned int kThreads = 1024;
constexpr int kUnroll = 4;

struct Blocks {
  // Numbers of the engine's blocks, and of the rows they have in packed memory.
  const long long* block_ids;
  const long long* row_ids;
  unsigned int count;
  unsigned long long packed_address;
  long long packed_stride;
};

// The last piece that begins at or before `tile`.
__device__ inline const Piece* PieceOf(const Piece* table, unsigned int pieces, unsigned int tile) {
  unsigned int low = 0;
  unsigned int high = pieces;
  while (high - low > 1) {
    const unsigned int middle = (low + high) / 2;
    if (table[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return table + low;
}

// Copies whole words from `lane` on. All loads of a round are issued before its first store.
template <typename Word>
__device__ inline void CopyWords(Word* target, const Word* source, unsigned int words, unsigned int lane) {
  unsigned int at = lane;
#pragma unroll 1
  for (; at + (kUnroll - 1) * kWarpThreads < words; at += kUnroll * kWarpThreads) {
    Word loaded[kUnroll];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) loaded[step] = __ldcs(source + at + step * kWarpThreads);
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) __stcs(target + at + step * kWarpThreads, loaded[step]);
  }
#pragma unroll 1
  for (; at < words; at += kWarpThreads) __stcs(target + at, __ldcs(source + at));
}

// Bytes up to the first address that a Word may have, whole words, and the bytes behind.
template <typename Word>
__device__ inline void CopyAligned(unsigned char* target, const unsigned char* source, unsigned int bytes,
                                   unsigned int lane) {
  constexpr unsigned int kWidth = sizeof(Word);
  const unsigned int misaligned = static_cast<unsigned int>(reinterpret_cast<unsigned long long>(source) % kWidth);
  unsigned int head = misaligned ? kWidth - misaligned : 0;
  if (head > bytes) head = bytes;
  const unsigned int words = (bytes - head) / kWidth;
  const unsigned int tail = head + words * kWidth;
  if (lane < head) target[lane] = source[lane];
  CopyWords(reinterpret_cast<Word*>(target + head), reinterpret_cast<const Word*>(source + head), words, lane);
  if (tail + lane < bytes) target[tail + lane] = source[tail + lane];
}

__device__ inline void CopyTile(unsigned char* target, const unsigned char* source, unsigned int bytes,
                                unsigned int lane) {
  const unsigned long long apart =
      reinterpret_cast<unsigned long long>(target) ^ reinterpret_cast<unsigned long long>(source);
  if (apart % sizeof(uint4) == 0) {
    CopyAligned<uint4>(target, source, bytes, lane);
  } else if (apart % sizeof(uint2) == 0) {
    CopyAligned<uint2>(target, source, bytes, lane);
  } else if (apart % sizeof(unsigned int) == 0) {
    CopyAligned<unsigned int>(target, source, bytes, lane);
  } else if (apart % sizeof(unsigned short) == 0) {
    CopyAligned<unsigned short>(target, source, bytes, lane);
  } else {
    CopyWords(target, source, bytes, lane);
  }
}

enum class Direction { kGather, kScatter };

template <Direction direction>
__device__ inline void CopyBlocks(const Piece* table, unsigned int pieces, const Blocks& blocks) {
  const unsigned int lane = threadIdx.x % kWarpThreads;
  const unsigned int block_warps = blockDim.x / kWarpThreads;
  const unsigned int warps = gridDim.x * block_warps;
  const unsigned int begin = table[0].first_tile;
  const unsigned int tiles = table[pieces].first_tile - begin;
  const unsigned int items = tiles * blocks.count;
  for (unsigned int item = blockIdx.x * block_warps + threadIdx.x / kWarpThreads; item < items; item += warps) {
    const unsigned int block = item / tiles;
    const unsigned int tile = begin + item % tiles;
    const Piece& piece = *PieceOf(table, pieces, tile);
    const unsigned int row_tiles = (piece.row_bytes + kTileBytes - 1) / kTileBytes;
    const unsigned long long row = (tile - piece.first_tile) / row_tiles;
    const unsigned int offset = (tile - piece.first_tile) % row_tiles * kTileBytes;
    const unsigned int left = piece.row_bytes - offset;
    unsigned char* const paged = reinterpret_cast<unsigned char*>(
        piece.address + blocks.block_ids[block] * piece.block_stride + row * piece.row_stride + offset);
    unsigned char* const packed =
        reinterpret_cast<unsigned char*>(blocks.packed_address + blocks.row_ids[block] * blocks.packed_stride +
                                         piece.packed_offset + row * piece.row_bytes + offset);
    const unsigned int bytes = left < kTileBytes ? left : kTileBytes;
    if (direction == Direction::kGather) {
      CopyTile(packed, paged, bytes, lane);
    } else {
      CopyTile(paged, packed, bytes, lane);
    }
  }
}

}  // namespace kvstore

extern "C" __global__ void __launch_bounds__(kvstore::kThreads, 1)
    kvstore_gather(const kvstore::Piece* table, unsigned int pieces, const long long* block_ids,
                   const long long* row_ids, unsigned int count, unsigned long long packed_address,
                   long long packed_stride) {
  kvstore::CopyBlocks<kvstore::Direction::kGather>(
      table, pieces, kvstore::Blocks{block_ids, row_ids, count, packed_address, packed_stride});
}

extern "C" __global__ void __launch_bounds__(kvstore::kThreads, 1)
    kvstore_scatter(const kvstore::Piece* table, unsigned int pieces, const long long* block_ids,
                    const long long* row_ids, unsigned int count, unsigned long long packed_address,
                    long long packed_stride) {
  kvstore::CopyBlocks<kvstore::Direction::kScatter>(
      table, pieces, kvstore::Blocks{block_ids, row_ids, count, packed_address, packed_stride});
}
