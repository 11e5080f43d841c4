"""What the index costs, beside a floor in C++ and the indexes of engines, on one workload (see radix_workload.py).

    python bench/bench_radix.py [--blocks 100000] [--block-tokens 16] [--rounds 5] [--peers kvstore,floor] [--json FILE]

Every answer is compared with the expected depth; a wrong one ends the run. Peers take turns, round by round, at being
filled and on the same lookups, so that other load on the machine meets all of them. Peers that are not installed are
left out.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from machine import describe
from radix_peers import PEERS, ROOT, Kvstore
from radix_workload import make_workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from radix_peers import Peer
    from radix_workload import Query, Workload

FILLS = 5
LONG_TOKENS = 131_072
LONG_CALLS = 2000
LONG_ROUNDS = 5


class Results:
    """The rows of a run, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def keep(self, **row: object) -> None:
        """Add one row."""
        self.rows.append(row)
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)


def first_filled(results: Results, name: str, workload: Workload) -> Peer | None:
    """A filled peer, whose memory is counted, or None where it is not installed."""
    try:
        peer = PEERS[name](workload)
    except ImportError as error:
        print(f"{name}: left out ({error}); {PEERS[name].install}", file=sys.stderr)
        return None
    before = _resident_bytes()
    _fill(peer, workload)
    row: dict[str, object] = {"bytes_per_block": round((_resident_bytes() - before) / workload.blocks, 1)}
    if isinstance(peer, Kvstore):
        assert peer.tree.block_count == workload.blocks
        row["counted_bytes_per_block"] = round(peer.tree.memory_bytes / workload.blocks, 1)
        row["nodes"] = peer.tree.node_count
    results.keep(op="memory", peer=name, **row)
    return peer


def measure_inserts(results: Results, names: list[str], workload: Workload) -> None:
    """The rate at which fresh indexes are filled, in turn: the median, and the best.

    The first fill of a process, in which the system gives out pages, is that of `first_filled` and not among them.
    """
    took_ns: defaultdict[str, list[int]] = defaultdict(list)
    for _ in range(FILLS):
        for name in names:
            took_ns[name].append(_fill(PEERS[name](workload), workload))
    for name, values in took_ns.items():
        median, best = (round(workload.blocks / value * 1e9) for value in (statistics.median(values), min(values)))
        results.keep(op="insert", peer=name, blocks=workload.blocks, blocks_per_s=median, best_blocks_per_s=best)


def _fill(peer: Peer, workload: Workload) -> int:
    """Store all prompts turn by turn; returns the time."""
    took_ns = 0
    for index, tokens in workload.inserts:
        prepared = peer.prepare_insert(workload.prompts[index][:tokens])
        took_ns += peer.timed_store(prepared)
    return took_ns


def measure_lookups(results: Results, peers: dict[str, Peer], workload: Workload, rounds: int) -> None:
    """Latencies of all lookups, by kind and length."""
    times_us: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, peer in peers.items():
            for query in workload.queries:
                times_us[query.op, query.prompt.size, name].append(_ask(name, peer, query) / 1e3)
    for (op, tokens, name), values in sorted(times_us.items()):
        values.sort()
        p50_us, p99_us = statistics.median(values), values[int(len(values) * 0.99)]
        results.keep(
            op=op, peer=name, tokens=tokens, p50_us=round(p50_us, 2), p99_us=round(p99_us, 2), calls=len(values)
        )


def _ask(name: str, peer: Peer, query: Query) -> int:
    blocks, took_ns = peer.timed_find(peer.prepare(query.prompt))
    if blocks != query.blocks:
        raise SystemExit(f"{name}: {query.op} of {query.prompt.size} tokens found {blocks} blocks, not {query.blocks}")
    return took_ns


def measure_side_by_side(results: Results, kvstore: Kvstore, workload: Workload) -> None:
    """Long lookups by one worker, and as many by each of two: twice the work in how much more time?

    Two processes that share nothing show what the machine allows at that moment.
    """
    prompts = [query.prompt for query in workload.queries if query.prompt.size == LONG_TOKENS]

    def look_up() -> None:
        for call in range(LONG_CALLS):
            kvstore.tree.match(ROOT, prompts[call % len(prompts)])

    workers: dict[str, Callable[..., Worker]] = {
        "match_threads": threading.Thread,
        "match_processes": multiprocessing.get_context("fork").Process,
    }
    scalings: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(LONG_ROUNDS):
        for op, make in workers.items():
            scalings[op].append(2 * _seconds([make(target=look_up)]) / _seconds([make(target=look_up) for _ in "ab"]))
    for op, values in scalings.items():
        results.keep(op=op, peer="kvstore", tokens=LONG_TOKENS, workers=2, scaling=round(statistics.median(values), 2))


class Worker(Protocol):
    """A thread or a process."""

    def start(self) -> None: ...

    def join(self) -> None: ...


def _seconds(workers: list[Worker]) -> float:
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def measure_integrity(results: Results, kvstore: Kvstore, workload: Workload) -> None:
    """How long a check of every invariant takes."""
    start = time.perf_counter()
    problems = kvstore.tree.check_integrity()
    results.keep(
        op="check_integrity", peer="kvstore", blocks=workload.blocks, seconds=round(time.perf_counter() - start, 4)
    )
    assert problems == [], problems


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000, help="distinct blocks to store")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens in a block")
    parser.add_argument("--rounds", type=int, default=5, help="times that each lookup is done")
    parser.add_argument("--peers", default=",".join(PEERS), help="which to measure (default: all)")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    workload = make_workload(arguments.blocks, arguments.block_tokens)
    results = Results()
    gc.freeze()
    filled = {name: first_filled(results, name, workload) for name in arguments.peers.split(",")}
    peers = {name: peer for name, peer in filled.items() if peer is not None}
    measure_inserts(results, list(peers), workload)
    measure_lookups(results, peers, workload, arguments.rounds)
    kvstore = peers.get("kvstore")
    if isinstance(kvstore, Kvstore):
        measure_side_by_side(results, kvstore, workload)
        measure_integrity(results, kvstore, workload)
    if arguments.json:
        arguments.json.parent.mkdir(exist_ok=True)
        settings = {"blocks": workload.blocks, "block_tokens": workload.block_tokens, "inserts": len(workload.inserts)}
        result = {"machine": describe(), "workload": settings, "rows": results.rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
