// Bytes of a snapshot: values as they lie in memory, one after the other. On disk, so little-endian for ever.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace kvstore {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "snapshots are written as values lie in memory");

template <typename T>
void Put(std::string* bytes, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Throws std::invalid_argument where fewer bytes are left than are taken.
class SavedBytes {
 public:
  explicit SavedBytes(std::string_view bytes) : left_(bytes) {}

  bool empty() const { return left_.empty(); }

  template <typename T>
  T Take() {
    static_assert(std::is_trivially_copyable_v<T>);
    if (left_.size() < sizeof(T)) throw std::invalid_argument("what was saved of the policy is cut off");
    T value;
    std::memcpy(&value, left_.data(), sizeof(value));
    left_.remove_prefix(sizeof(value));
    return value;
  }

 private:
  std::string_view left_;
};

}  // namespace kvstore
