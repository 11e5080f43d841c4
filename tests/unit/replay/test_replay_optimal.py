from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from kvstore.replay.formats import RawRequest
from kvstore.replay.optimal import FutureUses, optimal_hits
from kvstore.replay.trace import Expansion, Trace, assemble_trace

CASES = 200


def trace_of(paths: list[tuple[int, ...]], expand: Expansion | None = None) -> Trace:
    made = [RawRequest(0.0, 4 * len(path), np.array(path, dtype=np.int64)) for path in paths]
    return assemble_trace(made, name="t", block_tokens=4, expand=expand)


def random_paths(source: random.Random) -> list[tuple[int, ...]]:
    tree: list[tuple[int, ...]] = [()]
    for block in range(source.randint(2, 7)):
        tree.append((*source.choice(tree), block))
    return [source.choice(tree) for _ in range(source.randint(2, 9))]


def best_by_search(paths: list[tuple[int, ...]], capacity: int) -> int:
    """Most hits of any way to keep prefix-closed sets: after each request any of what is cached or was its path."""
    best = {frozenset[tuple[int, ...]](): 0}
    for path in paths:
        blocks = [path[: end + 1] for end in range(len(path))]
        following: dict[frozenset[tuple[int, ...]], int] = {}
        for cached, hits in best.items():
            found = hits + sum(block in cached for block in blocks)
            union = sorted(cached.union(blocks))
            for size in range(min(capacity, len(union)) + 1):
                for kept in map(frozenset, combinations(union, size)):
                    if all(len(block) == 1 or block[:-1] in kept for block in kept):
                        following[kept] = max(found, following.get(kept, 0))
        best = following
    return max(best.values())


@pytest.mark.parametrize("seed", range(CASES))
def test_it_finds_as_much_as_exhaustive_search(seed):
    source = random.Random(seed)
    paths = random_paths(source)
    capacity = source.randint(1, 4)

    found = optimal_hits(FutureUses(trace_of(paths)), capacity)

    assert best_by_search(paths, capacity) == found.sum(), (paths, capacity)


def test_without_a_limit_everything_seen_before_is_found():
    found = optimal_hits(FutureUses(trace_of([(1, 2, 3), (9,), (1, 2, 4), (1, 2, 3, 5)])), 100)

    assert [0, 0, 2, 3] == found.tolist()


def test_among_equal_next_uses_the_shallower_blocks_stay():
    assert [0, 2] == optimal_hits(FutureUses(trace_of([(1, 2, 3), (1, 2, 3)])), 2).tolist()


def test_cut_blocks_count_as_so_many_blocks():
    whole = trace_of([(1, 2), (3,), (1, 2), (3,)])
    cut = trace_of([(1, 2), (3,), (1, 2), (3,)], Expansion(4, 2))

    assert (2 * optimal_hits(FutureUses(whole), 2)).tolist() == optimal_hits(FutureUses(cut), 4).tolist()
    assert [0, 0, 4, 1] == optimal_hits(FutureUses(cut), 5).tolist()
