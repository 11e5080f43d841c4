"""How fast the disk tier reads and writes, beside fio on the same files in the same run.

    python bench/bench_disk.py [--dir FOLDER] [--megabytes 512] [--rounds 5] [--json FILE]

Blocks of 256 KiB, 1 MiB and 4 MiB are written and read through a DiskPool, taking turns with fio, which reads and
writes the same slab files with O_DIRECT: threads with preadv/pwritev at the same depth, io_uring and libaio. Where
fio is missing, a loop of preadv/pwritev in as many threads stands in, and `floor` says so. fio moves one buffer again
and again, which stays in the cache; "threads, same memory" is such a loop over the very rows that the tier moves. The
tier's own calls are measured from and to plain pages and huge ones, and, for reads, into rows that are not
page-aligned; "checksum alone" is what one thread takes for it, so what the tier takes besides is the difference.
Rates are GB/s (1e9 bytes of payload), medians; `share` is that of fio's threads at the same depth, `cpu` is CPU seconds
per GB of this process, or of fio.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from machine import describe

from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.buffers import PAGE_BYTES, aligned_bytes
from kvstore.tiers.checksum import array_digest
from kvstore.tiers.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.tiers.disk_pool import DiskPool

MIB = 1 << 20
BLOCK_BYTES = (256 << 10, MIB, 4 * MIB)
DEPTHS = (4, 8)
BLOCK_TOKENS = 16
NS_ID = b"n" * 16


@dataclass
class Taken:
    """What one way took, turn by turn."""

    gigabytes: float
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        rate = self.gigabytes / statistics.median(self.seconds)
        return {"gb_per_s": round(rate, 3), "cpu": round(statistics.median(self.cpu_seconds) / self.gigabytes, 3)}


@dataclass
class Blocks:
    """Blocks in memory as the store has them: rows of page-aligned memory, and slots for them on disk."""

    tier: DiskTier
    pool: DiskPool
    slots: np.ndarray
    rows: np.ndarray
    huge_rows: np.ndarray
    unaligned: np.ndarray
    identities: list[BlockIdentity]

    def write(self, rows: np.ndarray) -> None:
        assert self.pool.write(self.slots, self.identities, [(row,) for row in rows]).all()

    def read(self, rows: np.ndarray) -> None:
        assert self.pool.read(self.slots, self.identities, rows).all()

    def digest(self) -> None:
        for row in self.rows:
            array_digest(row)

    @property
    def paths(self) -> list[Path]:
        return [slab.path for slab in self.pool.slabs]


def plain_pages(size_bytes: int) -> np.ndarray:
    """Page-aligned memory of 4 KiB pages, whatever the system would rather give."""
    memory = mmap.mmap(-1, size_bytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


@contextmanager
def opened(folder: Path, block_bytes: int, depth: int, count: int) -> Iterator[Blocks]:
    """A tier in a folder of its own that holds `count` blocks."""
    path = Path(tempfile.mkdtemp(dir=folder))
    capacity_bytes = 2 * count * block_bytes + 512 * MIB
    tier = DiskTier.open(path, capacity_bytes=capacity_bytes, io_threads=depth, free_floor_bytes=0)
    try:
        pool = tier.pool(NS_ID, (block_bytes,), BLOCK_TOKENS)
        rows = plain_pages(count * block_bytes).reshape(count, block_bytes)
        huge_rows = aligned_bytes(count * block_bytes).reshape(count, block_bytes)
        unaligned = aligned_bytes(count * block_bytes + 64)[64:].reshape(count, block_bytes)
        rows[:] = np.random.default_rng(1).integers(0, 256, block_bytes, dtype=np.uint8)
        huge_rows[:] = rows
        tokens = np.zeros(BLOCK_TOKENS, dtype="<u4").tobytes()
        identities = [
            BlockIdentity(b"r" * 16, i.to_bytes(16, "big"), (i + 1).to_bytes(16, "big"), tokens) for i in range(count)
        ]
        slots = pool.allocate(count)
        assert len(slots) == count, "the file system has no room for this; choose another --dir"
        yield Blocks(tier, pool, slots, rows, huge_rows, unaligned, identities)
    finally:
        tier.close()
        shutil.rmtree(path)


def fio(paths: list[Path], direction: str, block_bytes: int, engine: str, depth: int) -> tuple[float, float]:
    """Seconds and CPU seconds that fio takes for as many bytes as fit behind the first page of each file."""
    lines = [
        *("[global]", "direct=1", "thread=1", "group_reporting=1", f"bs={block_bytes}", f"rw={direction}"),
        *(f"offset={PAGE_BYTES}", "file_service_type=sequential", "allow_file_create=0", "fallocate=none"),
    ]
    jobs = depth if engine == "psync" else 1
    lines += [f"ioengine={engine}", f"iodepth={1 if engine == 'psync' else depth}"]
    for job in range(min(jobs, len(paths))):
        chosen = paths[job::jobs]
        size = sum((path.stat().st_size - PAGE_BYTES) // block_bytes * block_bytes for path in chosen)
        lines += [f"[job{job}]", f"filename={':'.join(map(str, chosen))}", f"io_size={size}"]
    done = subprocess.run(
        ["fio", "--output-format=json", "-"], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = job[direction]
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    share = moved["io_bytes"] / 1e9
    return share / (moved["bw_bytes"] / 1e9), cpu_seconds


def python_floor(
    paths: list[Path], direction: str, block_bytes: int, depth: int, rows: np.ndarray | None = None
) -> tuple[float, float]:
    """The same by preadv or pwritev in threads, from or to `rows`, else one buffer in each thread, as fio does it."""
    flags = os.O_DIRECT | (os.O_RDONLY if direction == "read" else os.O_WRONLY)
    call = os.preadv if direction == "read" else os.pwritev
    moves = [
        (path, offset)
        for path in paths
        for offset in range(PAGE_BYTES, path.stat().st_size - block_bytes + 1, block_bytes)
    ]
    files = {path: os.open(path, flags) for path in paths}

    def move(job: int) -> None:
        buffer = aligned_bytes(block_bytes)
        for number in range(job, len(moves), depth):
            path, offset = moves[number]
            call(files[path], [(buffer if rows is None else rows[number % len(rows)]).data], offset)

    try:
        return timed(lambda: run_in_threads(move, range(depth)))
    finally:
        for fd in files.values():
            os.close(fd)


def run_in_threads(call: Callable[[int], None], jobs: range) -> None:
    with ThreadPoolExecutor(len(jobs)) as threads:
        list(threads.map(call, jobs))


def timed(call: Callable[[], object]) -> tuple[float, float]:
    start, cpu_start = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - cpu_start


def measure(folder: Path, block_bytes: int, depth: int, count: int, rounds: int) -> list[dict[str, object]]:
    """All ways in turn. fio's writes spoil the slots, and the tier's write that follows makes them good."""
    engines = ("psync", "io_uring", "libaio") if shutil.which("fio") else ()
    gigabytes = count * block_bytes / 1e9
    taken: dict[tuple[str, str], Taken] = {}

    def keep(direction: str, way: str, spent: tuple[float, float]) -> None:
        row = taken.setdefault((direction, way), Taken(gigabytes))
        row.seconds.append(spent[0])
        row.cpu_seconds.append(spent[1])

    with opened(folder, block_bytes, depth, count) as blocks:
        held = sum((path.stat().st_size - PAGE_BYTES) // block_bytes * block_bytes for path in blocks.paths)
        scale = count * block_bytes / held  # fio fills the files, blocks may not
        blocks.write(blocks.rows)  # first writes of fresh files cost their extents
        for _ in range(rounds):
            for direction, own in (("write", blocks.write), ("read", blocks.read)):
                for engine in engines:
                    spent = fio(blocks.paths, direction, block_bytes, engine, depth)
                    keep(direction, f"fio {engine}", (spent[0] * scale, spent[1] * scale))
                for way, memory in (("threads, one buffer", None), ("threads, same memory", blocks.rows)):
                    spent = python_floor(blocks.paths, direction, block_bytes, depth, memory)
                    keep(direction, way, (spent[0] * scale, spent[1] * scale))
                if direction == "write":  # what the floor wrote is no block; and it filled the rows when it read
                    blocks.write(blocks.huge_rows)
                else:
                    keep(direction, "tier, unaligned rows", timed(partial(own, blocks.unaligned)))
                keep(direction, "tier, huge pages", timed(partial(own, blocks.huge_rows)))
                keep(direction, "tier", timed(partial(own, blocks.rows)))
                keep(direction, "checksum alone", timed(blocks.digest))
    return [row for direction in ("write", "read") for row in rows_of(taken, direction, block_bytes, depth)]


def rows_of(
    taken: dict[tuple[str, str], Taken], direction: str, block_bytes: int, depth: int
) -> Iterator[dict[str, object]]:
    ways = {way: found.row() for (kind, way), found in taken.items() if kind == direction}
    floor = ways.get("fio psync") or ways["threads, one buffer"]
    for way, row in ways.items():
        share = round(row["gb_per_s"] / floor["gb_per_s"], 3)
        found = {"op": direction, "block_kib": block_bytes >> 10, "depth": depth, "way": way, **row, "share": share}
        print("  ".join(f"{name}={value}" for name, value in found.items()), flush=True)
        yield found


def main() -> None:
    """Measure and print; `--json` keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="a folder on the file system to measure; the temporary one by default")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=arguments.dir))
    rows: list[dict[str, object]] = []
    try:
        for block_bytes in BLOCK_BYTES:
            for depth in DEPTHS:
                count = max(1, arguments.megabytes * MIB // block_bytes)
                rows += measure(folder, block_bytes, depth, count, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    floor = fio_version()
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe(), "floor": floor, "rows": rows}, indent=1) + "\n")


def fio_version() -> str:
    """Which fio measured the floor."""
    if not shutil.which("fio"):
        return "fio is missing: threads of this Python took its place"
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
