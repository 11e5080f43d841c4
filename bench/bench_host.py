"""How fast blocks move to and from host memory, beside one plain memcpy of the same bytes in the same run.

    python bench/bench_host.py [--rounds 15] [--megabytes 96] [--json FILE]

Stores and loads through a pool of the host tier and through a store (stage.write_from, lease.load_into), into slots
that are neighbours and into scattered ones, by one and two threads; numpy's assignment run by run, which the native
copy took the place of; the copy that makes a checksum on its way, beside a copy and a checksum in turn; and what the
first touch of new memory costs. Contenders take turns, each time in another order; rates are GB/s (1e9) of the median
round, and `share`, which is what can be compared, is the median of each round's rate over that of its memcpy.
Everything loaded is compared with what was stored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from machine import describe

import kvstore
from kvstore.store import StoreSettings
from kvstore.tiers.checksum import copy_and_digest
from kvstore.tiers.extent import Extent
from kvstore.tiers.extent_stock import HostMemory
from kvstore.tiers.host import HostTier
from kvstore.tiers.huge_pages import choose_pages
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.tiers.host import HostPool

MIB = 1 << 20
BLOCK_BYTES = (32 << 10, 256 << 10, MIB, 4 * MIB)
NS = b"bench-host".ljust(16)
THREADS = (1, 2)
READY_SECONDS = 120

Work = dict[str, "Sequence[Callable[[], object]]"]  # name -> what each thread does


class Bench:
    """Lets contenders take turns, and keeps the rows."""

    def __init__(self, rounds: int, nbytes: int) -> None:
        self.rounds = rounds
        self._nbytes = nbytes
        self.rows: list[dict[str, object]] = []

    def compare(self, work: Work, floor: str, **labels: object) -> None:
        """The median rate of each contender, and its share of that of `floor`, taken round by round."""
        seconds: dict[str, list[float]] = {name: [] for name in work}
        with ThreadPoolExecutor(max(len(calls) for calls in work.values())) as threads:
            for turn in range(self.rounds + 1):  # the first one warms up
                for name in sorted(work, key=lambda name: (list(work).index(name) - turn) % len(work)):
                    calls = work[name]
                    begin = time.perf_counter()
                    for done in [threads.submit(call) for call in calls]:
                        done.result()
                    seconds[name].append(time.perf_counter() - begin)
        for name, times in seconds.items():
            rate = self._nbytes / statistics.median(times[1:]) / 1e9
            share = statistics.median(least / own for least, own in zip(seconds[floor][1:], times[1:], strict=True))
            self.rows.append({"op": name, **labels, "gb_per_s": round(rate, 2), "share": round(share, 3)})
            print("  ".join(f"{key}={value}" for key, value in self.rows[-1].items()), flush=True)


def random_rows(nbytes: int, block_bytes: int) -> np.ndarray:
    """Blocks that do not repeat."""
    return np.random.default_rng(block_bytes).integers(0, 256, (nbytes // block_bytes, block_bytes), dtype=np.uint8)


def shares(rows: np.ndarray, threads: int) -> list[slice]:
    """What each of so many threads takes."""
    edges = [len(rows) * thread // threads for thread in range(threads + 1)]
    return [slice(*pair) for pair in pairwise(edges)]


def measure_pool(bench: Bench, block_bytes: int, nbytes: int) -> None:
    """A pool whose memory is touched: slots in order, and the same number of slots drawn from twice as many."""
    rows = random_rows(nbytes, block_bytes)
    loaded = np.zeros_like(rows)
    with HostTier(2 * nbytes + 64 * MIB, memory=HostMemory(reserve_from_bytes=1)) as tier:
        assert tier.wait_ready(READY_SECONDS)
        pool = tier.pool(NS, (block_bytes,))
        slots = pool.allocate(2 * len(rows))
        drawn = np.random.default_rng(1).permutation(slots)
        for order, chosen in (("contiguous", slots[: len(rows)]), ("scattered", drawn[: len(rows)])):
            for threads in THREADS:
                work = pool_work(pool, chosen, (rows, loaded), shares(rows, threads))
                bench.compare(work, "memcpy", where="pool", block_bytes=block_bytes, slots=order, threads=threads)
            pool.write(chosen, rows)
            loaded[:] = 0
            pool.read(chosen, loaded)
            assert np.array_equal(rows, loaded)


def pool_work(pool: HostPool, slots: np.ndarray, buffers: tuple[np.ndarray, np.ndarray], parts: list[slice]) -> Work:
    """The contenders on a pool; `buffers` are what is stored and what is loaded into."""
    rows, loaded = buffers

    def assign(part: slice) -> None:
        done = part.start
        for piece in pool.pieces(slots[part]):
            count = piece.size // rows.shape[1]
            piece.reshape(count, -1)[...] = rows[done : done + count]
            done += count

    return {
        "memcpy": [lambda part=part: np.copyto(loaded[part], rows[part]) for part in parts],
        "store": [lambda part=part: pool.write(slots[part], rows[part]) for part in parts],
        "load": [lambda part=part: pool.read(slots[part], loaded[part]) for part in parts],
        "numpy's assignment": [lambda part=part: assign(part) for part in parts],
    }


def measure_store(bench: Bench, block_bytes: int, nbytes: int) -> None:
    """A store: its slots in order, and scattered, since a random half of what filled it was evicted."""
    layout = KvLayout(layers=1, kv_heads=1, head_dim=block_bytes // 32, dtype="int8", block_tokens=16)
    namespace = Namespace(model="bench", revision="1", layout=layout)
    rows = random_rows(nbytes, block_bytes)
    for order in ("contiguous", "scattered"):
        settings = StoreSettings(reserve_from_bytes=1)
        with kvstore.open(host_bytes=4 * nbytes, settings=settings) as store, ExitStack() as stack:
            if order == "scattered":
                scatter(store, namespace, rows)
            stages = []
            for index, part in enumerate(shares(rows, max(THREADS))):
                prompt = np.arange((part.stop - part.start) * 16, dtype=np.uint32) + (index + 1) * 2**24
                stages.append((part, prompt, store.stage(namespace, prompt)))
            measure_stages(bench, (namespace, store, stack), stages, rows, {"block_bytes": block_bytes, "slots": order})


def scatter(store: kvstore.KvStore, namespace: Namespace, rows: np.ndarray) -> None:
    """Leave free slots between used ones, in no order."""
    prompts = [np.full(16, index, dtype=np.uint32) for index in range(2 * len(rows))]
    for index, prompt in enumerate(prompts):
        with store.stage(namespace, prompt) as stage:
            stage.write_from(rows[index % len(rows)])
    for index in np.random.default_rng(2).permutation(len(prompts))[: len(rows)]:
        store.evict(namespace, prompts[index])


def measure_stages(
    bench: Bench,
    opened: tuple[Namespace, kvstore.KvStore, ExitStack],
    stages: list[tuple[slice, np.ndarray, kvstore.Stage]],
    rows: np.ndarray,
    labels: dict[str, object],
) -> None:
    """Writes into open stages, then loads of what they stored; one thread does what two do otherwise."""
    namespace, store, stack = opened
    loaded = np.zeros_like(rows)
    copies = [lambda part=part: np.copyto(loaded[part], rows[part]) for part, _, _ in stages]
    writes = [lambda part=part, stage=stage: stage.write_from(rows[part]) for part, _, stage in stages]
    for threads in THREADS:
        work = {"memcpy": by_threads(copies, threads), "store": by_threads(writes, threads)}
        bench.compare(work, "memcpy", where="store", threads=threads, **labels)
    loads = []
    for part, prompt, stage in stages:
        assert stage.commit().blocks == part.stop - part.start
        lease = stack.enter_context(store.lease(store.match(namespace, prompt)))
        loads.append(lambda part=part, lease=lease: lease.load_into(loaded[part]))
    for threads in THREADS:
        work = {"memcpy": by_threads(copies, threads), "load": by_threads(loads, threads)}
        bench.compare(work, "memcpy", where="store", threads=threads, **labels)
    loaded[:] = 0
    for load in loads:
        load()
    assert np.array_equal(rows, loaded)


def by_threads(calls: list[Callable[[], object]], threads: int) -> list[Callable[[], object]]:
    """The same calls, shared out among so many threads."""
    return [lambda start=start: [call() for call in calls[start::threads]] for start in range(threads)]


def measure_checksum(bench: Bench, block_bytes: int, nbytes: int) -> None:
    """Blocks copied into one buffer with their checksum, as they leave host memory for a disk or a wire."""
    rows = random_rows(nbytes, block_bytes)
    target = np.zeros_like(rows)
    pairs = list(zip(target, rows, strict=True))

    def in_turn() -> None:
        for to, row in pairs:
            np.copyto(to, row)
            xxhash.xxh3_64_intdigest(to.data)

    work: Work = {
        "memcpy": [lambda: [np.copyto(to, row) for to, row in pairs]],
        "copy and checksum, fused": [lambda: [copy_and_digest(to, row) for to, row in pairs]],
        "copy and checksum, in turn": [in_turn],
    }
    bench.compare(work, "memcpy", where="checksum", block_bytes=block_bytes, threads=1)
    assert copy_and_digest(target[0], rows[0]) == xxhash.xxh3_64_intdigest(rows[0].data)


def measure_first_touch(bench: Bench, nbytes: int) -> None:
    """The first store into memory that is new, into memory that was touched ahead, and any later one."""
    rows = random_rows(nbytes, MIB)
    target = np.zeros_like(rows)
    with ExitStack() as stack:
        tiers = {"new": [], "touched": []}
        for _ in range(bench.rounds + 1):
            for name, least in (("new", 1 << 60), ("touched", 1)):
                tier = stack.enter_context(HostTier(nbytes, memory=HostMemory(reserve_from_bytes=least)))
                assert tier.wait_ready(READY_SECONDS)
                pool = tier.pool(NS, (MIB,))
                tiers[name].append((pool, pool.allocate(len(rows))))
        turns = {name: iter(opened) for name, opened in tiers.items()}

        def first_store(name: str) -> None:
            pool, slots = next(turns[name])
            pool.write(slots, rows)

        work: Work = {
            "memcpy": [lambda: np.copyto(target, rows)],
            "first store, new memory": [lambda: first_store("new")],
            "first store, touched ahead": [lambda: first_store("touched")],
            "touching ahead": [lambda: touch(nbytes)],
        }
        bench.compare(work, "memcpy", where="first touch", block_bytes=MIB, threads=1)


def touch(nbytes: int) -> None:
    """Make an extent of the best pages that this system gives, and touch it."""
    extent = Extent(nbytes, choose_pages("auto", nbytes))
    extent.touch(nbytes)
    extent.close()


def main() -> None:
    """Measure all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often contenders take turns")
    parser.add_argument("--megabytes", type=int, default=96, help="bytes of each measurement, in MiB")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    nbytes = arguments.megabytes * MIB
    bench = Bench(arguments.rounds, nbytes)
    for block_bytes in BLOCK_BYTES:
        measure_pool(bench, block_bytes, nbytes)
        measure_store(bench, block_bytes, nbytes)
        measure_checksum(bench, block_bytes, nbytes)
    first = Bench(min(arguments.rounds, 5), nbytes)
    measure_first_touch(first, nbytes)
    if arguments.json:
        result = {
            "machine": describe(),
            "pages": choose_pages("auto", nbytes).kind.value,
            "megabytes": arguments.megabytes,
            "rows": bench.rows + first.rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
