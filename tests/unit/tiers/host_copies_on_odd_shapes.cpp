// Copies of slots, and copies with their checksum, on buffers of exact size: a sanitizer sees each byte too many.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "checksum.h"
#include "slot_copy.h"

namespace {

void Require(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

std::vector<unsigned char> Random(size_t bytes, unsigned seed) {
  std::vector<unsigned char> made(bytes);
  for (unsigned char& byte : made) byte = static_cast<unsigned char>((seed = seed * 1103515245 + 12345) >> 16);
  return made;
}

// A copy at any alignment has the digest that the same bytes have at another one, and leaves what is around it.
uint64_t CheckDigest(size_t bytes, size_t source_skip, size_t target_skip) {
  const auto source = Random(bytes + source_skip, static_cast<unsigned>(bytes));
  std::unique_ptr<unsigned char[]> target(new unsigned char[bytes + target_skip]);
  std::memset(target.get(), 7, bytes + target_skip);
  std::vector<unsigned char> again(bytes);
  const uint64_t first = kvstore::CopyAndDigest(target.get() + target_skip, source.data() + source_skip, bytes);
  const uint64_t second = kvstore::CopyAndDigest(again.data(), target.get() + target_skip, bytes);
  Require(first == second, "digests differ");
  Require(std::memcmp(again.data(), source.data() + source_skip, bytes) == 0, "bytes differ");
  for (size_t at = 0; at < target_skip; ++at) Require(target[at] == 7, "bytes before the target were written");
  return first;
}

void CheckSlots(uint64_t first_bytes, uint64_t second_bytes) {
  const std::vector<int64_t> firsts{0, 3}, counts{3, 2};
  const std::vector<uint64_t> part_bytes{first_bytes, second_bytes};
  std::vector<std::vector<unsigned char>> regions;
  std::vector<uint64_t> starts;
  for (const int64_t count : counts) {
    for (const uint64_t bytes : part_bytes) {
      regions.emplace_back(static_cast<size_t>(count) * bytes, 0);
      starts.push_back(reinterpret_cast<uint64_t>(regions.back().data()));
    }
  }
  const kvstore::SlotTable table{firsts.data(), counts.data(), starts.data(), 2, part_bytes.data(), 2};
  const std::vector<uint32_t> slots{4, 0, 1, 3, 2};
  const uint64_t width = first_bytes + second_bytes;
  auto rows = Random(slots.size() * width, 5);
  std::vector<unsigned char> read(rows.size());
  const auto rows_of = [&](std::vector<unsigned char>& bytes) {
    return kvstore::Rows{reinterpret_cast<uint64_t>(bytes.data()), width, 0, 2};
  };
  Require(kvstore::WriteSlots(table, slots.data(), slots.size(), rows_of(rows)), "slots were not found");
  Require(kvstore::ReadSlots(table, slots.data(), slots.size(), rows_of(read)), "slots were not found");
  Require(rows == read, "what was read is not what was written");
  const std::vector<uint32_t> foreign{1, 5};
  Require(!kvstore::WriteSlots(table, foreign.data(), foreign.size(), rows_of(rows)), "a foreign slot was found");
}

}  // namespace

// Says what all digests come to, for a program with the other way to make them.
int main() {
  uint64_t digests = 0;
  for (const size_t bytes : {241, 256, 1023, 1024, 1025, 1087, 1088, 1089, 2049, 70001, (1 << 20) + 1025}) {
    for (const size_t skip : {0, 1, 31, 32}) {
      digests = digests * 31 + CheckDigest(bytes, skip, 32 - skip);
    }
  }
  CheckSlots(1, 1);
  CheckSlots(4096, 333);
  CheckSlots(5 << 20, 16 << 10);
  std::printf("%llx\n", static_cast<unsigned long long>(digests));
  return 0;
}
