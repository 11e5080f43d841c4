#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "siphash.h"

namespace nb = nanobind;

namespace {

using Tokens = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const uint8_t* Bytes16(const nb::bytes& value, const char* name) {
  if (value.size() != 16) {
    throw nb::value_error((std::string(name) + " has " + std::to_string(value.size()) + " bytes, expected 16").c_str());
  }
  return reinterpret_cast<const uint8_t*>(value.c_str());
}

nb::bytes SipHash(const nb::bytes& key, const nb::bytes& message) {
  kvstore::SipHash128 hash(Bytes16(key, "key"));
  hash.Update(message.c_str(), message.size());
  const kvstore::Key128 out = hash.Finish();
  return nb::bytes(out.bytes, sizeof(out.bytes));
}

void ChainKeys(const nb::bytes& ns_key, const nb::bytes& parent, Tokens tokens, size_t block_tokens, Keys out) {
  const uint8_t* key = Bytes16(ns_key, "ns_key");
  kvstore::Key128 last;
  std::memcpy(last.bytes, Bytes16(parent, "parent"), 16);
  if (block_tokens == 0) throw nb::value_error("block_tokens is 0, expected at least 1");
  if (out.shape(0) != tokens.shape(0) / block_tokens || out.shape(1) != 16) {
    throw nb::value_error("out must have shape [whole blocks, 16]");
  }
  for (size_t block = 0; block < out.shape(0); ++block) {
    last = kvstore::BlockKey(key, last, tokens.data() + block * block_tokens, block_tokens);
    std::memcpy(out.data() + block * 16, last.bytes, 16);
  }
}

}  // namespace

NB_MODULE(_siphash, m) {
  nanobind::set_leak_warnings(false);  // a process may end while threads hold references still
  m.doc() = "SipHash-2-4-128 and chained block keys; see kvstore/hashing.py";
  m.def("siphash128", &SipHash, nb::arg("key"), nb::arg("message"));
  m.def("chain_keys", &ChainKeys, nb::arg("ns_key"), nb::arg("parent"), nb::arg("tokens").noconvert(),
        nb::arg("block_tokens"), nb::arg("out").noconvert());
}
