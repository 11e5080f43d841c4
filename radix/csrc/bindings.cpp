// Python face of the tree: converts arguments and results, nothing else. Arrays go in and out without a copy.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "radix_tree.h"
#include "rehearsal.h"
#include "survival.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using kvstore::IdSpan;
using kvstore::Key128;
using kvstore::RadixTree;
using kvstore::Removed;

using InputArray = nb::ndarray<const uint32_t, nb::ndim<1>, nb::device::cpu>;

// Below about 200 us of work, getting the GIL back costs more than keeping it. Counted in tokens compared or hashed,
// and in blocks scanned.
constexpr size_t kReleaseGilWork = 16384;

template <typename Call>
auto WithoutGilIfLong(size_t work, Call call) {
  std::optional<nb::gil_scoped_release> release;
  if (work > kReleaseGilWork) release.emplace();
  return call();
}

// The values of an array, in place; those of a strided one (such as ids[::-1]) are gathered.
class View {
 public:
  explicit View(const InputArray& array) : span_{array.data(), array.size()} {
    if (array.size() < 2 || array.stride(0) == 1) return;
    gathered_.reserve(array.size());
    for (size_t i = 0; i < array.size(); ++i) gathered_.push_back(array(i));
    span_.data = gathered_.data();
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  operator IdSpan() const { return span_; }

 private:
  IdSpan span_;
  kvstore::Ids gathered_;
};

Key128 AsKey(const nb::bytes& bytes, const char* error) {
  Key128 key;
  if (bytes.size() != sizeof(key.bytes)) throw std::invalid_argument(error);
  std::memcpy(key.bytes, bytes.data(), sizeof(key.bytes));
  return key;
}

Key128 AsRoot(const nb::bytes& bytes) { return AsKey(bytes, "root must be 16 bytes"); }

// Never waits for a call of another thread with the GIL held.
kvstore::Ids Match(const RadixTree& tree, const Key128& root, IdSpan tokens) {
  if (tokens.size <= kReleaseGilWork) {
    if (std::optional<kvstore::Ids> ids = tree.TryMatch(root, tokens)) return *std::move(ids);
  }
  const nb::gil_scoped_release release;
  return tree.Match(root, tokens);
}

// Hands the values over to numpy, which frees them.
template <typename Element, typename Value>
nb::object ToNumpy(std::vector<Value> values, std::initializer_list<size_t> shape) {
  static_assert(sizeof(Value) % sizeof(Element) == 0);
  auto* owned = new std::vector<Value>(std::move(values));
  nb::capsule owner(owned, [](void* data) noexcept { delete static_cast<std::vector<Value>*>(data); });
  return nb::cast(nb::ndarray<nb::numpy, Element>(owned->data(), shape, owner));
}

nb::object IdsToNumpy(kvstore::Ids ids) {
  const size_t count = ids.size();
  return ToNumpy<uint32_t>(std::move(ids), {count});
}

nb::object SliceToPython(kvstore::Slice slice) {
  const std::optional<uint32_t> next = slice.next == kvstore::kNone ? std::nullopt : std::optional(slice.next);
  return nb::make_tuple(IdsToNumpy(std::move(slice.ids)), next);
}

nb::object SavedToPython(const kvstore::Saved& saved) {
  const std::optional<uint64_t> next = saved.next == kvstore::kSavedAll ? std::nullopt : std::optional(saved.next);
  return nb::make_tuple(nb::bytes(saved.bytes.data(), saved.bytes.size()), next);
}

std::string_view ViewOf(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::object KeysToNumpy(std::vector<Key128> keys) {
  const size_t count = keys.size();
  return ToNumpy<uint8_t>(std::move(keys), {count, sizeof(Key128)});
}

void BindTree(nb::module_& module) {
  nb::class_<RadixTree>(module, "RadixTree")
      .def("__init__",
           [](RadixTree* tree, uint32_t block_tokens, const nb::bytes& ns_key, uint64_t hash_seed, uint32_t hash_bits,
              const std::string& policy, uint32_t slice_blocks, uint32_t edge_blocks) {
             const Key128 key = AsKey(ns_key, "ns_key must be 16 bytes");
             new (tree)
                 RadixTree(block_tokens, key, hash_seed, hash_bits, policy, kvstore::Limits{slice_blocks, edge_blocks});
           },
           "block_tokens"_a, "ns_key"_a, "hash_seed"_a, "hash_bits"_a = 32, "policy"_a = "lru",
           "slice_blocks"_a = kvstore::Limits().slice_blocks, "edge_blocks"_a = kvstore::Limits().edge_blocks)
      .def_prop_ro("block_tokens", &RadixTree::block_tokens)
      .def_prop_ro("block_count", &RadixTree::block_count)
      .def_prop_ro("node_count", &RadixTree::node_count)
      .def_prop_ro("root_count", &RadixTree::root_count)
      .def_prop_ro("memory_bytes", &RadixTree::memory_bytes)
      .def_prop_ro("policy_name", &RadixTree::policy_name)
      .def_prop_ro("policy_bytes", &RadixTree::policy_bytes)
      .def_prop_ro("removals", &RadixTree::removals)
      .def_prop_ro("condemned", &RadixTree::condemned)
      .def_prop_ro("steps", &RadixTree::steps)
      .def("tier_blocks", &RadixTree::tier_blocks, "tier"_a)
      .def("match",
           [](const RadixTree& tree, const nb::bytes& root, const InputArray& tokens) {
             return IdsToNumpy(Match(tree, AsRoot(root), View(tokens)));
           },
           "root"_a, "tokens"_a.noconvert())
      .def("touch",
           [](RadixTree& tree, const InputArray& ids, uint64_t tick, int64_t prompt_blocks) {
             tree.Touch(View(ids), tick, prompt_blocks);
           },
           "ids"_a.noconvert(), "tick"_a, "prompt_blocks"_a)
      .def("hint_next_use",
           [](RadixTree& tree, uint32_t block_id, uint64_t tick, std::optional<double> seconds) {
             return tree.HintNextUse(block_id, kvstore::Hint{tick, !seconds.has_value(), seconds.value_or(0)});
           },
           "block_id"_a, "tick"_a, "seconds"_a)
      .def("slots",
           [](const RadixTree& tree, const InputArray& ids, int64_t tier) {
             return IdsToNumpy(tree.Slots(View(ids), tier));
           },
           "ids"_a.noconvert(), "tier"_a)
      .def("leading",
           [](const RadixTree& tree, const InputArray& ids, int64_t tier) { return tree.Leading(View(ids), tier); },
           "ids"_a.noconvert(), "tier"_a)
      .def("lease", [](RadixTree& tree, const InputArray& ids) { tree.Lease(View(ids)); }, "ids"_a.noconvert())
      .def("release", [](RadixTree& tree, const InputArray& ids) { return tree.Release(View(ids)); },
           "ids"_a.noconvert())
      .def("stage",
           [](RadixTree& tree, const nb::bytes& root, const InputArray& tokens, int64_t from_block, uint64_t tick) {
             const Key128 key = AsRoot(root);
             kvstore::Staged staged =
                 WithoutGilIfLong(tokens.size(), [&] { return tree.Stage(key, View(tokens), from_block, tick); });
             return nb::make_tuple(staged.existing_blocks, IdsToNumpy(std::move(staged.ids)));
           },
           "root"_a, "tokens"_a.noconvert(), "from_block"_a, "tick"_a)
      .def("place",
           [](RadixTree& tree, const InputArray& ids, int64_t tier, const InputArray& slots) {
             return ToNumpy<bool>(tree.Place(View(ids), tier, View(slots)), {ids.size()});
           },
           "ids"_a.noconvert(), "tier"_a, "slots"_a.noconvert())
      .def("rehearsed",
           [](const RadixTree& tree, int64_t tier) {
             const kvstore::Rehearsal* rehearsal = tree.rehearsal(tier);
             const kvstore::Rehearsed result = rehearsal == nullptr ? kvstore::Rehearsed{} : rehearsal->result();
             std::vector<std::pair<uint64_t, double>> capacities;
             for (const auto& [blocks, found] : result.capacities) capacities.emplace_back(blocks, found);
             return std::tuple(result.looked_up, result.found, capacities);
           },
           "tier"_a)
      .def("victim_value", &RadixTree::VictimValue, "tier"_a, "tick"_a)
      .def("value_of", &RadixTree::ValueOf, "block_id"_a, "tick"_a)
      .def("values",
           [](RadixTree& tree, const InputArray& ids, uint64_t tick) {
             return ToNumpy<double>(tree.Values(View(ids), tick), {ids.size()});
           },
           "ids"_a.noconvert(), "tick"_a)
      .def("uses",
           [](const RadixTree& tree, const InputArray& ids) {
             return ToNumpy<uint16_t>(tree.Uses(View(ids)), {ids.size()});
           },
           "ids"_a.noconvert())
      .def("carries",
           [](RadixTree& tree, const InputArray& ids, int64_t tier) {
             return ToNumpy<bool>(tree.Carries(View(ids), tier), {ids.size()});
           },
           "ids"_a.noconvert(), "tier"_a)
      .def("parents", [](const RadixTree& tree, const InputArray& ids) { return IdsToNumpy(tree.Parents(View(ids))); },
           "ids"_a.noconvert())
      .def("take_victims",
           [](RadixTree& tree, int64_t tier, int64_t limit, double worth) {
             return IdsToNumpy(tree.TakeVictims(tier, limit, worth));
           },
           "tier"_a, "limit"_a, "worth"_a)
      .def("take_range",
           [](RadixTree& tree, int64_t tier, int64_t first_slot, int64_t slot_count, int64_t first_id) {
             return SliceToPython(tree.TakeRange(tier, first_slot, slot_count, first_id));
           },
           "tier"_a, "first_slot"_a, "slot_count"_a, "first_id"_a)
      .def("evict",
           [](RadixTree& tree, const InputArray& ids, int64_t tier) {
             const size_t token_count = ids.size() * tree.block_tokens();
             return WithoutGilIfLong(token_count, [&] { return tree.Evict(View(ids), tier); });
           },
           "ids"_a.noconvert(), "tier"_a)
      .def("drop",
           [](RadixTree& tree, const InputArray& ids) {
             std::optional<nb::gil_scoped_release> release;
             if (ids.size() > 0) release.emplace();
             return tree.Drop(View(ids));
           },
           "ids"_a.noconvert())
      .def("drop_unheld",
           [](RadixTree& tree, const nb::bytes& root, const InputArray& tokens, int64_t from_block,
              std::optional<std::pair<uint32_t, uint64_t>> resume) {
             const Key128 key = AsRoot(root);
             std::optional<kvstore::Resume> from;
             if (resume) from = kvstore::Resume{resume->first, resume->second};
             const nb::gil_scoped_release release;
             return tree.DropUnheld(key, View(tokens), from_block, from);
           },
           "root"_a, "tokens"_a.noconvert(), "from_block"_a, "resume"_a.none())
      .def("clear", &RadixTree::Clear, nb::call_guard<nb::gil_scoped_release>())
      .def("reap", &RadixTree::Reap, nb::call_guard<nb::gil_scoped_release>())
      .def("missing_in",
           [](const RadixTree& tree, int64_t tier, int64_t source_tier, int64_t first_id) {
             return SliceToPython(tree.MissingIn(tier, source_tier, first_id));
           },
           "tier"_a, "source_tier"_a, "first_id"_a)
      .def("boundaries",
           [](const RadixTree& tree, int64_t every, int64_t first_id) {
             return SliceToPython(tree.Boundaries(every, first_id));
           },
           "every"_a, "first_id"_a)
      .def("prepare_keys", [](RadixTree& tree, const InputArray& ids) { return tree.PrepareKeys(View(ids)); },
           "ids"_a.noconvert())
      .def("keys",
           [](RadixTree& tree, const InputArray& ids) {
             const size_t token_count = ids.size() * tree.block_tokens();
             std::vector<Key128> keys = WithoutGilIfLong(token_count, [&] { return tree.Keys(View(ids)); });
             return ToNumpy<uint8_t>(std::move(keys), {ids.size(), 2, sizeof(Key128)});
           },
           "ids"_a.noconvert())
      .def("tokens",
           [](const RadixTree& tree, const InputArray& ids) {
             return ToNumpy<uint32_t>(tree.Tokens(View(ids)), {ids.size(), size_t{tree.block_tokens()}});
           },
           "ids"_a.noconvert())
      .def("root_of",
           [](const RadixTree& tree, uint32_t block_id) {
             const Key128 key = tree.RootOf(block_id);
             return nb::bytes(key.bytes, sizeof(key.bytes));
           },
           "block_id"_a)
      .def("save_tables", [](const RadixTree& tree, uint64_t first) { return SavedToPython(tree.SaveTables(first)); },
           "first"_a)
      .def("save_runs",
           [](RadixTree& tree, int64_t tier, uint64_t first) { return SavedToPython(tree.SaveRuns(tier, first)); },
           "tier"_a, "first"_a)
      .def("save_ghosts", [](const RadixTree& tree, uint64_t first) { return SavedToPython(tree.SaveGhosts(first)); },
           "first"_a)
      .def("restore",
           [](RadixTree& tree, const nb::bytes& tables, const nb::bytes& runs, const nb::bytes& ghosts, int64_t shift,
              uint64_t tick) {
             const kvstore::Snapshot snapshot{ViewOf(tables), ViewOf(runs), ViewOf(ghosts), shift};
             const nb::gil_scoped_release release;
             tree.Restore(snapshot, tick);
           },
           "tables"_a, "runs"_a, "ghosts"_a, "shift"_a, "tick"_a)
      .def("check_slice", &RadixTree::CheckSlice, nb::call_guard<nb::gil_scoped_release>())
      .def("check_integrity", &RadixTree::CheckIntegrity, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

NB_MODULE(_native, module) {
  nanobind::set_leak_warnings(false);  // a process may end while threads hold references still
  module.attr("NO_SLOT") = kvstore::kNoSlot;
  module.attr("TIER_COUNT") = kvstore::kTierCount;
  module.attr("SLICE_BLOCKS") = kvstore::Limits().slice_blocks;
  module.attr("POLICIES") = kvstore::PolicyNames();
  module.attr("EVEN_TOKENS") = kvstore::kEvenTokens;
  module.attr("TICK_MAX") = kvstore::kTickMax;
  module.attr("NO_BLOCK") = kvstore::kNone;
  module.attr("EDGE_BLOCKS") = kvstore::Limits().edge_blocks;
  nb::class_<Removed>(module, "Removed")
      .def_ro("blocks", &Removed::blocks)
      .def_ro("kept", &Removed::kept)
      .def_prop_ro("resume",
                   [](const Removed& removed) -> std::optional<std::pair<uint32_t, uint64_t>> {
                     if (!removed.resume) return std::nullopt;
                     return std::pair(removed.resume->block, removed.resume->removals);
                   })
      .def_prop_ro("displaced_keys", [](const Removed& removed) { return KeysToNumpy(removed.displaced_keys); })
      .def_prop_ro("dropped_keys", [](const Removed& removed) { return KeysToNumpy(removed.dropped_keys); })
      .def("slots",
           [](const Removed& removed, int64_t tier) {
             if (tier < 0 || tier >= kvstore::kTierCount) throw std::invalid_argument("tier is out of range");
             return IdsToNumpy(removed.slots[tier]);
           },
           "tier"_a);
  BindTree(module);
}
