"""Promises of the radix tree that the comparison with the model does not reach: scale, attacks, bad arguments."""

import ctypes
import inspect
import mmap
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import nan
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.hashing import block_keys
from kvstore.radix import _native
from kvstore.radix.tree import NO_SLOT, POLICIES, TICK_MAX, RadixTree
from kvstore.types import Tier

NS_KEY = bytes(range(16))
ROOT = b"r" * 16
OTHER_ROOT = b"s" * 16
BLOCK_TOKENS = 16


def new_tree(block_tokens: int = BLOCK_TOKENS, hash_bits: int = 32) -> RadixTree:
    return RadixTree(block_tokens, ns_key=NS_KEY, hash_seed=0xC0FFEE, hash_bits=hash_bits)


def array(values: object) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def store(tree: RadixTree, tokens: np.ndarray, first_slot: int = 0, tick: int = 1, root: bytes = ROOT) -> np.ndarray:
    """Stage, commit to host memory and release; returns the ids of the path."""
    existing, ids = tree.stage(root, tokens, 0, tick)
    fresh = ids[existing:]
    tree.place(fresh, Tier.HOST, np.arange(first_slot, first_slot + fresh.size, dtype=np.uint32))
    tree.release(ids)
    return ids


def random_prompt(seed: int, blocks: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, blocks * BLOCK_TOKENS, dtype=np.uint32)


def test_only_whole_equal_blocks_match() -> None:
    tree = new_tree()
    prompt = random_prompt(1, 10)
    ids = store(tree, prompt)
    assert ids.tolist() == tree.match(ROOT, prompt).tolist()
    assert ids[:4].tolist() == tree.match(ROOT, prompt[: 5 * BLOCK_TOKENS - 1]).tolist()
    assert 0 == tree.match(OTHER_ROOT, prompt).size
    assert 0 == tree.match(ROOT, prompt[:0]).size
    for position in (0, 15, 16, 100, 159):
        changed = prompt.copy()
        changed[position] ^= 1
        assert position // BLOCK_TOKENS == tree.match(ROOT, changed).size


def test_staged_blocks_are_invisible_and_shared_by_concurrent_stages() -> None:
    tree = new_tree()
    prompt = random_prompt(2, 6)
    assert 0 == tree.stage(ROOT, prompt[: 4 * BLOCK_TOKENS], 0, 1)[0]
    first_ids = tree.stage(ROOT, prompt[: 4 * BLOCK_TOKENS], 0, 1)[1]
    existing, second_ids = tree.stage(ROOT, prompt, 0, 1)
    assert 4 == existing
    tree.place(second_ids[4:], Tier.HOST, array([4, 5]))
    assert 0 == tree.match(ROOT, prompt).size
    tree.place(first_ids, Tier.HOST, array([0, 1, 2, 3]))
    assert 6 == tree.match(ROOT, prompt).size


def test_an_aborted_stage_takes_what_others_stored_below_it_along() -> None:
    tree = new_tree()
    prompt = random_prompt(3, 6)
    _, first_ids = tree.stage(ROOT, prompt[: 4 * BLOCK_TOKENS], 0, 1)
    _, second_ids = tree.stage(ROOT, prompt, 0, 1)
    tree.place(second_ids[4:], Tier.DISK, array([40, 50]))
    assert 0 == tree.release(first_ids).blocks
    removed = tree.release(second_ids)
    assert 6 == removed.blocks
    assert [40, 50] == sorted(removed.slots(Tier.DISK).tolist())
    assert 2 == len(removed.dropped_keys)
    assert 0 == tree.root_count


def test_a_stage_behind_a_hole_changes_nothing() -> None:
    tree = new_tree()
    prompt = random_prompt(4, 6)
    store(tree, prompt[: 2 * BLOCK_TOKENS])
    existing, ids = tree.stage(ROOT, prompt, 3, 9)
    assert (2, 0) == (existing, ids.size)
    assert (2, 1) == (tree.block_count, tree.victim_value(Tier.HOST, 9))


