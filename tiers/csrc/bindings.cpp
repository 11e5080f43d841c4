#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cerrno>

#include "block_copy.h"
#include "block_header.h"
#include "checksum.h"
#include "memory.h"
#include "quantise.h"
#include "slot_copy.h"

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

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Slots = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Starts = nb::ndarray<const uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Where the slots of a pool lie. Keeps the arrays that it was made of.
class SlotTable {
 public:
  SlotTable(Ids firsts, Ids counts, Starts starts, Numbers part_bytes)
      : firsts_(firsts), counts_(counts), starts_(starts), part_bytes_(part_bytes) {
    if (firsts.shape(0) != counts.shape(0) || firsts.shape(0) != starts.shape(0) ||
        part_bytes.shape(0) != starts.shape(1)) {
      throw nb::value_error("expected firsts and counts of [extents], starts of [extents, parts], part_bytes of [parts]");
    }
  }

  void Write(Slots slots, uint64_t address, uint64_t stride, size_t first_part, size_t end_part) const {
    Copy(kvstore::WriteSlots, slots, {address, stride, first_part, end_part});
  }

  void Read(Slots slots, uint64_t address, uint64_t stride, size_t first_part, size_t end_part) const {
    Copy(kvstore::ReadSlots, slots, {address, stride, first_part, end_part});
  }

 private:
  template <typename CopySlots>
  void Copy(CopySlots copy_slots, const Slots& slots, const kvstore::Rows& rows) const {
    if (rows.first_part > rows.end_part || rows.end_part > part_bytes_.shape(0)) throw nb::value_error("no such parts");
    const kvstore::SlotTable table{firsts_.data(),      counts_.data(),     starts_.data(),
                                   firsts_.shape(0),    part_bytes_.data(), part_bytes_.shape(0)};
    bool found = true;
    {
      const nb::gil_scoped_release released;
      found = copy_slots(table, slots.data(), slots.shape(0), rows);
    }
    if (!found) {
      PyErr_SetString(PyExc_AssertionError, "a slot is not of this pool");
      throw nb::python_error();
    }
  }

  Ids firsts_;
  Ids counts_;
  Starts starts_;
  Numbers part_bytes_;
};

void DefineSlotTable(nb::module_& m) {
  nb::class_<SlotTable>(m, "SlotTable")
      .def(nb::init<Ids, Ids, Starts, Numbers>(), nb::arg("firsts").noconvert(), nb::arg("counts").noconvert(),
           nb::arg("starts").noconvert(), nb::arg("part_bytes").noconvert())
      .def("write", &SlotTable::Write, nb::arg("slots").noconvert(), nb::arg("address"), nb::arg("stride"),
           nb::arg("first_part"), nb::arg("end_part"))
      .def("read", &SlotTable::Read, nb::arg("slots").noconvert(), nb::arg("address"), nb::arg("stride"),
           nb::arg("first_part"), nb::arg("end_part"));
}

uint64_t CopyAndDigest(BytesOut target, Bytes source) {
  if (source.shape(0) < kvstore::kDigestBytesMin) throw nb::value_error("expected at least DIGEST_BYTES_MIN bytes");
  if (target.shape(0) != source.shape(0)) throw nb::value_error("target and source differ in length");
  const nb::gil_scoped_release released;
  return kvstore::CopyAndDigest(target.data(), source.data(), source.shape(0));
}

uint64_t Digest(Bytes data) {
  const nb::gil_scoped_release released;
  return kvstore::Digest(data.data(), data.shape(0));
}

using Parts = nb::ndarray<const uint64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Headers = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using HeadersOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void CheckLengths(size_t parts, size_t headers, size_t header_bytes, size_t page_bytes) {
  if (parts != headers) throw nb::value_error("parts and headers differ in length");
  if (header_bytes <= kvstore::kTokensAt || header_bytes > page_bytes) {
    throw nb::value_error("headers must be longer than their fixed fields, and no longer than their pages");
  }
}

void SealHeaders(Parts parts, HeadersOut headers, size_t page_bytes) {
  CheckLengths(parts.shape(0), headers.shape(0), headers.shape(1), page_bytes);
  const nb::gil_scoped_release released;
  kvstore::SealHeaders(reinterpret_cast<const kvstore::Part*>(parts.data()), parts.shape(0), headers.data(),
                       headers.shape(1), page_bytes);
}

void CheckHeaders(Parts parts, Headers headers, size_t page_bytes, BytesOut verdicts) {
  CheckLengths(parts.shape(0), headers.shape(0), headers.shape(1), page_bytes);
  if (verdicts.shape(0) != parts.shape(0)) throw nb::value_error("parts and verdicts differ in length");
  const nb::gil_scoped_release released;
  kvstore::CheckHeaders(reinterpret_cast<const kvstore::Part*>(parts.data()), parts.shape(0), headers.data(),
                        headers.shape(1), page_bytes, reinterpret_cast<kvstore::Verdict*>(verdicts.data()));
}

void DefineHeaders(nb::module_& m) {
  static_assert(sizeof(kvstore::Part) == 4 * sizeof(uint64_t));
  m.def("seal_headers", &SealHeaders, nb::arg("parts").noconvert(), nb::arg("headers").noconvert(),
        nb::arg("page_bytes"));
  m.def("check_headers", &CheckHeaders, nb::arg("parts").noconvert(), nb::arg("headers").noconvert(),
        nb::arg("page_bytes"), nb::arg("verdicts").noconvert());
}

