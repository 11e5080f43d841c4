// A fast hash that decides nothing: a collision costs a comparison, or a wrong guess of the eviction policy.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvstore {

constexpr uint64_t kMixFactor = 0x9E3779B97F4A7C15ULL;

inline uint64_t Mix(uint64_t left, uint64_t right) {
  const auto product = static_cast<unsigned __int128>(left) * right;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Two words for each multiplication, as wyhash does.
inline uint64_t MixTokens(uint64_t before, uint64_t seed, const uint32_t* tokens, uint32_t count) {
  const uint64_t secret = seed ^ kMixFactor;
  uint64_t hash = Mix(before ^ seed, kMixFactor);
  uint32_t at = 0;
  for (; at + 4 <= count; at += 4) {
    uint64_t words[2];
    std::memcpy(words, tokens + at, sizeof(words));
    hash = Mix(words[0] ^ secret, words[1] ^ hash);
  }
  for (; at < count; ++at) hash = Mix(hash ^ tokens[at] ^ secret, kMixFactor);
  return hash;
}

}  // namespace kvstore
