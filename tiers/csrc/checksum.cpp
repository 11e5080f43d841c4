#include "checksum.h"

#include <cstring>

#if defined(__x86_64__) && !defined(KVSTORE_PLAIN_CHECKSUM)
#include <immintrin.h>
#endif

namespace kvstore {

namespace {

constexpr size_t kLanes = 8;
constexpr size_t kStripeBytes = 64;
constexpr size_t kSecretBytes = 192;
constexpr size_t kSecretStep = 8;  // how far the secret moves on with each stripe
constexpr size_t kStripesInBlock = (kSecretBytes - kStripeBytes) / kSecretStep;
constexpr size_t kBlockBytes = kStripesInBlock * kStripeBytes;
constexpr size_t kLastStripeSecret = kSecretBytes - kStripeBytes - 7;
constexpr size_t kMergeSecret = 11;
// From here on a copy goes around the caches: what it is for, a write to disk or a send, reads it once and much later.
constexpr size_t kStreamBytes = 1 << 20;
constexpr size_t kAheadBytes = 512;  // how far ahead of the hash memory is asked for

constexpr uint64_t kPrime32_1 = 0x9E3779B1U;
constexpr uint64_t kPrime32_2 = 0x85EBCA77U;
constexpr uint64_t kPrime32_3 = 0xC2B2AE3DU;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87ULL;
constexpr uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4FULL;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9ULL;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63ULL;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5ULL;
constexpr uint64_t kAvalanche = 0x165667919E3779F9ULL;
constexpr uint64_t kStrongMix = 0x9FB21C651E98DF25ULL;

// The default secret of the specification.
alignas(64) constexpr unsigned char kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie");

uint64_t Word(const unsigned char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

uint32_t HalfWord(const unsigned char* at) {
  uint32_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

struct Lanes {
  alignas(64) uint64_t lane[kLanes];
};

void Stripes(Lanes& sums, const unsigned char* data, const unsigned char* secret, size_t count) {
  for (; count > 0; --count, data += kStripeBytes, secret += kSecretStep) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const uint64_t word = Word(data + 8 * lane);
      const uint64_t mixed = word ^ Word(secret + 8 * lane);
      sums.lane[lane ^ 1] += word;
      sums.lane[lane] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
    }
  }
}

void Scramble(Lanes& sums) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    uint64_t sum = sums.lane[lane];
    sum ^= sum >> 47;
    sum ^= Word(kSecret + kSecretBytes - kStripeBytes + 8 * lane);
    sums.lane[lane] = sum * kPrime32_1;
  }
}

// How the bytes go on after the hash has seen them.
enum class Keep { kNothing, kCopy, kStreamedCopy };

void PlainBlocks(Lanes& sums, unsigned char* target, const unsigned char* data, size_t count) {
  for (; count > 0; --count, data += kBlockBytes) {
    if (target != nullptr) {
      std::memcpy(target, data, kBlockBytes);
      Stripes(sums, target, kSecret, kStripesInBlock);
      target += kBlockBytes;
    } else {
      Stripes(sums, data, kSecret, kStripesInBlock);
    }
    Scramble(sums);
  }
}

#if defined(__x86_64__) && !defined(KVSTORE_PLAIN_CHECKSUM)
#define KVSTORE_WIDE __attribute__((target("avx2")))

KVSTORE_WIDE inline __m256i Loaded(const unsigned char* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

KVSTORE_WIDE inline __m256i Mixed(__m256i sum, __m256i words, __m256i key) {
  const __m256i mixed = _mm256_xor_si256(words, key);
  const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
  const __m256i swapped = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(_mm256_add_epi64(sum, swapped), product);
}

KVSTORE_WIDE inline __m256i Scrambled(__m256i sum, __m256i key) {
  const __m256i prime = _mm256_set1_epi64x(kPrime32_1);
  const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), key);
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

