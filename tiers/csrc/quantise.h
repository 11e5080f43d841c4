// Lossy rows of 8 bits with a scale for each channel; see kvstore/tiers/codecs/quantised.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

// On disk: never renumber.
enum class ElementType : uint32_t { kFloat32 = 1, kFloat16 = 2, kBfloat16 = 3 };
enum class ByteType : uint32_t { kE4m3 = 1, kInt8 = 2 };

// Elements [groups, tokens, channels]; a scale serves one channel of one group, over all tokens.
struct QuantisedShape {
  ElementType element;
  ByteType byte;
  size_t groups;
  size_t tokens;
  size_t channels;
};

struct QuantisationError {
  bool finite;  // false: an element is no number or infinite, and nothing else here counts
  double max_absolute;
  double squared;        // sum of squared errors
  double signal_squared;  // sum of squared elements
};

// `scales` are bfloat16 [groups, channels], `bytes` are [groups, tokens, channels]. An element is byte * scale.
QuantisationError Quantise(const QuantisedShape& shape, const uint8_t* elements, uint8_t* scales, uint8_t* bytes);
void Dequantise(const QuantisedShape& shape, const uint8_t* scales, const uint8_t* bytes, uint8_t* elements);

}  // namespace kvstore
