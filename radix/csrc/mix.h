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

inline uint64_t MixTokens(uint64_t before, uint64_t seed, const uint32_t* tokens, uint32_t count) {
  uint64_t hash = Mix(seed ^ before, kMixFactor);
  uint32_t at = 0;
  for (; at + 2 <= count; at += 2) {
    uint64_t word;
    std::memcpy(&word, tokens + at, sizeof(word));
    hash = Mix(hash ^ word ^ seed, kMixFactor);
  }
  if (at < count) hash = Mix(hash ^ tokens[at] ^ seed, kMixFactor);
  return hash;
}

}  // namespace kvstore
