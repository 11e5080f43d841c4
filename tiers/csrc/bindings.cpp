#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "block_copy.h"

namespace nb = nanobind;

namespace {

using Table = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

kvstore::BlockCopy AsCopy(const Table& pieces, const Ids& block_ids, const Ids& row_ids, uint64_t packed_address,
                          int64_t packed_stride) {
  if (pieces.shape(1) != sizeof(kvstore::Piece)) {
    throw nb::value_error("pieces must have shape [count, PIECE_BYTES]");
  }
  if (block_ids.shape(0) != row_ids.shape(0)) throw nb::value_error("block_ids and row_ids differ in length");
  return {reinterpret_cast<const kvstore::Piece*>(pieces.data()),
          pieces.shape(0),
          block_ids.data(),
          row_ids.data(),
          block_ids.shape(0),
          packed_address,
          packed_stride};
}

void Gather(Table pieces, Ids block_ids, Ids row_ids, uint64_t packed_address, int64_t packed_stride,
            unsigned int threads) {
  const kvstore::BlockCopy copy = AsCopy(pieces, block_ids, row_ids, packed_address, packed_stride);
  const nb::gil_scoped_release released;
  kvstore::Gather(copy, threads);
}

void Scatter(Table pieces, Ids block_ids, Ids row_ids, uint64_t packed_address, int64_t packed_stride,
             unsigned int threads) {
  const kvstore::BlockCopy copy = AsCopy(pieces, block_ids, row_ids, packed_address, packed_stride);
  const nb::gil_scoped_release released;
  kvstore::Scatter(copy, threads);
}

}  // namespace

// Addresses come as numbers: who calls has checked them, and keeps the memory.
NB_MODULE(_copy, m) {
  m.doc() = "Gather and scatter of blocks on the CPU; see kvstore/tiers/device_cpu.py";
  m.attr("PIECE_BYTES") = sizeof(kvstore::Piece);
  m.attr("TILE_BYTES") = kvstore::kTileBytes;
  m.def("gather", &Gather, nb::arg("pieces").noconvert(), nb::arg("block_ids").noconvert(),
        nb::arg("row_ids").noconvert(), nb::arg("packed_address"), nb::arg("packed_stride"), nb::arg("threads"));
  m.def("scatter", &Scatter, nb::arg("pieces").noconvert(), nb::arg("block_ids").noconvert(),
        nb::arg("row_ids").noconvert(), nb::arg("packed_address"), nb::arg("packed_stride"), nb::arg("threads"));
}
