"""What prefetching must do in every KvStore: more of the suite in conformance.py, to inherit beside that.

class TestMyStore(PrefetchConformance, KvStoreConformance): ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.conformance import BASE, BLOCKS, MIB, PROMPT
from kvstore.types import Tier

if TYPE_CHECKING:
    from kvstore.api import KvStore
    from kvstore.testing.conformance import OpenStore


class PrefetchConformance:
    """Uses the fixtures of KvStoreConformance."""

    def test_a_prefetch_of_what_is_in_host_memory_or_nowhere_is_done_at_once(self, store: KvStore) -> None:
        store_prompt(store, BASE, PROMPT)
        for prompt, expected in ((PROMPT, BLOCKS), ([*PROMPT, *range(8)], BLOCKS), ([1, 2, 3, 4], 0), ([], 0)):
            prefetch = store.prefetch(BASE, prompt)
            assert (expected, True) == (prefetch.host_blocks, prefetch.done)
            prefetch.cancel()
            prefetch.cancel()
        assert store.stats().lookups == 0

    def test_a_prefetch_brings_up_what_lies_on_disk_alone(self, open_store: OpenStore) -> None:
        with open_store(MIB, 64 * MIB) as store:
            prompt = prompt_on_disk(store)
            match = store.match(BASE, prompt)
            with store.lease(match, tiers={Tier.HOST}) as lease:
                assert lease.blocks == 0
            with store.prefetch(BASE, prompt, wait_seconds=None) as prefetch:
                assert (prefetch.host_blocks, prefetch.done) == (20, True)
            match = store.match(BASE, prompt)
            assert match.tiers == {Tier.HOST: 20}
            with store.lease(match, tiers={Tier.HOST}) as lease:
                assert lease.blocks == 20
            assert verified_blocks(store, BASE, prompt) == 20
            stats = store.stats()
            assert (stats.prefetches, stats.prefetched_blocks) == ({"done": 1}, 20)

    def test_a_prefetch_that_is_waited_for_later_tells_the_same(self, open_store: OpenStore) -> None:
        with open_store(MIB, 64 * MIB) as store:
            prefetch = store.prefetch(BASE, prompt_on_disk(store))
            assert prefetch.wait() == 20
            assert (prefetch.wait(0), prefetch.done) == (20, True)

    @pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e9])
    def test_a_wait_that_cannot_be_is_refused(self, store: KvStore, seconds: float) -> None:
        with pytest.raises(InvalidArgumentError, match="wait_seconds is"):
            store.prefetch(BASE, PROMPT, wait_seconds=seconds)

    def test_a_lease_of_no_tier_is_refused(self, store: KvStore) -> None:
        match = store.match(BASE, PROMPT)
        for tiers in ((), ("host",), {2}):
            with pytest.raises(InvalidArgumentError, match="tiers is"):
                store.lease(match, tiers=tiers)  # type: ignore[arg-type]


def prompt_on_disk(store: KvStore) -> list[int]:
    """A prompt of 20 blocks that lie on disk alone, in a store of 1 MiB that has room for them in host memory."""
    prompts = [list(range(start, start + 80)) for start in range(0, 150 * 80, 80)]
    for prompt in prompts:
        store_prompt(store, BASE, prompt)
    matches = [store.match(BASE, prompt, touch=False) for prompt in prompts]
    found = next(index for index, match in enumerate(matches) if (match.blocks, match.host_blocks) == (20, 0))
    for prompt in [prompt for prompt, match in zip(prompts, matches, strict=True) if match.host_blocks == 20][:4]:
        store.evict(BASE, prompt)
    return prompts[found]
