// Codes the same elements by the plain loops and by those for AVX2, and says whether every byte is the same.
#include <cstdio>
#include <cstdlib>

#include "quantise.cpp"

namespace {

using namespace kvstore;

template <typename Element, typename Byte>
bool IsSameBothWays(size_t channels) {
  const QuantisedShape shape{ElementType::kFloat32, ByteType::kInt8, 3, 5, channels};
  const size_t count = shape.groups * shape.tokens * channels;
  std::vector<uint8_t> elements(count * sizeof(typename Element::Stored));
  for (size_t index = 0; index < count; ++index) {
    WriteElement<Element>(elements.data(), index, static_cast<float>(std::rand() % 20001 - 10000) / 7000.0F);
  }
  std::vector<uint8_t> packed[2], back[2];
  QuantisationError errors[2];
  for (int way = 0; way < 2; ++way) {
    packed[way].resize(2 * shape.groups * channels + count);
    back[way].resize(elements.size());
    uint8_t* const scales = packed[way].data();
    uint8_t* const bytes = scales + 2 * shape.groups * channels;
    errors[way] = way ? Avx2Rows<Element, Byte>::Encode(shape, elements.data(), scales, bytes)
                      : Rows<Element, Byte>::Encode(shape, elements.data(), scales, bytes);
    way ? Avx2Rows<Element, Byte>::Decode(shape, scales, bytes, back[way].data())
        : Rows<Element, Byte>::Decode(shape, scales, bytes, back[way].data());
  }
  return packed[0] == packed[1] && back[0] == back[1] && errors[0].finite && errors[1].finite &&
         errors[0].max_absolute == errors[1].max_absolute && errors[0].squared == errors[1].squared &&
         errors[0].signal_squared == errors[1].signal_squared;
}

template <typename Element>
bool IsSame(size_t channels) {
  return IsSameBothWays<Element, E4m3>(channels) && IsSameBothWays<Element, Int8>(channels);
}

}  // namespace

int main() {
  if (!HasAvx2()) return 77;
  for (size_t channels = 1; channels < 40; ++channels) {
    if (!IsSame<Float32>(channels) || !IsSame<Float16>(channels) || !IsSame<Bfloat16>(channels)) {
      std::printf("the loops differ: channels=%zu\n", channels);
      return 1;
    }
  }
  return 0;
}
