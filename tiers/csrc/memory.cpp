#include "memory.h"

#include <cerrno>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvstore {

namespace {

void* AsPointer(uint64_t address) { return reinterpret_cast<void*>(address); }

int ErrorOf(int result) { return result == 0 ? 0 : errno; }

void* Map(int fd, size_t bytes, size_t alignment, int protection) {
  // More than is wanted, to have an aligned piece in it; what is left over is returned at once.
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t whole = (bytes + page - 1) / page * page;
  const size_t span = whole + alignment;
  void* reserved = mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  const auto first = reinterpret_cast<uint64_t>(reserved);
  const uint64_t aligned = (first + alignment - 1) / alignment * alignment;
  void* mapped = mmap(AsPointer(aligned), bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    munmap(reserved, span);
    errno = error;
    return nullptr;
  }
  if (aligned > first) munmap(reserved, aligned - first);
  if (first + span > aligned + whole) munmap(AsPointer(aligned + whole), first + span - aligned - whole);
  return mapped;
}

}  // namespace

void* MapShared(int fd, size_t bytes, size_t alignment) { return Map(fd, bytes, alignment, PROT_READ | PROT_WRITE); }

void* MapReadOnly(int fd, size_t bytes, size_t alignment) {
  void* mapped = Map(fd, bytes, alignment, PROT_READ);
  if (mapped != nullptr && madvise(mapped, bytes, MADV_DONTFORK) != 0) {
    const int error = errno;
    munmap(mapped, bytes);
    errno = error;
    return nullptr;
  }
  return mapped;
}

void Unmap(void* address, size_t bytes) { munmap(address, bytes); }

int AdviseHuge(uint64_t address, size_t bytes) { return ErrorOf(madvise(AsPointer(address), bytes, MADV_HUGEPAGE)); }

int Populate(uint64_t address, size_t bytes) {
  return ErrorOf(madvise(AsPointer(address), bytes, MADV_POPULATE_WRITE));
}

void Touch(uint64_t address, size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  auto* bytes_there = static_cast<unsigned char*>(AsPointer(address));
  for (size_t at = 0; at < bytes; at += page) __atomic_fetch_add(bytes_there + at, 0, __ATOMIC_RELAXED);
}

int LockPages(uint64_t address, size_t bytes) { return ErrorOf(mlock(AsPointer(address), bytes)); }

int UnlockPages(uint64_t address, size_t bytes) { return ErrorOf(munlock(AsPointer(address), bytes)); }

}  // namespace kvstore