kvstore::QuantisedShape AsShape(unsigned int element, unsigned int byte, size_t groups, size_t tokens,
                                size_t channels) {
  if (element < 1 || element > 3 || byte < 1 || byte > 2) throw nb::value_error("no such type of elements or bytes");
  return {static_cast<kvstore::ElementType>(element), static_cast<kvstore::ByteType>(byte), groups, tokens, channels};
}

void CheckSizes(const kvstore::QuantisedShape& shape, size_t element_bytes, size_t packed_bytes) {
  const size_t count = shape.groups * shape.tokens * shape.channels;
  const size_t width = shape.element == kvstore::ElementType::kFloat32 ? 4 : 2;
  if (element_bytes != count * width || packed_bytes != 2 * shape.groups * shape.channels + count) {
    throw nb::value_error("the memory is not of the size of the shape");
  }
}

// Packed rows: all scales, then all bytes. Returns max absolute error, sum of squared errors, sum of squares; None where
// an element is not finite.
nb::object Quantise(Bytes elements, BytesOut packed, unsigned int element, unsigned int byte, size_t groups,
                    size_t tokens, size_t channels) {
  const kvstore::QuantisedShape shape = AsShape(element, byte, groups, tokens, channels);
  CheckSizes(shape, elements.shape(0), packed.shape(0));
  kvstore::QuantisationError error{};
  {
    const nb::gil_scoped_release released;
    error = kvstore::Quantise(shape, elements.data(), packed.data(), packed.data() + 2 * groups * channels);
  }
  if (!error.finite) return nb::none();
  return nb::make_tuple(error.max_absolute, error.squared, error.signal_squared);
}

void Dequantise(Bytes packed, BytesOut elements, unsigned int element, unsigned int byte, size_t groups, size_t tokens,
                size_t channels) {
  const kvstore::QuantisedShape shape = AsShape(element, byte, groups, tokens, channels);
  CheckSizes(shape, elements.shape(0), packed.shape(0));
  const nb::gil_scoped_release released;
  kvstore::Dequantise(shape, packed.data(), packed.data() + 2 * groups * channels, elements.data());
}

void DefineQuantise(nb::module_& m) {
  m.def("quantise", &Quantise, nb::arg("elements").noconvert(), nb::arg("packed").noconvert(), nb::arg("element"),
        nb::arg("byte"), nb::arg("groups"), nb::arg("tokens"), nb::arg("channels"));
  m.def("dequantise", &Dequantise, nb::arg("packed").noconvert(), nb::arg("elements").noconvert(), nb::arg("element"),
        nb::arg("byte"), nb::arg("groups"), nb::arg("tokens"), nb::arg("channels"));
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
    {
      const nb::gil_scoped_release released;  // 0.2 s for each GiB of plain pages
      kvstore::Unmap(mapped->address, mapped->bytes);
    }
    delete mapped;
  });
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(address, {bytes}, owner);
}

struct ForeignMapping {
  void* address;
  size_t bytes;
  pid_t owner;
};

// As MapShared, of memory that cannot be written. In the child of a fork there is nothing to unmap.
nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>> MapReadOnly(int fd, size_t bytes, size_t alignment) {
  void* address = kvstore::MapReadOnly(fd, bytes, alignment);
  if (address == nullptr) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  nb::capsule owner(new ForeignMapping{address, bytes, getpid()}, [](void* mapping) noexcept {
    const auto* mapped = static_cast<ForeignMapping*>(mapping);
    if (mapped->owner == getpid()) {
      const nb::gil_scoped_release released;
      kvstore::Unmap(mapped->address, mapped->bytes);
    }
    delete mapped;
  });
  return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(address, {bytes}, owner);
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
  m.def("map_read_only", &MapReadOnly, nb::arg("fd"), nb::arg("nbytes"), nb::arg("alignment"));
  m.def("advise_huge", &AdviseHuge, nb::arg("address"), nb::arg("nbytes"));
  m.def("populate", &Populate, nb::arg("address"), nb::arg("nbytes"));
  m.def("touch", &Touch, nb::arg("address"), nb::arg("nbytes"));
  m.def("lock_pages", &LockPages, nb::arg("address"), nb::arg("nbytes"));
  m.def("unlock_pages", &UnlockPages, nb::arg("address"), nb::arg("nbytes"));
}

}  // namespace

// Addresses come as numbers: who calls has checked them, and keeps the memory.
NB_MODULE(_copy, m) {
  nanobind::set_leak_warnings(false);  // a process may end while threads hold references still
  m.doc() = "Copies, checksums and shared memory; see device_cpu.py, checksum.py, header.py, host_copy.py and extent.py";
  m.attr("PIECE_BYTES") = sizeof(kvstore::Piece);
  m.attr("TILE_BYTES") = kvstore::kTileBytes;
  m.def("gather", &Gather, nb::arg("pieces").noconvert(), nb::arg("block_ids").noconvert(),
        nb::arg("row_ids").noconvert(), nb::arg("packed_address"), nb::arg("packed_stride"), nb::arg("threads"));
  m.def("scatter", &Scatter, nb::arg("pieces").noconvert(), nb::arg("block_ids").noconvert(),
        nb::arg("row_ids").noconvert(), nb::arg("packed_address"), nb::arg("packed_stride"), nb::arg("threads"));
  m.attr("DIGEST_BYTES_MIN") = kvstore::kDigestBytesMin;
  m.def("copy_and_digest", &CopyAndDigest, nb::arg("target").noconvert(), nb::arg("source").noconvert());
  m.def("digest", &Digest, nb::arg("data").noconvert());
  DefineHeaders(m);
  DefineMemory(m);
  DefineQuantise(m);
  DefineSlotTable(m);
}
