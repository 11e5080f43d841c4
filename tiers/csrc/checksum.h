// XXH3-64 (unkeyed, seed 0) of more than 240 bytes, while they are copied. The algorithm is that of the XXH3
// specification: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

// Shorter inputs are hashed by other rules, which are not here.
constexpr size_t kDigestBytesMin = 241;

// Copies and returns the digest of what was written to `target`, in one pass: each word is read once, and that reading is
// both stored and hashed. The two must not overlap.
uint64_t CopyAndDigest(unsigned char* target, const unsigned char* source, size_t bytes);

}  // namespace kvstore
