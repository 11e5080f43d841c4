// SipHash-2-4 with a 128-bit result, after the paper and the public-domain description by
// Jean-Philippe Aumasson and Daniel J. Bernstein (https://www.aumasson.jp/siphash/siphash.pdf).
// Written for this project; checked against the published test vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvstore {

struct Key128 {
  uint8_t bytes[16];
};

// A message is fed in pieces, so that (parent key, token ids) needs no copy into one buffer.
class SipHash128 {
 public:
  explicit SipHash128(const uint8_t key[16]) {
    const uint64_t k0 = LoadLittle64(key);
    const uint64_t k1 = LoadLittle64(key + 8);
    v0_ = 0x736f6d6570736575ULL ^ k0;
    v1_ = 0x646f72616e646f6dULL ^ k1 ^ 0xee;
    v2_ = 0x6c7967656e657261ULL ^ k0;
    v3_ = 0x7465646279746573ULL ^ k1;
  }

  void Update(const void* data, size_t length) {
    const uint8_t* in = static_cast<const uint8_t*>(data);
    total_ += length;
    while (length > 0 && pending_ > 0) {
      Pend(*in++);
      --length;
    }
    for (; length >= 8; in += 8, length -= 8) Word(LoadLittle64(in));
    while (length > 0) {
      Pend(*in++);
      --length;
    }
  }

  Key128 Finish() {
    Word(tail_ | (static_cast<uint64_t>(total_ & 0xff) << 56));
    v2_ ^= 0xee;
    Rounds(4);
    Key128 out;
    StoreLittle64(out.bytes, v0_ ^ v1_ ^ v2_ ^ v3_);
    v1_ ^= 0xdd;
    Rounds(4);
    StoreLittle64(out.bytes + 8, v0_ ^ v1_ ^ v2_ ^ v3_);
    return out;
  }

 private:
  static uint64_t LoadLittle64(const uint8_t* in) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; --i) value = (value << 8) | in[i];
    return value;
  }

  static void StoreLittle64(uint8_t* out, uint64_t value) {
    for (int i = 0; i < 8; ++i) out[i] = static_cast<uint8_t>(value >> (8 * i));
  }

  static uint64_t Rotate(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

  void Pend(uint8_t byte) {
    tail_ |= static_cast<uint64_t>(byte) << (8 * pending_);
    if (++pending_ == 8) {
      Word(tail_);
      tail_ = 0;
      pending_ = 0;
    }
  }

  void Word(uint64_t word) {
    v3_ ^= word;
    Rounds(2);
    v0_ ^= word;
  }

  void Rounds(int count) {
    for (int i = 0; i < count; ++i) {
      v0_ += v1_;
      v1_ = Rotate(v1_, 13) ^ v0_;
      v0_ = Rotate(v0_, 32);
      v2_ += v3_;
      v3_ = Rotate(v3_, 16) ^ v2_;
      v0_ += v3_;
      v3_ = Rotate(v3_, 21) ^ v0_;
      v2_ += v1_;
      v1_ = Rotate(v1_, 17) ^ v2_;
      v2_ = Rotate(v2_, 32);
    }
  }

  uint64_t v0_, v1_, v2_, v3_;
  uint64_t tail_ = 0;
  unsigned pending_ = 0;
  uint64_t total_ = 0;
};

// The key of one block: SipHash-2-4-128 keyed by ns_key over (parent key, token ids as little-endian u32).
inline Key128 BlockKey(const uint8_t ns_key[16], const Key128& parent, const uint32_t* tokens, size_t token_count) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token ids are hashed as they lie in memory");
  SipHash128 hash(ns_key);
  hash.Update(parent.bytes, sizeof(parent.bytes));
  hash.Update(tokens, token_count * sizeof(uint32_t));
  return hash.Finish();
}

}  // namespace kvstore
