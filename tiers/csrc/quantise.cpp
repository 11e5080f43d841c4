#include "quantise.h"

#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

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
    if (magnitude >= 0x7C00) return FromBits(sign | 0x7F800000 | (magnitude << 13));
    // As if the exponent were that of float32: off by 2^112, which is exact to put right, for subnormals too.
    return FromBits(sign | Bits(FromBits(magnitude << 13) * 0x1p112F));
  }
  static Stored Write(float value) {  // finite; to nearest, ties to even, largest where it is too large
    const uint32_t sign = (Bits(value) >> 16) & 0x8000;
    const float magnitude = std::fabs(value);
    if (magnitude >= 65504.0F) return static_cast<Stored>(sign | 0x7BFF);
    if (magnitude < 0x1p-14F) {  // a subnormal counts steps of 2^-24
      return static_cast<Stored>(sign | static_cast<uint32_t>(std::nearbyintf(magnitude * 0x1p24F)));
    }
    const uint32_t bits = Bits(magnitude);
    const uint32_t rounded = (bits + 0xFFF + ((bits >> 13) & 1)) >> 13;
    return static_cast<Stored>(sign | (rounded - (112U << 10)));
  }
};

// 1 sign, 4 exponent bits with a bias of 7, 3 mantissa bits, no infinities; the OCP's "FP8 E4M3".
struct E4m3 {
  static constexpr float kMax = 448.0F;
  static uint8_t Write(float value) {  // at most kMax; to nearest, ties to even
    const uint32_t sign = (Bits(value) >> 24) & 0x80;
    const float magnitude = std::fmin(std::fabs(value), kMax);
    // A subnormal counts steps of 2^-9. Adding 2^14 leaves just these steps in the lowest bits of the sum.
    const uint32_t small = Bits(magnitude + 0x1p14F) - Bits(0x1p14F);
    const uint32_t bits = Bits(magnitude);
    const uint32_t large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120U << 3);
    return static_cast<uint8_t>(sign | (magnitude < 0x1p-6F ? small : large));
  }
  static std::array<float, 256> Values() {
    std::array<float, 256> values{};
    for (uint32_t code = 0; code < 256; ++code) {
      const uint32_t exponent = (code >> 3) & 15;
      const uint32_t mantissa = code & 7;
      const float magnitude = exponent ? std::ldexp(1.0F + mantissa / 8.0F, static_cast<int>(exponent) - 7)
                                       : std::ldexp(static_cast<float>(mantissa), -9);
      values[code] = code & 0x80 ? -magnitude : magnitude;
    }
    return values;
  }
};

struct Int8 {
  static constexpr float kMax = 127.0F;
  static uint8_t Write(float value) {
    const float limited = std::fmax(std::fmin(value, kMax), -kMax);
    // Adding 1.5 * 2^23 leaves the nearest whole number in the lowest bits of the sum.
    return static_cast<uint8_t>(Bits(limited + 12582912.0F) & 0xFF);
  }
  static std::array<float, 256> Values() {
    std::array<float, 256> values{};
    for (int code = 0; code < 256; ++code) values[code] = static_cast<float>(static_cast<int8_t>(code));
    return values;
  }
};

template <typename Byte>
const std::array<float, 256>& ValuesOf() {
  static const std::array<float, 256> values = Byte::Values();
  return values;
}

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

template <typename Element, typename Byte>
void QuantiseGroup(const QuantisedShape& shape, const uint8_t* elements, uint8_t* scales, uint8_t* bytes,
                   std::vector<float>& work, QuantisationError& error) {
  const std::array<float, 256>& values = ValuesOf<Byte>();
  float* largest = work.data();
  float* inverse = largest + shape.channels;
  for (size_t channel = 0; channel < shape.channels; ++channel) largest[channel] = 0;
  bool finite = true;
  for (size_t index = 0; index < shape.tokens * shape.channels; index += shape.channels) {
    for (size_t channel = 0; channel < shape.channels; ++channel) {
      const float magnitude = std::fabs(ReadElement<Element>(elements, index + channel));
      finite &= magnitude <= FLT_MAX;
      largest[channel] = magnitude > largest[channel] ? magnitude : largest[channel];
    }
  }
  error.finite &= finite;
  if (!finite) return;
  for (size_t channel = 0; channel < shape.channels; ++channel) {
    const uint16_t stored = ScaleFor<Byte>(largest[channel]);
    std::memcpy(scales + 2 * channel, &stored, sizeof stored);
    largest[channel] = Bfloat16::Read(stored);
    inverse[channel] = stored ? 1.0F / largest[channel] : 0.0F;
  }
  float max_absolute = 0;
  for (size_t index = 0; index < shape.tokens * shape.channels; index += shape.channels) {
    float squared = 0;
    float signal_squared = 0;
    for (size_t channel = 0; channel < shape.channels; ++channel) {
      const float value = ReadElement<Element>(elements, index + channel);
      const uint8_t byte = Byte::Write(value * inverse[channel]);
      bytes[index + channel] = byte;
      const float back = Element::Read(Element::Write(values[byte] * largest[channel]));
      const float off = std::fabs(back - value);
      max_absolute = off > max_absolute ? off : max_absolute;
      squared += off * off;
      signal_squared += value * value;
    }
    error.squared += squared;
    error.signal_squared += signal_squared;
  }
  error.max_absolute = std::fmax(error.max_absolute, max_absolute);
}

template <typename Element, typename Byte>
struct Rows {
  static QuantisationError Encode(const QuantisedShape& shape, const uint8_t* elements, uint8_t* scales,
                                  uint8_t* bytes) {
    QuantisationError error{true, 0, 0, 0};
    std::vector<float> work(2 * shape.channels);
    const size_t group_size = shape.tokens * shape.channels;
    for (size_t group = 0; group < shape.groups && error.finite; ++group) {
      QuantiseGroup<Element, Byte>(shape, elements + group * group_size * sizeof(typename Element::Stored),
                                   scales + 2 * group * shape.channels, bytes + group * group_size, work, error);
    }
    return error;
  }

  static void Decode(const QuantisedShape& shape, const uint8_t* scales, const uint8_t* bytes, uint8_t* elements) {
    const std::array<float, 256>& values = ValuesOf<Byte>();
    std::vector<float> scale(shape.channels);
    for (size_t group = 0; group < shape.groups; ++group) {
      for (size_t channel = 0; channel < shape.channels; ++channel) {
        scale[channel] = ReadElement<Bfloat16>(scales, group * shape.channels + channel);
      }
      const size_t start = group * shape.tokens * shape.channels;
      for (size_t index = start; index < start + shape.tokens * shape.channels; index += shape.channels) {
        for (size_t channel = 0; channel < shape.channels; ++channel) {
          WriteElement<Element>(elements, index + channel, values[bytes[index + channel]] * scale[channel]);
        }
      }
    }
  }
};

// Calls `call` with the Rows of a shape's types.
template <typename Call>
auto WithRows(const QuantisedShape& shape, Call call) {
  const bool is_e4m3 = shape.byte == ByteType::kE4m3;
  switch (shape.element) {
    case ElementType::kFloat32:
      return is_e4m3 ? call(Rows<Float32, E4m3>()) : call(Rows<Float32, Int8>());
    case ElementType::kFloat16:
      return is_e4m3 ? call(Rows<Float16, E4m3>()) : call(Rows<Float16, Int8>());
    default:
      return is_e4m3 ? call(Rows<Bfloat16, E4m3>()) : call(Rows<Bfloat16, Int8>());
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
