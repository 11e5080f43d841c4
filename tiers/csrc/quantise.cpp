#include "quantise.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#define KVSTORE_PART_OF_LOOP [[gnu::always_inline]] inline

namespace kvstore {
namespace {

uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Float32 {
  using Stored = uint32_t;
  static float Read(Stored stored) { return FromBits(stored); }
  static Stored Write(float value) { return Bits(value); }
};

struct Bfloat16 {
  using Stored = uint16_t;
  static float Read(Stored stored) { return FromBits(static_cast<uint32_t>(stored) << 16); }
  static Stored Write(float value) {  // finite; to nearest, ties to even
    const uint32_t bits = Bits(value);
    return static_cast<Stored>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {
  using Stored = uint16_t;
  static float Read(Stored stored) {
    const uint32_t sign = static_cast<uint32_t>(stored & 0x8000) << 16;
    const uint32_t magnitude = stored & 0x7FFF;
    const uint32_t endless = magnitude >= 0x7C00 ? 0x7F800000 : 0;
    // As if the exponent were that of float32: off by 2^112, which is exact to put right, for subnormals too.
    return FromBits(sign | endless | Bits(FromBits(magnitude << 13) * 0x1p112F));
  }
  static Stored Write(float value) {  // finite; to nearest, ties to even, largest where it is too large
    const uint32_t sign = (Bits(value) >> 16) & 0x8000;
    const float magnitude = std::fabs(value) < 65504.0F ? std::fabs(value) : 65504.0F;
    // A subnormal counts steps of 2^-24. Adding 1/2 leaves just these steps in the lowest bits of the sum.
    const uint32_t small = Bits(magnitude + 0.5F) - Bits(0.5F);
    const uint32_t bits = Bits(magnitude);
    const uint32_t large = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) - (112U << 10);
    return static_cast<Stored>(sign | (magnitude < 0x1p-14F ? small : large));
  }
};

// 1 sign, 4 exponent bits with a bias of 7, 3 mantissa bits, no infinities; the OCP's "FP8 E4M3".
struct E4m3 {
  static constexpr float kMax = 448.0F;
  static uint8_t Write(float value) {  // to nearest, ties to even, largest where it is too large
    const uint32_t sign = (Bits(value) >> 24) & 0x80;
    const float magnitude = std::fabs(value) < kMax ? std::fabs(value) : kMax;
    // A subnormal counts steps of 2^-9. Adding 2^14 leaves just these steps in the lowest bits of the sum.
    const uint32_t small = Bits(magnitude + 0x1p14F) - Bits(0x1p14F);
    const uint32_t bits = Bits(magnitude);
    const uint32_t large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120U << 3);
    return static_cast<uint8_t>(sign | (magnitude < 0x1p-6F ? small : large));
  }
  static float Read(uint8_t stored) {
    const uint32_t sign = static_cast<uint32_t>(stored & 0x80) << 24;
    // As if the exponent were that of float32: off by 2^120, which is exact to put right, for subnormals too.
    return FromBits(sign | Bits(FromBits(static_cast<uint32_t>(stored & 0x7F) << 20) * 0x1p120F));
  }
};

struct Int8 {
  static constexpr float kMax = 127.0F;
  static uint8_t Write(float value) {
    const float below = value < kMax ? value : kMax;
    const float limited = below > -kMax ? below : -kMax;
    // Adding 1.5 * 2^23 leaves the nearest whole number in the lowest bits of the sum.
    return static_cast<uint8_t>(Bits(limited + 12582912.0F) & 0xFF);
  }
  static float Read(uint8_t stored) { return static_cast<float>(static_cast<int8_t>(stored)); }
};

// The smallest bfloat16 at which `largest` fits; 0 where that is below any normal number.
template <typename Byte>
uint16_t ScaleFor(float largest) {
  const float scale = largest / Byte::kMax;
  if (scale < FLT_MIN) return 0;
  return static_cast<uint16_t>((Bits(scale) + 0xFFFF) >> 16);
}

template <typename Element>
float ReadElement(const uint8_t* elements, size_t index) {
  typename Element::Stored stored;
  std::memcpy(&stored, elements + index * sizeof stored, sizeof stored);
  return Element::Read(stored);
}

template <typename Element>
void WriteElement(uint8_t* elements, size_t index, float value) {
  const typename Element::Stored stored = Element::Write(value);
  std::memcpy(elements + index * sizeof stored, &stored, sizeof stored);
}

// What is known of each channel of a group. Sums go by channel, so that the loops over channels need no order of adding
// and become vector code; those over tokens are outside.
struct Channels {
  explicit Channels(size_t count)
      : largest(count),
        scale(count),
        inverse(count),
        value(count),
        back(count),
        squared(count),
        signal_squared(count),
        max_off(count),
        bad(count) {}

