// Shared memory of the host tier: mapping, touching and locking it. Nothing here knows Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

// Maps a file readable and writable, at a multiple of `alignment` (a power of two of at least a page), so that huge pages
// fit. Returns nullptr with errno set where that cannot be.
void* MapShared(int fd, size_t bytes, size_t alignment);

// Maps another process's memory for reading alone, aligned as above. The child of a fork does not have the mapping.
void* MapReadOnly(int fd, size_t bytes, size_t alignment);

void Unmap(void* address, size_t bytes);

// Each of these returns 0 or an errno. Addresses and sizes are multiples of a page.

// Asks for huge pages in a mapping.
int AdviseHuge(uint64_t address, size_t bytes);

// Brings all pages in, zeroed where they are new, and writable at once. Changes no byte, so others may use the memory
// meanwhile. EINVAL where the kernel is older than 5.14; see Touch.
int Populate(uint64_t address, size_t bytes);

// The same by an atomic addition of nothing to each page, for older kernels. A page that cannot be had ends the process,
// so the file must have been allocated.
void Touch(uint64_t address, size_t bytes);

// mlock and munlock.
int LockPages(uint64_t address, size_t bytes);
int UnlockPages(uint64_t address, size_t bytes);

}  // namespace kvstore
