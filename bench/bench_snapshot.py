"""What saving and restoring the eviction policy's state costs, on the prompts of radix_workload.py.

    python bench/bench_snapshot.py [--blocks 1000000] [--block-tokens 16] [--rounds 5] [--policy survival] [--json FILE]

Two cases: runs as the prompts make them, and the worst one, in which every second block was used at another time.
Each round builds the tree anew, since saving makes keys that a second save finds. Slices are given by the clock and by
the processor time of the thread, in which it does not count that another process took the core meanwhile. What a
hypervisor takes counts in both, so a checksum over the same bytes is timed after each slice: what that takes at most is
the machine's. Rounds do the same slices, so what a slice itself costs shows in the least of its times.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from machine import describe
from radix_workload import make_workload

from kvstore.radix.tree import RadixTree
from kvstore.store.snapshot import Moment, PolicySnapshot, SnapshotOwner, unpack_snapshot
from kvstore.tiers.faults import FaultCounts
from kvstore.tiers.file_io import SystemIo
from kvstore.tiers.policy_files import PolicyFiles
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radix_workload import Workload

ROOT = b"root" * 4
NS_ID = b"bench" + bytes(11)
HASH_SEED = 1
FIRST_TICK = 1 << 46
LEAVING_BLOCKS = 20_000
FILE_BYTES_MAX = 1 << 30
FLOOR_BYTES = bytes(16 << 10)  # a checksum over it takes about as long as a slice
PAUSE_US_MAX = 100


def new_tree(workload: Workload, policy: str) -> RadixTree:
    """An empty tree."""
    return RadixTree(workload.block_tokens, ns_key=b"key." * 4, hash_seed=HASH_SEED, policy=policy)


def built_tree(workload: Workload, policy: str, *, scattered: bool) -> RadixTree:
    """All prompts on disk, some gone again; a request a second."""
    tree = new_tree(workload, policy)
    tick = FIRST_TICK
    for index, tokens in workload.inserts:
        tick += 1_000_000
        prompt = workload.prompts[index][:tokens]
        found = tree.match(ROOT, prompt)
        tree.touch(found, tick, tokens // workload.block_tokens)
        add(tree, prompt, tick)
    if scattered:
        for prompt in workload.prompts:
            tick += 1_000_000
            tree.touch(tree.match(ROOT, prompt)[::2].copy(), tick, prompt.size)
    tree.evict(tree.take_victims(Tier.DISK, LEAVING_BLOCKS), Tier.DISK)
    while tree.condemned:
        tree.reap()
    return tree


def add(tree: RadixTree, prompt: np.ndarray[tuple[int], np.dtype[np.uint32]], tick: int) -> None:
    """Store a prompt; a slot has the number of its block."""
    existing, ids = tree.stage(ROOT, prompt, 0, tick)
    tree.place(ids[existing:], Tier.DISK, ids[existing:])
    tree.release(ids)


def adopted_tree(workload: Workload, before: RadixTree, tick: int) -> RadixTree:
    """The blocks of a tree in a new one, as a restart finds them."""
    tree = new_tree(workload, before.policy_name)
    for prompt in workload.prompts:
        kept = before.match(ROOT, prompt).size * workload.block_tokens
        add(tree, prompt[:kept], tick)
    return tree


def timed_slices(take: Callable[[int], tuple[bytes, int | None]]) -> Iterator[tuple[bytes, float, float, float]]:
    """Every slice of a part, the seconds it took, those of the processor, and these of a checksum after it."""
    first: int | None = 0
    while first is not None:
        began, began_cpu = time.perf_counter(), time.thread_time()
        piece, first = take(first)
        seconds, seconds_cpu = time.perf_counter() - began, time.thread_time() - began_cpu
        began_cpu = time.thread_time()
        zlib.crc32(FLOOR_BYTES)
        yield piece, seconds, seconds_cpu, time.thread_time() - began_cpu


def measure_round(workload: Workload, policy: str, *, scattered: bool) -> dict[str, object]:
    """One way out and back, with what each slice took."""
    tree = built_tree(workload, policy, scattered=scattered)
    parts = []
    slices: dict[str, list[float]] = {"slices": [], "slices_cpu": [], "floors_cpu": []}
    for take in (tree.save_tables, lambda first: tree.save_runs(Tier.DISK, first), tree.save_ghosts):
        pieces, *times = zip(*timed_slices(take), strict=True)
        parts.append(b"".join(pieces))
        for kind, values in zip(slices.values(), times, strict=True):
            kind.extend(values)
    began, began_cpu = time.perf_counter(), time.thread_time()
    owner = SnapshotOwner(policy, NS_ID, workload.block_tokens)
    moment = Moment(FIRST_TICK, 0)
    packed = PolicySnapshot(owner, moment, HASH_SEED, *parts).pack()
    with tempfile.TemporaryDirectory() as folder:
        files = PolicyFiles(SystemIo(), Path(folder), FaultCounts(), FILE_BYTES_MAX)
        assert files.save(NS_ID, packed)
        save_seconds = time.perf_counter() - began + sum(slices["slices"])
        save_cpu = time.thread_time() - began_cpu + sum(slices["slices_cpu"])
        restored = adopted_tree(workload, tree, FIRST_TICK)
        began, began_cpu = time.perf_counter(), time.thread_time()
        saved = unpack_snapshot(files.load(NS_ID) or b"", owner)
        restored.restore(saved.tables, saved.runs, saved.ghosts, shift=0, tick=FIRST_TICK)
        restore_seconds, restore_cpu = time.perf_counter() - began, time.thread_time() - began_cpu
    assert restored.block_count == tree.block_count
    return {
        "blocks": tree.block_count,
        "runs": len(parts[1]) // 40,
        "ghosts": (len(parts[2]) - 8) // 32,
        "bytes": len(packed),
        "save_s": save_seconds,
        "save_cpu_s": save_cpu,
        "restore_s": restore_seconds,
        "restore_cpu_s": restore_cpu,
        **slices,
    }


def row_of(case: str, rounds: list[dict[str, object]]) -> dict[str, object]:
    """What the rounds of a case say together."""
    slices, slices_cpu, floors_cpu = (
        np.array([found[name] for found in rounds]) * 1e6 for name in ("slices", "slices_cpu", "floors_cpu")
    )
    times = ("save_s", "save_cpu_s", "restore_s", "restore_cpu_s")
    return {
        "op": "snapshot",
        "case": case,
        **{name: rounds[0][name] for name in ("blocks", "runs", "ghosts", "bytes")},
        **{name: round(statistics.median(float(str(found[name])) for found in rounds), 3) for name in times},
        "slices": slices.shape[1],
        "slice_p50_us": round(float(np.median(slices)), 1),
        "slice_p99_us": round(float(np.quantile(slices, 0.99)), 1),
        "slice_max_us": round(float(slices.max()), 1),
        "slice_cpu_max_us": round(float(slices_cpu.max()), 1),
        "slice_own_max_us": round(float(slices_cpu.min(axis=0).max()), 1),
        "slices_cpu_above_100_us": int((slices_cpu > PAUSE_US_MAX).sum()),
        "floor_cpu_p50_us": round(float(np.median(floors_cpu)), 1),
        "floor_cpu_max_us": round(float(floors_cpu.max()), 1),
        "floors_cpu_above_100_us": int((floors_cpu > PAUSE_US_MAX).sum()),
    }


def main() -> None:
    """Measure and print; write the JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policy", default="survival")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    workload = make_workload(options.blocks + LEAVING_BLOCKS, options.block_tokens)
    rows = []
    gc.disable()  # it would run in some slice, over all that this program holds
    for case, scattered in (("prompts", False), ("every block a run", True)):
        rounds = [measure_round(workload, options.policy, scattered=scattered) for _ in range(options.rounds)]
        rows.append(row_of(case, rounds))
        print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps(
                {"machine": describe(), "workload": {"policy": options.policy, "rounds": options.rounds}, "rows": rows},
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
