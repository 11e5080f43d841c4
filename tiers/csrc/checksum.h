// XXH3-64 (unkeyed, seed 0), also of bytes while they are copied. The algorithm is that of the XXH3 specification:
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

// The digest of any number of bytes.
uint64_t Digest(const unsigned char* data, size_t bytes);

// Shorter inputs are hashed by other rules, and not while they are copied.
constexpr size_t kDigestBytesMin = 241;

// Copies and returns the digest of what was written to `target`, in one pass: each word is read once, and that reading is
// both stored and hashed. The two must not overlap. At least kDigestBytesMin bytes.
uint64_t CopyAndDigest(unsigned char* target, const unsigned char* source, size_t bytes);

}  // namespace kvstore
