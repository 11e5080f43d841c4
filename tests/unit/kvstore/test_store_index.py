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
        assert [1, 2, 3] == [index.next_tick() for _ in range(3)]
        clock.advance(2.5)
        assert [2_500_000, 2_500_001] == [index.next_tick() for _ in range(2)]
        clock.advance(0.000_001)
        assert 2_500_002 == index.next_tick()
