"""The index is checked beside stores, lookups, evictions and clears, and none of them is taken for damage."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore.store import Store, open_store
from kvstore.testing.blocks import store_prompt
from kvstore.testing.conformance import BASE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.types import Verification

MIB = 1 << 20
PROMPT_BLOCKS = 40
ROUNDS = 40
PROMPTS = 30


def prompts() -> list[list[int]]:
    """Prompts that share beginnings of many lengths."""
    rng = np.random.default_rng(7)
    tokens = BASE.layout.block_tokens * PROMPT_BLOCKS
    found = [rng.integers(0, 1000, tokens).tolist()]
    while len(found) < PROMPTS:
        parent = found[int(rng.integers(len(found)))]
        kept = int(rng.integers(tokens))
        found.append([*parent[:kept], *rng.integers(0, 1000, tokens - kept).tolist()])
    return found


def churn(store: Store, known: list[list[int]]) -> None:
    """Let blocks come and go in all ways."""
    rng = np.random.default_rng(8)
    for round_ in range(ROUNDS):
        for at in rng.permutation(len(known))[:8].tolist():
            store_prompt(store, BASE, known[at])
            with store.lease(store.match(BASE, known[at - 1])):
                pass
        store.evict(BASE, known[round_ % len(known)], from_block=int(rng.integers(PROMPT_BLOCKS)))
        if round_ % 8 == 7:
            store.clear(BASE)


def test_what_goes_on_beside_a_check_is_not_taken_for_damage(tmp_path: Path) -> None:
    with open_store(tmp_path, host_bytes=4 * MIB, disk_bytes=16 * MIB, free_floor_bytes=0) as store:
        worker = threading.Thread(target=churn, args=(store, prompts()))
        worker.start()
        checks = [store.verify()]
        while worker.is_alive():
            checks.append(store.verify())
        worker.join()
        checks.append(store.verify())
    assert [()] * len(checks) == [check.problems for check in checks]
    assert len(checks) > 2


def test_checks_at_the_same_time_each_see_all(tmp_path: Path) -> None:
    with open_store(tmp_path, host_bytes=4 * MIB, disk_bytes=16 * MIB, free_floor_bytes=0) as store:
        for prompt in prompts()[:8]:
            store_prompt(store, BASE, prompt)
        alone = store.verify()
        together: list[Verification] = []
        check: Callable[[], None] = lambda: together.append(store.verify())  # noqa: E731
        threads = [threading.Thread(target=check) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [alone] * 3 == together
