"""What the doctor remembers of prompts: fingerprints alone, and as many as it may."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.doctor.seen import Home

T = TypeVar("T")


class Remembered(Generic[T]):
    """Values by fingerprint; what was not met for longest is forgotten first."""

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._entries: OrderedDict[int, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, fingerprint: int) -> T | None:
        """What is remembered of it."""
        return self._entries.get(fingerprint)

    def put(self, fingerprint: int, value: T) -> None:
        """Remember it as the newest."""
        self._entries[fingerprint] = value
        self._entries.move_to_end(fingerprint)
        if len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)


class SeenPrefixes:
    """Which prefixes were looked up before, by the homes in which they were."""

    def __init__(self, entries_max: int) -> None:
        self._homes: Remembered[tuple[Home, ...]] = Remembered(entries_max)

    def __len__(self) -> int:
        return len(self._homes)

    def longest(self, prefixes: Sequence[int], home: Home) -> int:
        """How many of the prefixes, from the shortest on, were seen in a home."""
        return _leading(prefixes, lambda seen: home in (self._homes.get(seen) or ()))

    def longest_elsewhere(self, prefixes: Sequence[int], home: Home) -> tuple[int, Home | None]:
        """The same in other homes of the tenant, and in which one."""
        length = _leading(prefixes, lambda seen: self._other(seen, home) is not None)
        return length, self._other(prefixes[length - 1], home) if length else None

    def add(self, prefixes: Sequence[int], home: Home) -> None:
        """Remember a prompt; of long ones the head outlives the tail."""
        for prefix in reversed(prefixes):
            homes = self._homes.get(prefix) or ()
            self._homes.put(prefix, (home, *(other for other in homes if other != home))[:_HOMES_MAX])

    def _other(self, prefix: int, home: Home) -> Home | None:
        homes = self._homes.get(prefix) or ()
        return next((other for other in homes if other != home and other.tenant == home.tenant), None)


_HOMES_MAX = 4


def _leading(prefixes: Sequence[int], is_seen: Callable[[int], bool]) -> int:
    """How many are seen before the first that is not. O(log n): whoever saw one saw those before it."""
    low, high = 0, len(prefixes)
    while low < high:
        middle = (low + high + 1) // 2
        if is_seen(prefixes[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low