def test_a_victim_in_flight_outlives_a_clear_and_keeps_its_identity() -> None:
    tree = new_tree()
    prompt = random_prompt(5, 3)
    ids = store(tree, prompt, first_slot=7)
    victims = tree.take_victims(Tier.HOST, 2)
    removed = tree.clear()
    assert [7] == removed.slots(Tier.HOST).tolist()
    assert [9, 8] == tree.slots(victims, Tier.HOST).tolist()
    chain = block_keys(NS_KEY, ROOT, prompt, BLOCK_TOKENS)
    assert chain[[1, 2]].tobytes() == tree.keys(victims[::-1])[:, 1].tobytes()
    assert prompt[-BLOCK_TOKENS:].tolist() == tree.tokens(victims[:1])[0].tolist()
    assert ROOT == tree.root_of(int(victims[0]))
    assert [False, False] == tree.place(victims, Tier.DISK, array([1, 2])).tolist()
    assert ids[:0:-1].tolist() == victims.tolist()
    assert [8, 9] == sorted(tree.evict(victims, Tier.HOST).slots(Tier.HOST).tolist())
    with pytest.raises(ValueError, match="unknown or was freed"):
        tree.tokens(victims)


def test_keys_follow_the_chain_through_splits_and_merges() -> None:
    tree = new_tree()
    stem = random_prompt(6, 8)
    branch = np.concatenate([stem[: 5 * BLOCK_TOKENS], random_prompt(7, 4)])
    ids = store(tree, stem)
    expected = block_keys(NS_KEY, ROOT, stem, BLOCK_TOKENS)
    assert expected.tobytes() == tree.keys(ids)[:, 1].tobytes()
    branch_ids = store(tree, branch, first_slot=8)
    branch_keys = block_keys(NS_KEY, ROOT, branch, BLOCK_TOKENS)
    assert branch_keys.tobytes() == tree.keys(branch_ids)[:, 1].tobytes()
    tree.drop(ids[5:6])
    longer = np.concatenate([branch, random_prompt(8, 3)])
    longer_ids = store(tree, longer, first_slot=20)
    keys = tree.keys(longer_ids[::-1])[::-1]
    longer_keys = block_keys(NS_KEY, ROOT, longer, BLOCK_TOKENS)
    assert longer_keys.tobytes() == keys[:, 1].tobytes()
    assert ROOT + longer_keys[:-1].tobytes() == keys[:, 0].tobytes()
    assert 1 == tree.node_count


def test_blocks_with_equal_xxh3_under_every_parent_stay_apart() -> None:
    rest = list(range(12))
    one = array([29625, 95822, 101446, 35249, *rest])
    other = array([18902, 118794, 112169, 12277, *rest])
    for parent in (bytes(16), ROOT, NS_KEY):
        digest = xxhash.xxh3_128_digest(parent + one.tobytes())
        assert digest == xxhash.xxh3_128_digest(parent + other.tobytes())
    tree = new_tree()
    ids = store(tree, one)
    assert 0 == tree.match(ROOT, other).size
    other_ids = store(tree, other, first_slot=1)
    assert ids.tolist() == tree.match(ROOT, one).tolist()
    assert other_ids.tolist() == tree.match(ROOT, other).tolist()
    assert ids.tolist() != other_ids.tolist()
    assert tree.keys(ids)[0, 1].tobytes() != tree.keys(other_ids)[0, 1].tobytes()


@pytest.mark.parametrize("hash_bits", [0, 1, 4])
def test_hash_collisions_decide_nothing(hash_bits: int) -> None:
    tree = new_tree(hash_bits=hash_bits)
    stem = random_prompt(9, 2)
    prompts = [np.concatenate([stem, random_prompt(100 + i, 2)]) for i in range(200)]
    paths = [store(tree, prompt, first_slot=10 * i).tolist() for i, prompt in enumerate(prompts)]
    assert paths == [tree.match(ROOT, prompt).tolist() for prompt in prompts]
    for path in paths[::2]:
        tree.drop(array(path[2:3]))
    assert [path[: 2 + 2 * (i % 2)] for i, path in enumerate(paths)] == [
        tree.match(ROOT, prompt).tolist() for prompt in prompts
    ]
    assert [] == tree.check_integrity()


