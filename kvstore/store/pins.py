"""Pins: holds that operators place on prefixes and states, with or without a time limit, over restarts too."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from itertools import count
from math import inf, isinf
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import NoSpaceError, StorageFormatError
from kvstore.store.interrupts import uninterrupted
from kvstore.store.pin_records import PinnedEnd, PinRecord, kept_depths, pack_pins, unpack_pins
from kvstore.tiers.persistent import PinKeepingTier
from kvstore.types import Pin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.store.index import Index
    from kvstore.store.space import Freed, Space
    from kvstore.store.states import StoredState
    from kvstore.tiers.persistent import PolicyStorage
    from kvstore.types import BlockIds

logger = logging.getLogger(__name__)

# Below the start count. Ids of two starts never meet, at 10,000 pins a second for five days; and they stay exact where
# numbers are floats, over two million starts.
_ID_BITS = 32


@dataclass(frozen=True, slots=True)
class _Held:
    space: Space
    size_bytes: int
    expires_at: float | None
    record: PinRecord
    release: Callable[[], Freed]


class PinTable:
    """All pins of a store. Guarded by the index lock; `remove` returns what to settle outside of it.

    `save` and `save_ended` write those of a namespace down, and `restore` holds them again. A pin that is not written
    down (the disk is full, or keeps none) holds all the same until the store ends.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._held: dict[int, _Held] = {}
        self._next_id = count((0 if index.disk is None else index.disk.start_count << _ID_BITS) + 1)
        self._saving = threading.Lock()  # taken before the index lock: what is written last is newest

    def __len__(self) -> int:
        return len(self._held)

    def add(self, space: Space, ids: BlockIds, ttl_seconds: float | None) -> Pin:
        """Hold blocks; raises NoSpaceError at the limit of pins or of pinned bytes."""
        return self._add(space, ids, self._record(next(self._next_id), _ends(space, ids), ttl_seconds))

    def add_state(self, space: Space, state: StoredState | None, tokens: int, ttl_seconds: float | None) -> Pin:
        """Hold a state, or nothing, that serves so many tokens; raises NoSpaceError as `add` does."""
        ends = () if state is None else (PinnedEnd(tokens, state.key),)
        return self._add_state(space, state, self._record(next(self._next_id), ends, ttl_seconds))

    @uninterrupted
    def end(self, pin_ids: Iterable[int]) -> int:
        """End pins, on disk too; how many of these there were. The index lock must not be held."""
        with self._index.lock:
            removed = [self._held.pop(pin_id).release() for pin_id in pin_ids if pin_id in self._held]
        for freed in removed:
            self._index.settle(freed)
        for space in {freed.space for freed in removed}:
            self.save_ended(space)
        return len(removed)

    def expired(self) -> list[int]:
        """Ids of the pins whose time is over."""
        now = self._index.clock.monotonic()
        return [pin_id for pin_id, held in self._held.items() if held.expires_at is not None and held.expires_at <= now]

    def ids_of(self, space: Space) -> list[int]:
        """Ids of all pins of one namespace."""
        return [pin_id for pin_id, held in self._held.items() if held.space is space]

    def save(self, space: Space) -> None:
        """Write down the pins of a namespace after one was placed. No lock may be held.

        Where that cannot be the old file stays: what it names is in force still.
        """
        self._save(space, _write)

    def save_ended(self, space: Space) -> None:
        """Write them down after some ended, which must not come back; as many as there is room for. No lock."""
        self._save(space, _write_anew)

    def saved(self, ns_id: bytes) -> list[PinRecord]:
        """Pins of an earlier run whose time is not over; those that cannot be read are said, and counted."""
        files = self._files()
        data = None if files is None else files.load(ns_id)
        if files is None or data is None:
            return []
        try:
            found = unpack_pins(data, ns_id)
        except StorageFormatError as error:
            logger.warning("pins of an earlier run refused: namespace=%s cause=%s", ns_id.hex(), error)
            files.refuse()
            return []
        now = self._index.clock.unix()
        return [record for record in found if record.ends and record.ends_at > now]

    def restore(self, space: Space, records: list[PinRecord]) -> None:
        """Hold again, in a space that nobody uses yet, what of these pins is there; `lock` must be held."""
        for record in records:
            keys = [end.key for end in record.ends]
            try:
                if space.states is None:
                    ids = space.adopted_path(keys)
                    if ids.size:
                        self._add(space, ids, record)
                elif (state := space.states.of_key(keys[0])) is not None:
                    self._add_state(space, state, record)
            except NoSpaceError as error:
                logger.warning("pin of an earlier run not restored: namespace=%s cause=%s", space.ns_id.hex(), error)

    def _save(self, space: Space, write: Callable[[PolicyStorage, bytes, list[PinRecord]], int]) -> None:
        files = self._files()
        if files is None:
            return
        with self._saving:
            with self._index.lock:
                records = [held.record for held in self._held.values() if held.space is space and held.record.ends]
            written = write(files, space.ns_id, records)
        if written < len(records):
            logger.warning(
                "pins not written, a restart ends some: namespace=%s written=%d pins=%d",
                space.ns_id.hex(),
                written,
                len(records),
            )

    def _add(self, space: Space, ids: BlockIds, record: PinRecord) -> Pin:
        wanted_bytes = space.held_bytes(ids)
        self._check_room(wanted_bytes, int(ids.size))
        space.tree.lease(ids)
        sparse = space.sparse.hold(ids)
        return self._hold(space, (wanted_bytes, int(ids.size)), record, lambda: space.release(ids, sparse))

    def _add_state(self, space: Space, state: StoredState | None, record: PinRecord) -> Pin:
        if state is None or space.states is None:
            self._check_room(0, 0)
            return self._hold(space, (0, 0), record, space.nothing_freed)
        tokens = record.ends[0].depth
        self._check_room(state.size_bytes, tokens)
        space.states.hold(state)
        return self._hold(space, (state.size_bytes, tokens), record, lambda: space.release_state(state))

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

    def _record(self, pin_id: int, ends: tuple[PinnedEnd, ...], ttl_seconds: float | None) -> PinRecord:
        return PinRecord(pin_id, inf if ttl_seconds is None else self._index.clock.unix() + ttl_seconds, ends)

    def _hold(self, space: Space, held: tuple[int, int], record: PinRecord, release: Callable[[], Freed]) -> Pin:
        """Remember a hold on so many bytes of so many blocks."""
        size_bytes, blocks = held
        clock = self._index.clock
        ends_at = None if isinf(record.ends_at) else record.ends_at
        expires_at = None if ends_at is None else clock.monotonic() + ends_at - clock.unix()
        self._held[record.pin_id] = _Held(space, size_bytes, expires_at, record, release)
        return Pin(record.pin_id, blocks, ends_at)

    def _pinned_bytes(self) -> int:
        return sum(held.size_bytes for held in self._held.values())

    def _files(self) -> PolicyStorage | None:
        return self._index.disk.pin_files if isinstance(self._index.disk, PinKeepingTier) else None


def _write(files: PolicyStorage, ns_id: bytes, records: list[PinRecord]) -> int:
    """Replace the file of a namespace by one of these pins; how many it has, 0 where the old file is there still."""
    return len(records) if records and files.save(ns_id, pack_pins(ns_id, records)) else 0


def _write_anew(files: PolicyStorage, ns_id: bytes, records: list[PinRecord]) -> int:
    """The same, but the old file never stays; where there is no room for all pins, the oldest are written.

    It goes before the new one is there only where both have no room beside each other: a crash then ends the pins.
    """
    written = _write(files, ns_id, records)
    if written:
        return written
    files.remove(ns_id)
    while records and not written:
        written = _write(files, ns_id, records)
        records = records[: len(records) // 2]
    return written


def _ends(space: Space, ids: BlockIds) -> tuple[PinnedEnd, ...]:
    depths = kept_depths(int(ids.size))
    keys = space.tree.keys(ids[np.array(depths, dtype=np.intp) - 1])
    return tuple(PinnedEnd(depth, pair[1].tobytes()) for depth, pair in zip(depths, keys, strict=True))