// The same with four lanes in a register, the sums in registers from the first block to the last, and each word stored
// as soon as it is read.
template <Keep keep>
KVSTORE_WIDE void WideBlocks(Lanes& sums, unsigned char* target, const unsigned char* data, size_t count) {
  auto* stored = reinterpret_cast<__m256i*>(sums.lane);
  __m256i sum[2] = {_mm256_load_si256(stored), _mm256_load_si256(stored + 1)};
  for (; count > 0; --count) {
    for (size_t stripe = 0; stripe < kStripesInBlock; ++stripe, data += kStripeBytes) {
      const unsigned char* secret = kSecret + stripe * kSecretStep;
      _mm_prefetch(reinterpret_cast<const char*>(data + kAheadBytes), _MM_HINT_T0);
      for (size_t half = 0; half < 2; ++half) {
        const __m256i words = Loaded(data + 32 * half);
        auto* to = reinterpret_cast<__m256i*>(target) + half;
        if (keep == Keep::kCopy) _mm256_storeu_si256(to, words);
        if (keep == Keep::kStreamedCopy) _mm256_stream_si256(to, words);
        sum[half] = Mixed(sum[half], words, Loaded(secret + 32 * half));
      }
      if (keep != Keep::kNothing) target += kStripeBytes;
    }
    for (size_t half = 0; half < 2; ++half) {
      sum[half] = Scrambled(sum[half], Loaded(kSecret + kSecretBytes - kStripeBytes + 32 * half));
    }
  }
  if (keep == Keep::kStreamedCopy) _mm_sfence();
  _mm256_store_si256(stored, sum[0]);
  _mm256_store_si256(stored + 1, sum[1]);
}

// Hashes, and copies where there is a target.
void Blocks(Lanes& sums, unsigned char* target, const unsigned char* data, size_t count) {
  static const bool is_wide = __builtin_cpu_supports("avx2");
  if (!is_wide) return PlainBlocks(sums, target, data, count);
  if (target == nullptr) return WideBlocks<Keep::kNothing>(sums, target, data, count);
  const bool is_aligned = reinterpret_cast<uintptr_t>(target) % sizeof(__m256i) == 0;
  if (is_aligned && count * kBlockBytes >= kStreamBytes) {
    return WideBlocks<Keep::kStreamedCopy>(sums, target, data, count);
  }
  WideBlocks<Keep::kCopy>(sums, target, data, count);
}
#else
void Blocks(Lanes& sums, unsigned char* target, const unsigned char* data, size_t count) {
  PlainBlocks(sums, target, data, count);
}
#endif

Lanes Start() {
  return {{kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1}};
}

uint64_t Avalanche(uint64_t sum) {
  sum ^= sum >> 37;
  sum *= kAvalanche;
  return sum ^ (sum >> 32);
}

// That of XXH64.
uint64_t OldAvalanche(uint64_t sum) {
  sum ^= sum >> 33;
  sum *= kPrime64_2;
  sum ^= sum >> 29;
  sum *= kPrime64_3;
  return sum ^ (sum >> 32);
}