def deep_tree(depth: int) -> RadixTree:
    """A branch at every block: `depth` nodes on one path, and as many leaves."""
    tree = new_tree(block_tokens=1)
    trunk = np.arange(depth, dtype=np.uint32)
    store(tree, trunk)
    for at in reversed(range(depth)):  # from below, while the trunk above is still one node
        store(tree, np.append(trunk[:at], np.uint32(2**31)), first_slot=depth + at)
    return tree


def test_a_path_of_20_000_nodes_needs_no_deep_stack(small_stack: ThreadPoolExecutor) -> None:
    depth = 20_000
    trunk = np.arange(depth, dtype=np.uint32)
    tree = small_stack.submit(deep_tree, depth).result()
    assert (2 * depth, 2 * depth) == (tree.node_count, tree.block_count)
    ids = small_stack.submit(tree.match, ROOT, trunk).result()
    assert depth == ids.size
    expected = block_keys(NS_KEY, ROOT, trunk, 1)
    assert expected.tobytes() == small_stack.submit(tree.keys, ids).result()[:, 1].tobytes()
    assert ROOT == small_stack.submit(tree.root_of, int(ids[-1])).result()
    assert [] == small_stack.submit(tree.check_integrity).result()
    dropped = small_stack.submit(tree.drop_unheld, ROOT, trunk, 5).result().blocks
    while tree.condemned:
        dropped += small_stack.submit(tree.reap).result().blocks
    assert 2 * depth - 11 == dropped
    assert 11 == small_stack.submit(tree.clear).result().blocks


@pytest.fixture
def small_stack() -> Iterator[ThreadPoolExecutor]:
    """One thread whose stack of 256 KiB holds no 20,000 frames of anything."""
    before = threading.stack_size(256 * 1024)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        threading.stack_size(before)
        yield executor


