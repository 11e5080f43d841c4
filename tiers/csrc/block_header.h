// Headers of parts of blocks, many at a time: sealing those that are written, checking those that are read, with the
// checksums of their payloads. kvstore/tiers/header.py has the format.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

// On disk: never renumber. Where the digest of the payload lies, and where the token ids begin.
constexpr size_t kPayloadDigestAt = 128;
constexpr size_t kTokensAt = 136;

enum class Verdict : uint8_t { kGood = 0, kCorruptHeader = 1, kOtherBlock = 2, kCorruptPayload = 3 };

// One part of one block: the page that has its header, and its payload, which goes from `source` to `target`. It stays
// where the two are the same address.
struct Part {
  uint64_t page;
  uint64_t source;
  uint64_t target;
  uint64_t payload_bytes;
};

// Copies payloads, zeroing the rest of their last page of `kPageBytes`, puts their digests into `headers`, and these,
// sealed, into pages of `page_bytes`, whose rest becomes zero. Headers are `header_bytes` long and right but for both digests.
void SealHeaders(const Part* parts, size_t count, uint8_t* headers, size_t header_bytes, size_t page_bytes);

// Checks pages and payloads against `headers`, whose digests and writers do not count, and copies payloads. What was copied is
// undefined where the verdict is not kGood.
void CheckHeaders(const Part* parts, size_t count, const uint8_t* headers, size_t header_bytes, size_t page_bytes,
                  Verdict* verdicts);

}  // namespace kvstore