uint64_t Folded(uint64_t left, uint64_t right) {
  const auto product = static_cast<unsigned __int128>(left) * right;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// `rest` is what follows the whole blocks: 1 to kBlockBytes bytes, behind at least a stripe of data in all.
uint64_t End(Lanes& sums, const unsigned char* rest, size_t rest_bytes, size_t bytes) {
  Stripes(sums, rest, kSecret, (rest_bytes - 1) / kStripeBytes);
  Stripes(sums, rest + rest_bytes - kStripeBytes, kSecret + kLastStripeSecret, 1);
  uint64_t digest = bytes * kPrime64_1;
  for (size_t pair = 0; pair < kLanes / 2; ++pair) {
    const unsigned char* secret = kSecret + kMergeSecret + 16 * pair;
    digest += Folded(sums.lane[2 * pair] ^ Word(secret), sums.lane[2 * pair + 1] ^ Word(secret + 8));
  }
  return Avalanche(digest);
}

uint64_t FoldedPair(const unsigned char* data, const unsigned char* secret) {
  return Folded(Word(data) ^ Word(secret), Word(data + 8) ^ Word(secret + 8));
}

uint64_t DigestTo3(const unsigned char* data, size_t bytes) {
  const uint64_t mixed = static_cast<uint64_t>(data[0]) << 16 | static_cast<uint64_t>(data[bytes / 2]) << 24 |
                         data[bytes - 1] | static_cast<uint64_t>(bytes) << 8;
  return OldAvalanche(mixed ^ HalfWord(kSecret) ^ HalfWord(kSecret + 4));
}

uint64_t DigestTo8(const unsigned char* data, size_t bytes) {
  uint64_t sum = HalfWord(data + bytes - 4) + (static_cast<uint64_t>(HalfWord(data)) << 32);
  sum ^= Word(kSecret + 8) ^ Word(kSecret + 16);
  sum ^= (sum << 49 | sum >> 15) ^ (sum << 24 | sum >> 40);
  sum *= kStrongMix;
  sum ^= (sum >> 35) + bytes;
  sum *= kStrongMix;
  return sum ^ (sum >> 28);
}

uint64_t DigestTo16(const unsigned char* data, size_t bytes) {
  const uint64_t low = Word(data) ^ Word(kSecret + 24) ^ Word(kSecret + 32);
  const uint64_t high = Word(data + bytes - 8) ^ Word(kSecret + 40) ^ Word(kSecret + 48);
  return Avalanche(bytes + __builtin_bswap64(low) + high + Folded(low, high));
}

// Pairs of words from both ends, so that the middle may be taken twice.
uint64_t DigestTo128(const unsigned char* data, size_t bytes) {
  uint64_t sum = bytes * kPrime64_1;
  for (size_t pair = (bytes - 1) / 32 + 1; pair > 0; --pair) {
    const size_t offset = 16 * (pair - 1);
    sum += FoldedPair(data + offset, kSecret + 2 * offset);
    sum += FoldedPair(data + bytes - 16 - offset, kSecret + 2 * offset + 16);
  }
  return Avalanche(sum);
}

uint64_t DigestTo240(const unsigned char* data, size_t bytes) {
  uint64_t sum = bytes * kPrime64_1;
  for (size_t pair = 0; pair < 8; ++pair) sum += FoldedPair(data + 16 * pair, kSecret + 16 * pair);
  sum = Avalanche(sum);
  for (size_t pair = 8; pair < bytes / 16; ++pair) sum += FoldedPair(data + 16 * pair, kSecret + 16 * (pair - 8) + 3);
  return Avalanche(sum + FoldedPair(data + bytes - 16, kSecret + 119));
}

}  // namespace

uint64_t Digest(const unsigned char* data, size_t bytes) {
  if (bytes == 0) return OldAvalanche(Word(kSecret + 56) ^ Word(kSecret + 64));
  if (bytes <= 3) return DigestTo3(data, bytes);
  if (bytes <= 8) return DigestTo8(data, bytes);
  if (bytes <= 16) return DigestTo16(data, bytes);
  if (bytes <= 128) return DigestTo128(data, bytes);
  if (bytes < kDigestBytesMin) return DigestTo240(data, bytes);
  Lanes sums = Start();
  const size_t blocks = (bytes - 1) / kBlockBytes;
  Blocks(sums, nullptr, data, blocks);
  return End(sums, data + blocks * kBlockBytes, bytes - blocks * kBlockBytes, bytes);
}

uint64_t CopyAndDigest(unsigned char* target, const unsigned char* source, size_t bytes) {
  Lanes sums = Start();
  const size_t blocks = (bytes - 1) / kBlockBytes;
  const size_t whole = blocks * kBlockBytes;
  Blocks(sums, target, source, blocks);
  std::memcpy(target + whole, source + whole, bytes - whole);
  return End(sums, target + whole, bytes - whole, bytes);
}

}  // namespace kvstore