def resident_bytes() -> int:
    """Memory of this process, without what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_churn_under_one_prefix_leaves_nothing_behind(count: int) -> None:
    tree = new_tree()
    stem = random_prompt(10, 20)
    store(tree, stem)
    tree.keys(tree.match(ROOT, stem))
    base = (tree.node_count, tree.block_count, tree.memory_bytes)
    suffixes = np.random.default_rng(11).integers(0, 2**32, (count, 2 * BLOCK_TOKENS), dtype=np.uint32)
    order = np.random.default_rng(12).permutation(count)
    ends = np.ones(count, dtype=np.uint32)
    prompt = np.concatenate([stem, suffixes[0]])
    base_resident_bytes = resident_bytes()
    for i in range(count):
        prompt[stem.size :] = suffixes[i]
        ends[i] = store(tree, prompt, 20 + 2 * i, tick=2 + i)[20]
    assert (count + 1, 2 * count + 20) == (tree.node_count, tree.block_count)
    tree.drop(ends[order[: count // 2]])
    while tree.block_count > 20:
        victims = tree.take_victims(Tier.HOST, min(4096, tree.block_count - 20))
        assert victims.size == tree.evict(victims, Tier.HOST).blocks
    assert base[:2] == (tree.node_count, tree.block_count)
    # Two chunks of records, and the places of chunks below the one in which the last node happens to lie.
    assert tree.memory_bytes <= base[2] + 64 * 1024 + count // 2
    assert resident_bytes() <= base_resident_bytes + 16 * 2**20  # malloc keeps some of its first 375 MiB
    assert stem.size // BLOCK_TOKENS == tree.match(ROOT, stem).size
    assert [] == tree.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_large_tree_stays_within_96_bytes_a_block_of_16(policy: str) -> None:
    tree = RadixTree(BLOCK_TOKENS, ns_key=NS_KEY, hash_seed=0xC0FFEE, policy=policy)
    for i in range(100):
        store(tree, random_prompt(1000 + i, 500), first_slot=500 * i)
    assert tree.memory_bytes / tree.block_count <= 96


def test_eviction_takes_the_coldest_tail_first_and_asks_other_tiers() -> None:
    tree = new_tree()
    cold = random_prompt(13, 3)
    hot = random_prompt(14, 2)
    cold_ids = store(tree, cold, first_slot=0, tick=1)
    hot_ids = store(tree, hot, first_slot=3, tick=2)
    tree.place(cold_ids, Tier.DISK, array([0, 1, 2]))
    tree.touch(cold_ids[:1], 5)
    assert 1 == tree.victim_value(Tier.HOST, 5)
    assert [5, 1, 2] == [tree.value_of(int(ids[0]), 5) for ids in (cold_ids, cold_ids[1:], hot_ids)]
    victims = tree.take_victims(Tier.HOST, 4)
    assert [*cold_ids[:0:-1], *hot_ids[::-1]] == victims.tolist()
    tree.lease(hot_ids)
    removed = tree.evict(victims, Tier.HOST)
    assert (0, 2, [2, 1]) == (removed.blocks, removed.kept, removed.slots(Tier.HOST).tolist())
    assert 2 == len(removed.displaced_keys)
    assert 3 == tree.match(ROOT, cold).size
    assert [NO_SLOT, NO_SLOT] == tree.slots(cold_ids[1:], Tier.HOST).tolist()
    tree.release(hot_ids)
    assert [*hot_ids[::-1], cold_ids[0]] == tree.take_victims(Tier.HOST, 9).tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda tree, ids: tree.match(b"short", array([1])),
        lambda tree, ids: tree.stage(b"long".ljust(17), array([1]), 0, 1),
        lambda tree, ids: tree.stage(ROOT, array([1]), -1, 1),
        lambda tree, ids: tree.drop_unheld(ROOT, array([1]), -1),
        lambda tree, ids: tree.touch(np.append(ids, np.uint32(999_999)), 99),
        lambda tree, ids: tree.touch(ids, 99, ids.size - 1),
        lambda tree, ids: tree.touch(ids, 99, 2**32),
        lambda tree, ids: tree.touch(ids, TICK_MAX + 1),
        lambda tree, ids: tree.hint_next_use(4, 99, None),
        lambda tree, ids: tree.hint_next_use(0, 99, -1.0),
        lambda tree, ids: tree.hint_next_use(0, 99, nan),
        lambda tree, ids: tree.hint_next_use(0, TICK_MAX + 1, None),
        lambda tree, ids: tree.value_of(4, 99),
        lambda tree, ids: tree.value_of(0, TICK_MAX + 1),
        lambda tree, ids: tree.victim_value(Tier.HOST, TICK_MAX + 1),
        lambda tree, ids: tree.lease(np.append(ids, np.uint32(4))),
        lambda tree, ids: tree.release(ids),
        lambda tree, ids: tree.place(ids, Tier.DISK, array([1])),
        lambda tree, ids: tree.place(ids[:1], Tier.DISK, array([NO_SLOT])),
        lambda tree, ids: tree.slots(ids, Tier.PEER),
        lambda tree, ids: tree.take_victims(Tier.HOST, -1),
        lambda tree, ids: tree.take_victims(Tier.HOST, 1, nan),
        lambda tree, ids: tree.take_range(Tier.HOST, -1, 1),
        lambda tree, ids: tree.missing_in(Tier.DISK, Tier.HOST, -1),
        lambda tree, ids: tree.boundaries(0),
        lambda tree, ids: tree.boundaries(1, -1),
        lambda tree, ids: tree.take_range(Tier.HOST, 0, 1, 2**32),
        lambda tree, ids: tree.prepare_keys(np.append(ids, np.uint32(4))),
        lambda tree, ids: tree.evict(np.append(ids, np.uint32(4)), Tier.HOST),
        lambda tree, ids: tree.drop(np.append(ids, np.uint32(2**32 - 1))),
        lambda tree, ids: tree.keys(array([77])),
        lambda tree, ids: tree.root_of(77),
        lambda tree, ids: RadixTree(0, ns_key=NS_KEY, hash_seed=1),
        lambda tree, ids: RadixTree(16, ns_key=b"", hash_seed=1),
        lambda tree, ids: RadixTree(16, ns_key=NS_KEY, hash_seed=1, policy="mru"),
        lambda tree, ids: RadixTree(16, ns_key=NS_KEY, hash_seed=1, slice_blocks=0),
        lambda tree, ids: RadixTree(16, ns_key=NS_KEY, hash_seed=1, edge_blocks=0),
    ],
)
def test_bad_arguments_raise_before_anything_changes(call: Callable[[RadixTree, np.ndarray], object]) -> None:
    tree = new_tree()
    prompt = random_prompt(15, 4)
    ids = store(tree, prompt)
    with pytest.raises(ValueError, match=r"."):
        call(tree, ids)
    assert (4, 4, 1) == (tree.block_count, tree.tier_blocks(Tier.HOST), tree.victim_value(Tier.HOST, 1))
    assert ids[::-1].tolist() == tree.take_victims(Tier.HOST, 9).tolist()
    assert [] == tree.check_integrity()


def test_a_release_too_many_takes_no_hold_at_all() -> None:
    tree = new_tree()
    ids = store(tree, random_prompt(16, 3))
    tree.lease(ids[:2])
    with pytest.raises(ValueError, match="not leased that often"):
        tree.release(ids)
    assert ids[2:].tolist() == tree.take_victims(Tier.HOST, 9).tolist()


def test_holds_and_ticks_end_where_they_can_no_longer_be_counted() -> None:
    tree = new_tree()
    ids = store(tree, random_prompt(17, 2))
    most = 2**18 - 1
    tree.lease(np.repeat(ids[:1], most))
    with pytest.raises(ValueError, match="leased 262143 times already"):
        tree.lease(ids[::-1])
    assert ids[1:].tolist() == tree.take_victims(Tier.HOST, 9).tolist()
    tree.touch(ids, TICK_MAX)
    later = TICK_MAX + 1
    for call in (lambda: tree.touch(ids, later), lambda: tree.stage(ROOT, random_prompt(17, 3), 0, later)):
        with pytest.raises(ValueError, match="above"):
            call()
    tree.release(np.repeat(ids[:1], most))
    assert 2 == tree.block_count


def test_removals_tell_whether_ids_of_a_match_still_hold() -> None:
    tree = new_tree()
    prompt = random_prompt(18, 6)
    ids = store(tree, prompt)
    before = tree.removals
    store(tree, np.concatenate([prompt[: 3 * BLOCK_TOKENS], random_prompt(19, 3)]), first_slot=6)
    tree.lease(ids)
    tree.release(ids)
    assert before == tree.removals
    for remove in (
        lambda: tree.drop(ids[5:]),
        lambda: tree.drop_unheld(ROOT, prompt, 4),
        lambda: tree.evict(tree.take_victims(Tier.HOST, 1), Tier.HOST),
        lambda: tree.release(tree.stage(ROOT, random_prompt(20, 1), 0, 9)[1]),
        tree.clear,
    ):
        remove()
        assert before < tree.removals
        before = tree.removals


@pytest.mark.parametrize("tokens", [np.arange(16, dtype=np.int64), np.zeros((2, 16), np.uint32), list(range(16))])
def test_tokens_of_another_type_are_refused(tokens: object) -> None:
    with pytest.raises(TypeError):
        new_tree().match(ROOT, tokens)  # type: ignore[arg-type]


def test_the_stub_names_what_the_native_module_has() -> None:
    stub = (Path(inspect.getfile(RadixTree)).parent / "_native.pyi").read_text()
    module_names = set(re.findall(r"^(?:class )?(\w+)[:(]", stub, re.MULTILINE)) - {"import", "from"}
    assert module_names == {name for name in dir(_native) if not name.startswith("_")}
    for cls in (_native.RadixTree, _native.Removed):
        body = stub.split(f"class {cls.__name__}:")[1].split("\nclass ")[0]
        parameters = {
            name: re.findall(r"(\w+):", signature) for name, signature in re.findall(r"def (\w+)\(([^)]*)\)", body)
        }
        assert {name for name in parameters if name != "__init__"} == {n for n in dir(cls) if not n.startswith("_")}
        for name, expected in parameters.items():
            signature = (getattr(cls, name).__doc__ or "").split(" -> ")[0]
            if "(" in signature:
                assert expected == re.findall(r"(\w+): ", signature)
