"""What evicting costs with each policy, on the workload of bench_radix.py.

    python bench/bench_eviction.py [--blocks 100000] [--block-tokens 16] [--rounds 60] [--policies survival,lru]
                                   [--json FILE]

A tree that is full takes new prompts of 12k tokens, each of which evicts as many blocks as it brings, and between them
some stored prompts are looked up. Timed are the calls from Python, in microseconds a block, medians of all rounds:
choosing (`take_victims`), taking out (`evict`), and beside them `touch` and `stage`, where policies keep their
histories. Policies take turns prompt by prompt, so that other load on the machine meets all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from machine import describe
from radix_workload import VOCABULARY, make_workload

from kvstore.radix.tree import POLICIES, RadixTree
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from radix_workload import Workload

ROOT = bytes(16)
PROMPT_TOKENS = 12_288
LOOKUPS_PER_ROUND = 8
SECOND = 1_000_000

Result = TypeVar("Result")


class FullTree:
    """A tree that holds the workload and has no room for more."""

    def __init__(self, policy: str, workload: Workload) -> None:
        self.tree = RadixTree(workload.block_tokens, ns_key=bytes(range(16)), hash_seed=0x5EED, policy=policy)
        self.ns_per_block: defaultdict[str, list[float]] = defaultdict(list)
        self._tick = 0
        next_slot = 0
        for index, tokens in workload.inserts:
            fresh, ids = self._stage(workload.prompts[index][:tokens])
            self.tree.place(fresh, Tier.HOST, np.arange(next_slot, next_slot + fresh.size, dtype=np.uint32))
            next_slot += fresh.size
            self.tree.release(ids)
        self.ns_per_block.clear()

    def look_up(self, prompt: NDArray[np.uint32]) -> None:
        """A request that stores nothing."""
        self._tick += SECOND
        ids = self.tree.match(ROOT, prompt)
        blocks = prompt.size // self.tree.block_tokens
        self._timed("touch", blocks, lambda: self.tree.touch(ids, self._tick, blocks))

    def replace(self, prompt: NDArray[np.uint32]) -> None:
        """Store a prompt in place of others."""
        fresh, ids = self._stage(prompt)
        freed: list[NDArray[np.uint32]] = []
        left = fresh.size
        while left > 0:
            victims = self._timed("take_victims", left, lambda: self.tree.take_victims(Tier.HOST, left))  # noqa: B023
            removed = self._timed("evict", left, lambda: self.tree.evict(victims, Tier.HOST))  # noqa: B023
            freed.append(removed.slots(Tier.HOST))
            left -= freed[-1].size
            if freed[-1].size == 0:
                raise SystemExit("nothing could be evicted")
        self.tree.place(fresh, Tier.HOST, np.concatenate(freed))
        self.tree.release(ids)

    def _stage(self, prompt: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """A lookup and a stage: (the blocks that are new, all of the path)."""
        self.look_up(prompt)
        blocks = prompt.size // self.tree.block_tokens
        existing, ids = self._timed("stage", blocks, lambda: self.tree.stage(ROOT, prompt, 0, self._tick))
        return ids[existing:], ids

    def _timed(self, op: str, blocks: int, call: Callable[[], Result]) -> Result:
        start = time.perf_counter_ns()
        result = call()
        self.ns_per_block[op].append((time.perf_counter_ns() - start) / blocks)
        return result


def measure(trees: dict[str, FullTree], workload: Workload, rounds: int) -> list[dict[str, object]]:
    """Rows of what each operation costs with each policy."""
    rng = np.random.default_rng(7)
    gc.freeze()
    for _ in range(rounds):
        new = rng.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.uint32)
        known = [workload.prompts[int(rng.integers(len(workload.prompts)))] for _ in range(LOOKUPS_PER_ROUND)]
        for tree in trees.values():
            for prompt in known:
                tree.look_up(prompt)
            tree.replace(new)
    rows: list[dict[str, object]] = []
    for policy, tree in trees.items():
        problems = tree.tree.check_integrity()
        assert problems == [], (policy, problems)
        for op, values in tree.ns_per_block.items():
            p50_us = round(statistics.median(values) / 1000, 4)
            rows.append({"op": op, "policy": policy, "us_per_block": p50_us, "calls": len(values)})
        per_block = round(tree.tree.memory_bytes / tree.tree.block_count, 1)
        rows.append({"op": "memory", "policy": policy, "bytes_per_block": per_block, "nodes": tree.tree.node_count})
        rows.append({"op": "policy_memory", "policy": policy, "bytes": tree.tree.policy_bytes})
    return rows


def main() -> None:
    """Measure all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000, help="distinct blocks in the full tree")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens in a block")
    parser.add_argument("--rounds", type=int, default=60, help="prompts that take the place of others")
    parser.add_argument("--policies", default=",".join(POLICIES), help="which to measure (default: all)")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    workload = make_workload(arguments.blocks, arguments.block_tokens)
    rows = measure(
        {name: FullTree(name, workload) for name in arguments.policies.split(",")}, workload, arguments.rounds
    )
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    if arguments.json:
        arguments.json.parent.mkdir(exist_ok=True)
        settings = {"blocks": workload.blocks, "block_tokens": workload.block_tokens, "rounds": arguments.rounds}
        result = {"machine": describe(), "workload": settings, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
