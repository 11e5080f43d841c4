// What a copy is told of an engine's memory. Read by the CUDA kernels and by the copies on the CPU alike, so it uses
// nothing but built-in types. kvstore/tiers/device_pages.py writes the same bytes (PIECE_DTYPE).
#ifndef KVSTORE_COPY_PIECE_CUH
#define KVSTORE_COPY_PIECE_CUH

namespace kvstore {

// What one warp copies at a time.
constexpr unsigned int kTileBytes = 4096;

// One of the runs of bytes that a block has in an engine: `rows` rows of `row_bytes`, `row_stride` apart. Block b of the
// engine has them at address + b * block_stride. In a packed block they lie behind each other from `packed_offset` on.
struct Piece {
  unsigned long long address;
  long long block_stride;
  long long row_stride;
  unsigned long long packed_offset;
  unsigned int rows;
  unsigned int row_bytes;
  // Tiles of one block in the pieces before this one; a tile is kTileBytes of one row, or what a row has left.
  unsigned int first_tile;
  unsigned int reserved;
};

static_assert(sizeof(Piece) == 48, "PIECE_DTYPE has 48 bytes");

}  // namespace kvstore

#endif  // KVSTORE_COPY_PIECE_CUH
