"""Pins: holds that operators place on prefixes and states, with or without a time limit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from kvstore.errors import NoSpaceError
from kvstore.types import Pin

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.store.index import Index
    from kvstore.store.space import Freed, Space
    from kvstore.store.states import StoredState
    from kvstore.types import BlockIds


@dataclass(frozen=True, slots=True)
class _Held:
    space: Space
    size_bytes: int
    expires_at: float | None
    release: Callable[[], Freed]


class PinTable:
    """All pins of a store. Guarded by the index lock; `remove` returns what to settle outside of it."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._held: dict[int, _Held] = {}
        self._next_id = count(1)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, space: Space, ids: BlockIds, ttl_seconds: float | None) -> Pin:
        """Hold blocks; raises NoSpaceError at the limit of pins or of pinned bytes."""
        wanted_bytes = space.held_bytes(ids)
        self._check_room(wanted_bytes, int(ids.size))
        space.tree.lease(ids)
        sparse = space.sparse.hold(ids)
        return self._hold(space, (wanted_bytes, int(ids.size)), ttl_seconds, lambda: space.release(ids, sparse))

    def add_state(self, space: Space, state: StoredState | None, tokens: int, ttl_seconds: float | None) -> Pin:
        """Hold a state, or nothing, that serves so many tokens; raises NoSpaceError as `add` does."""
        if state is None or space.states is None:
            self._check_room(0, 0)
            return self._hold(space, (0, 0), ttl_seconds, space.nothing_freed)
        self._check_room(state.size_bytes, tokens)
        space.states.hold(state)
        return self._hold(space, (state.size_bytes, tokens), ttl_seconds, lambda: space.release_state(state))

    def remove(self, pin_id: int) -> Freed | None:
        """End one pin; None if there is none of that id."""
        held = self._held.pop(pin_id, None)
        return None if held is None else held.release()

    def expired(self) -> list[int]:
        """Ids of the pins whose time is over."""
        now = self._index.clock.monotonic()
        return [pin_id for pin_id, held in self._held.items() if held.expires_at is not None and held.expires_at <= now]

    def ids_of(self, space: Space) -> list[int]:
        """Ids of all pins of one namespace."""
        return [pin_id for pin_id, held in self._held.items() if held.space is space]

    def _check_room(self, wanted_bytes: int, blocks: int) -> None:
        settings = self._index.settings
        if len(self._held) >= settings.pins_max:
            raise NoSpaceError(f"there are {len(self._held)} pins, the limit (pins_max); unpin some first")
        limit_bytes = int(settings.pinned_ratio_max * self._index.host.capacity_bytes)
        if self._pinned_bytes() + wanted_bytes > limit_bytes:
            raise NoSpaceError(
                f"pinning {blocks} blocks ({wanted_bytes} bytes) on top of {self._pinned_bytes()} pinned bytes "
                f"exceeds {limit_bytes} (pinned_ratio_max x host capacity); unpin some or raise the limit"
            )

    def _hold(
        self, space: Space, held: tuple[int, int], ttl_seconds: float | None, release: Callable[[], Freed]
    ) -> Pin:
        """Remember a hold on so many bytes of so many blocks."""
        size_bytes, blocks = held
        pin_id = next(self._next_id)
        clock = self._index.clock
        expires_at = None if ttl_seconds is None else clock.monotonic() + ttl_seconds
        self._held[pin_id] = _Held(space, size_bytes, expires_at, release)
        return Pin(pin_id, blocks, None if ttl_seconds is None else clock.unix() + ttl_seconds)

    def _pinned_bytes(self) -> int:
        return sum(held.size_bytes for held in self._held.values())