  void Clear() {
    for (std::vector<float>* values : {&largest, &squared, &signal_squared, &max_off}) {
      std::fill(values->begin(), values->end(), 0.0F);
    }
    std::fill(bad.begin(), bad.end(), 0U);
  }

  std::vector<float> largest, scale, inverse, value, back, squared, signal_squared, max_off;
  std::vector<uint32_t> bad;  // 1 where an element is not finite
};

// The loops are compiled twice, for the processors that this is built for and for those that have AVX2, too: the same
// operations in the same order, so the same bytes. What they call has to become part of them.
template <typename Element>
KVSTORE_PART_OF_LOOP void FindLargest(const QuantisedShape& shape, const uint8_t* elements, Channels& channels) {
  float* __restrict const largest = channels.largest.data();
  uint32_t* __restrict const bad = channels.bad.data();
  const size_t count = shape.channels;  // not to be read again after each byte that is written
  for (size_t token = 0; token < shape.tokens; ++token) {
    const uint8_t* __restrict const row = elements + token * count * sizeof(typename Element::Stored);
    for (size_t channel = 0; channel < count; ++channel) {
      const float magnitude = std::fabs(ReadElement<Element>(row, channel));
      bad[channel] |= magnitude <= FLT_MAX ? 0U : 1U;
      largest[channel] = magnitude > largest[channel] ? magnitude : largest[channel];
    }
  }
}

template <typename Element, typename Byte>
KVSTORE_PART_OF_LOOP void WriteBytes(const QuantisedShape& shape, const uint8_t* elements, uint8_t* bytes, Channels& channels) {
  const float* __restrict const scale = channels.scale.data();
  const float* __restrict const inverse = channels.inverse.data();
  float* __restrict const value = channels.value.data();
  float* __restrict const back = channels.back.data();
  float* __restrict const squared = channels.squared.data();
  float* __restrict const signal_squared = channels.signal_squared.data();
  float* __restrict const max_off = channels.max_off.data();
  const size_t count = shape.channels;  // not to be read again after each byte that is written
  for (size_t token = 0; token < shape.tokens; ++token) {
    const uint8_t* __restrict const row = elements + token * count * sizeof(typename Element::Stored);
    uint8_t* __restrict const bytes_row = bytes + token * count;
    for (size_t channel = 0; channel < count; ++channel) value[channel] = ReadElement<Element>(row, channel);
    for (size_t channel = 0; channel < count; ++channel) {
      const uint8_t byte = Byte::Write(value[channel] * inverse[channel]);
      bytes_row[channel] = byte;
      back[channel] = Byte::Read(byte) * scale[channel];
    }
    for (size_t channel = 0; channel < count; ++channel) {
      const float off = std::fabs(Element::Read(Element::Write(back[channel])) - value[channel]);
      max_off[channel] = off > max_off[channel] ? off : max_off[channel];
      squared[channel] += off * off;
      signal_squared[channel] += value[channel] * value[channel];
    }
  }
}

template <typename Element, typename Byte>
KVSTORE_PART_OF_LOOP void QuantiseGroup(const QuantisedShape& shape, const uint8_t* elements, uint8_t* scales, uint8_t* bytes,
                   Channels& channels, QuantisationError& error) {
  channels.Clear();
  FindLargest<Element>(shape, elements, channels);
  for (size_t channel = 0; channel < shape.channels; ++channel) {
    error.finite &= channels.bad[channel] == 0;
    const uint16_t stored = ScaleFor<Byte>(channels.largest[channel]);
    std::memcpy(scales + 2 * channel, &stored, sizeof stored);
    channels.scale[channel] = Bfloat16::Read(stored);
    channels.inverse[channel] = stored ? 1.0F / channels.scale[channel] : 0.0F;
  }
  if (!error.finite) return;
  WriteBytes<Element, Byte>(shape, elements, bytes, channels);
  for (size_t channel = 0; channel < shape.channels; ++channel) {
    error.max_absolute = std::fmax(error.max_absolute, channels.max_off[channel]);
    error.squared += channels.squared[channel];
    error.signal_squared += channels.signal_squared[channel];
  }
}

template <typename Element, typename Byte>
KVSTORE_PART_OF_LOOP QuantisationError EncodeRows(const QuantisedShape& shape, const uint8_t* elements,
                                                  uint8_t* scales, uint8_t* bytes) {
  QuantisationError error{true, 0, 0, 0};
  Channels channels(shape.channels);
  const size_t group_size = shape.tokens * shape.channels;
  for (size_t group = 0; group < shape.groups && error.finite; ++group) {
    QuantiseGroup<Element, Byte>(shape, elements + group * group_size * sizeof(typename Element::Stored),
                                 scales + 2 * group * shape.channels, bytes + group * group_size, channels, error);
  }
  return error;
}

template <typename Element, typename Byte>
KVSTORE_PART_OF_LOOP void DecodeRows(const QuantisedShape& shape, const uint8_t* scales, const uint8_t* bytes,
                                     uint8_t* elements) {
  const size_t count = shape.channels;
  std::vector<float> scale_of(count);
  float* __restrict const scale = scale_of.data();
  for (size_t group = 0; group < shape.groups; ++group) {
    for (size_t channel = 0; channel < count; ++channel) {
      scale[channel] = ReadElement<Bfloat16>(scales, group * count + channel);
    }
    for (size_t token = group * shape.tokens; token < (group + 1) * shape.tokens; ++token) {
      const uint8_t* __restrict const bytes_row = bytes + token * count;
      uint8_t* __restrict const row = elements + token * count * sizeof(typename Element::Stored);
      for (size_t channel = 0; channel < count; ++channel) {
        WriteElement<Element>(row, channel, Byte::Read(bytes_row[channel]) * scale[channel]);
      }
    }
  }
}

template <typename Element, typename Byte>
struct Rows {
  static QuantisationError Encode(const QuantisedShape& shape, const uint8_t* elements, uint8_t* scales,
                                  uint8_t* bytes) {
    return EncodeRows<Element, Byte>(shape, elements, scales, bytes);
  }
  static void Decode(const QuantisedShape& shape, const uint8_t* scales, const uint8_t* bytes, uint8_t* elements) {
    DecodeRows<Element, Byte>(shape, scales, bytes, elements);
  }
};

#ifdef __x86_64__
template <typename Element, typename Byte>
struct Avx2Rows {
  [[gnu::target("avx2")]] static QuantisationError Encode(const QuantisedShape& shape, const uint8_t* elements,
                                                          uint8_t* scales, uint8_t* bytes) {
    return EncodeRows<Element, Byte>(shape, elements, scales, bytes);
  }
  [[gnu::target("avx2")]] static void Decode(const QuantisedShape& shape, const uint8_t* scales, const uint8_t* bytes,
                                             uint8_t* elements) {
    DecodeRows<Element, Byte>(shape, scales, bytes, elements);
  }
};

bool HasAvx2() {
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  return has_avx2;
}
#else
template <typename Element, typename Byte>
using Avx2Rows = Rows<Element, Byte>;

bool HasAvx2() { return false; }
#endif

template <typename Element, typename Byte, typename Call>
auto WithLoops(Call call) {
  return HasAvx2() ? call(Avx2Rows<Element, Byte>()) : call(Rows<Element, Byte>());
}

// Calls `call` with the loops for a shape's types.
template <typename Call>
auto WithRows(const QuantisedShape& shape, Call call) {
  const bool is_e4m3 = shape.byte == ByteType::kE4m3;
  switch (shape.element) {
    case ElementType::kFloat32:
      return is_e4m3 ? WithLoops<Float32, E4m3>(call) : WithLoops<Float32, Int8>(call);
    case ElementType::kFloat16:
      return is_e4m3 ? WithLoops<Float16, E4m3>(call) : WithLoops<Float16, Int8>(call);
    default:
      return is_e4m3 ? WithLoops<Bfloat16, E4m3>(call) : WithLoops<Bfloat16, Int8>(call);
  }
}

}  // namespace

QuantisationError Quantise(const QuantisedShape& shape, const uint8_t* elements, uint8_t* scales, uint8_t* bytes) {
  return WithRows(shape, [&](auto rows) { return decltype(rows)::Encode(shape, elements, scales, bytes); });
}

void Dequantise(const QuantisedShape& shape, const uint8_t* scales, const uint8_t* bytes, uint8_t* elements) {
  WithRows(shape, [&](auto rows) { decltype(rows)::Decode(shape, scales, bytes, elements); });
}

}  // namespace kvstore
