// Runs cases given on stdin through the copy kernels and prints what memory holds afterwards. Every buffer has exactly
// the bytes of its case, so that a sanitizer sees the first byte too far.
//
// A case, in native u64: direction (0 gather, 1 scatter), grid, threads, pieces of the call, first piece, rows of the
// table, blocks, packed bytes, packed misalignment, packed stride, regions; for each region its bytes and misalignment.
// Then the table, with the number of a region in place of each address's upper half; block ids; row ids; the regions'
// bytes; the packed bytes. The answer: the regions' bytes, then the packed bytes.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cuda_on_host.h"

#include "copy_kernels.cuh"

namespace {

bool Read(void* target, size_t bytes) { return std::fread(target, 1, bytes, stdin) == bytes; }

void MustRead(void* target, size_t bytes) {
  if (!Read(target, bytes)) std::exit(2);
}

uint64_t ReadNumber() {
  uint64_t number;
  MustRead(&number, sizeof(number));
  return number;
}

template <typename T>
std::vector<T> ReadMany(size_t count) {
  std::vector<T> values(count);
  MustRead(values.data(), count * sizeof(T));
  return values;
}

// Bytes that end where the allocation ends, and begin `misaligned` bytes behind a multiple of 256.
class Region {
 public:
  Region(size_t bytes, size_t misaligned) : bytes_(bytes) {
    if (posix_memalign(&allocation_, 256, bytes + misaligned) != 0) std::exit(3);
    data_ = static_cast<unsigned char*>(allocation_) + misaligned;
  }
  Region(Region&& other) noexcept : allocation_(other.allocation_), data_(other.data_), bytes_(other.bytes_) {
    other.allocation_ = nullptr;
  }
  ~Region() { std::free(allocation_); }

  unsigned long long address() const { return reinterpret_cast<unsigned long long>(data_); }
  void Fill() { MustRead(data_, bytes_); }
  void Print() const { std::fwrite(data_, 1, bytes_, stdout); }

 private:
  void* allocation_;
  unsigned char* data_;
  size_t bytes_;
};

void RunCase(uint64_t direction) {
  const uint64_t grid = ReadNumber(), threads = ReadNumber(), pieces = ReadNumber(), first = ReadNumber();
  const uint64_t table_rows = ReadNumber(), blocks = ReadNumber();
  const uint64_t packed_bytes = ReadNumber(), packed_misaligned = ReadNumber(), packed_stride = ReadNumber();
  Region packed(packed_bytes, packed_misaligned);
  std::vector<Region> regions;
  for (uint64_t left = ReadNumber(); left > 0; --left) {
    const uint64_t bytes = ReadNumber();
    regions.emplace_back(bytes, ReadNumber());
  }
  auto table = ReadMany<kvstore::Piece>(table_rows);
  for (size_t row = 0; row + 1 < table_rows; ++row) {
    const unsigned long long coded = table[row].address;
    table[row].address = regions[coded >> 32].address() + (coded & 0xFFFFFFFF);
  }
  const auto block_ids = ReadMany<long long>(blocks), row_ids = ReadMany<long long>(blocks);
  for (Region& region : regions) region.Fill();
  packed.Fill();
  const auto kernel = direction == 0 ? kvstore_gather : kvstore_scatter;
  RunGrid(grid, threads, [&] {
    kernel(table.data() + first, pieces, block_ids.data(), row_ids.data(), blocks, packed.address(), packed_stride);
  });
  for (const Region& region : regions) region.Print();
  packed.Print();
}

}  // namespace

int main() {
  uint64_t direction;
  while (Read(&direction, sizeof(direction))) RunCase(direction);
}
