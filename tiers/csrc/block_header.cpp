#include "block_header.h"

#include <cstring>

#include "checksum.h"

namespace kvstore {

namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kSealBytes = 8;
constexpr size_t kTokenBytes = 4;
// Magic and version, and the other fields that do not depend on the block.
constexpr size_t kVersionEnd = 12;
constexpr size_t kTokenCountAt = 20;
constexpr size_t kWriterAt = 40;
constexpr size_t kWriterEnd = 48;
constexpr size_t kCodecAt = 116;
constexpr size_t kCodecEnd = 120;

uint8_t* At(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

uint64_t Moved(const Part& part) {
  if (part.source == part.target) return Digest(At(part.source), part.payload_bytes);
  if (part.payload_bytes >= kDigestBytesMin) return CopyAndDigest(At(part.target), At(part.source), part.payload_bytes);
  std::memcpy(At(part.target), At(part.source), part.payload_bytes);
  return Digest(At(part.target), part.payload_bytes);
}

void PutDigest(uint8_t* at, uint64_t digest) { std::memcpy(at, &digest, sizeof digest); }

bool HasDigest(const uint8_t* at, uint64_t digest) { return std::memcmp(at, &digest, sizeof digest) == 0; }

// Whether a page begins with a whole header of this version, of any block. Sets `bytes` to its length.
bool IsHeader(const uint8_t* page, size_t page_bytes, const uint8_t* header, size_t* bytes) {
  uint32_t token_count = 0;
  std::memcpy(&token_count, page + kTokenCountAt, sizeof token_count);
  *bytes = kTokensAt + kTokenBytes * static_cast<size_t>(token_count) + kSealBytes;
  if (*bytes > page_bytes || std::memcmp(page, header, kVersionEnd) != 0) return false;
  if (std::memcmp(page + kCodecAt, header + kCodecAt, kCodecEnd - kCodecAt) != 0) return false;
  return HasDigest(page + *bytes - kSealBytes, Digest(page, *bytes - kSealBytes));
}

bool AreEqual(const uint8_t* page, const uint8_t* header, size_t begin, size_t end) {
  return std::memcmp(page + begin, header + begin, end - begin) == 0;
}

Verdict Check(const Part& part, const uint8_t* header, size_t header_bytes, size_t page_bytes) {
  const uint8_t* page = At(part.page);
  size_t found_bytes = 0;
  if (!IsHeader(page, page_bytes, header, &found_bytes)) return Verdict::kCorruptHeader;
  const bool is_this = found_bytes == header_bytes && AreEqual(page, header, 0, kWriterAt) &&
                       AreEqual(page, header, kWriterEnd, kPayloadDigestAt) &&
                       AreEqual(page, header, kTokensAt, header_bytes - kSealBytes);
  if (!is_this) return Verdict::kOtherBlock;
  return HasDigest(page + kPayloadDigestAt, Moved(part)) ? Verdict::kGood : Verdict::kCorruptPayload;
}

}  // namespace

void SealHeaders(const Part* parts, size_t count, uint8_t* headers, size_t header_bytes, size_t page_bytes) {
  for (size_t i = 0; i < count; ++i) {
    const Part& part = parts[i];
    uint8_t* header = headers + i * header_bytes;
    PutDigest(header + kPayloadDigestAt, Moved(part));
    PutDigest(header + header_bytes - kSealBytes, Digest(header, header_bytes - kSealBytes));
    if (part.source != part.target) {
      const size_t tail = part.payload_bytes % kPageBytes;
      if (tail != 0) std::memset(At(part.target) + part.payload_bytes, 0, kPageBytes - tail);
    }
    std::memcpy(At(part.page), header, header_bytes);
    std::memset(At(part.page) + header_bytes, 0, page_bytes - header_bytes);
  }
}

void CheckHeaders(const Part* parts, size_t count, const uint8_t* headers, size_t header_bytes, size_t page_bytes,
                  Verdict* verdicts) {
  for (size_t i = 0; i < count; ++i) verdicts[i] = Check(parts[i], headers + i * header_bytes, header_bytes, page_bytes);
}

}  // namespace kvstore
