#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cerrno>

#include "block_copy.h"
#include "checksum.h"
#include "memory.h"

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

using Numbers = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void CopyRuns(Numbers targets, Numbers sources, Numbers sizes) {
  if (targets.shape(0) != sources.shape(0) || targets.shape(0) != sizes.shape(0)) {
    throw nb::value_error("targets, sources and sizes differ in length");
  }
  const nb::gil_scoped_release released;
  kvstore::CopyRuns(targets.data(), sources.data(), sizes.data(), targets.shape(0));
}

uint64_t CopyAndDigest(BytesOut target, Bytes source) {
  if (source.shape(0) < kvstore::kDigestBytesMin) throw nb::value_error("expected at least DIGEST_BYTES_MIN bytes");
  if (target.shape(0) != source.shape(0)) throw nb::value_error("target and source differ in length");
  const nb::gil_scoped_release released;
  return kvstore::CopyAndDigest(target.data(), source.data(), source.shape(0));
}

struct Mapping {
  void* address;
  size_t bytes;
};

// The mapping lives as long as any array that shows it.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> MapShared(int fd, size_t bytes, size_t alignment) {
  void* address = kvstore::MapShared(fd, bytes, alignment);
  if (address == nullptr) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  nb::capsule owner(new Mapping{address, bytes}, [](void* mapping) noexcept {
    const auto* mapped = static_cast<Mapping*>(mapping);
    kvstore::Unmap(mapped->address, mapped->bytes);
    delete mapped;
  });
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(address, {bytes}, owner);
}

int AdviseHuge(uint64_t address, size_t bytes) { return kvstore::AdviseHuge(address, bytes); }

int Populate(uint64_t address, size_t bytes) {
  const nb::gil_scoped_release released;
  return kvstore::Populate(address, bytes);
}

void Touch(uint64_t address, size_t bytes) {
  const nb::gil_scoped_release released;
  kvstore::Touch(address, bytes);
}

int LockPages(uint64_t address, size_t bytes) {
  const nb::gil_scoped_release released;
  return kvstore::LockPages(address, bytes);
}

int UnlockPages(uint64_t address, size_t bytes) {
  const nb::gil_scoped_release released;
  return kvstore::UnlockPages(address, bytes);
}

void DefineMemory(nb::module_& m) {
  m.def("map_shared", &MapShared, nb::arg("fd"), nb::arg("nbytes"), nb::arg("alignment"));
  m.def("advise_huge", &AdviseHuge, nb::arg("address"), nb::arg("nbytes"));
  m.def("populate", &Populate, nb::arg("address"), nb::arg("nbytes"));
  m.def("touch", &Touch, nb::arg("address"), nb::arg("nbytes"));
  m.def("lock_pages", &LockPages, nb::arg("address"), nb::arg("nbytes"));
  m.def("unlock_pages", &UnlockPages, nb::arg("address"), nb::arg("nbytes"));
}

}  // namespace

// Addresses come as numbers: who calls has checked them, and keeps the memory.
NB_MODULE(_copy, m) {
  m.doc() = "Copies, checksums and shared memory; see device_cpu.py, checksum.py, host_copy.py and extent.py";
  m.attr("PIECE_BYTES") = sizeof(kvstore::Piece);
  m.attr("TILE_BYTES") = kvstore::kTileBytes;
  m.def("gather", &Gather, nb::arg("pieces").noconvert(), nb::arg("block_ids").noconvert(),
        nb::arg("row_ids").noconvert(), nb::arg("packed_address"), nb::arg("packed_stride"), nb::arg("threads"));
  m.def("scatter", &Scatter, nb::arg("pieces").noconvert(), nb::arg("block_ids").noconvert(),
        nb::arg("row_ids").noconvert(), nb::arg("packed_address"), nb::arg("packed_stride"), nb::arg("threads"));
  m.attr("DIGEST_BYTES_MIN") = kvstore::kDigestBytesMin;
  m.def("copy_runs", &CopyRuns, nb::arg("targets").noconvert(), nb::arg("sources").noconvert(),
        nb::arg("sizes").noconvert());
  m.def("copy_and_digest", &CopyAndDigest, nb::arg("target").noconvert(), nb::arg("source").noconvert());
  DefineMemory(m);
}
