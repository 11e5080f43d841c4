"""Time in the store's index: what eviction policies are told."""

from __future__ import annotations

from kvstore.store.index import Index
from kvstore.store.settings import StoreSettings
from kvstore.testing.manual_clock import ManualClock
from kvstore.tiers.host import HostTier


def test_ticks_are_microseconds_since_the_store_was_opened_and_each_is_larger() -> None:
    clock = ManualClock()
    clock.advance(1000)
    index = Index(StoreSettings(), HostTier(1 << 20), None, clock)
    with index.lock:
        first = index.next_tick()
        assert [first + 1, first + 2] == [index.next_tick() for _ in range(2)]
        clock.advance(2.5)
        assert [first + 2_499_999, first + 2_500_000] == [index.next_tick() for _ in range(2)]
        clock.advance(0.000_001)
        assert first + 2_500_001 == index.next_tick()
