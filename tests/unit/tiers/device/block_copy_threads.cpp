// Gathers and scatters with several threads, below and above the size from which stores are streamed, for sanitizers:
// every buffer has exactly the bytes that are copied. Ends with 1 at the first byte that is wrong.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "block_copy.h"

namespace {

using namespace kvstore;

struct Shape {
  size_t blocks, rows, row_bytes, gap, misaligned;
};

// As new[] but with the first byte `misaligned` bytes behind a multiple of 64, and nothing behind the last.
struct Buffer {
  Buffer(size_t bytes, size_t misaligned) {
    if (posix_memalign(&allocation, 64, misaligned + bytes) != 0) std::exit(2);
    data = static_cast<unsigned char*>(allocation) + misaligned;
  }
  ~Buffer() { std::free(allocation); }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data); }

  void* allocation = nullptr;
  unsigned char* data;
};

bool RoundTrip(const Shape& shape) {
  const size_t stride = shape.row_bytes + shape.gap, block_bytes = shape.rows * shape.row_bytes;
  const size_t paged_bytes = shape.blocks * shape.rows * stride - shape.gap;
  Buffer paged(paged_bytes, shape.misaligned), packed(shape.blocks * block_bytes, 3 * shape.misaligned);
  for (size_t at = 0; at < paged_bytes; ++at) paged.data[at] = static_cast<unsigned char>(at * 31 + at / 251);
  const std::vector<unsigned char> before(paged.data, paged.data + paged_bytes);
  const Piece piece{paged.address(), static_cast<long long>(shape.rows * stride), static_cast<long long>(stride), 0,
                    static_cast<unsigned>(shape.rows), static_cast<unsigned>(shape.row_bytes), 0, 0};
  std::vector<int64_t> ids(shape.blocks), places(shape.blocks);
  std::iota(ids.rbegin(), ids.rend(), 0);
  std::iota(places.begin(), places.end(), 0);
  const BlockCopy copy{&piece, 1, ids.data(), places.data(), ids.size(), packed.address(), static_cast<int64_t>(block_bytes)};
  Gather(copy, 4);
  for (size_t block = 0; block < shape.blocks; ++block) {
    for (size_t at = 0; at < block_bytes; ++at) {
      const size_t from = (ids[block] * shape.rows + at / shape.row_bytes) * stride + at % shape.row_bytes;
      if (packed.data[block * block_bytes + at] != before[from]) return false;
    }
  }
  for (size_t block = 0; block < shape.blocks; ++block) {
    for (size_t row = 0; row < shape.rows; ++row) {
      std::fill_n(paged.data + (block * shape.rows + row) * stride, shape.row_bytes, 0xA5);
    }
  }
  Scatter(copy, 4);
  return std::equal(before.begin(), before.end(), paged.data);
}

}  // namespace

int main() {
  const Shape shapes[] = {{3, 1, 1, 0, 1},       {7, 3, 100, 9, 0},      {64, 4, 4096, 16, 8},  {40, 4, 120001, 7, 5},
                          {300, 2, 40000, 0, 63}, {1100, 1, 16384, 64, 0}, {33, 1, 600000, 0, 16}};
  for (const Shape& shape : shapes) {
    if (!RoundTrip(shape)) {
      std::printf("wrong: rows of %zu bytes\n", shape.row_bytes);
      return 1;
    }
  }
}
