"""What happened to blocks, as a bounded log that routers, dashboards and other nodes follow."""

from __future__ import annotations

import enum
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.types import Tier


class EventKind(enum.IntEnum):
    """What happened. On the wire: never renumber."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


@dataclass(frozen=True, slots=True)
class Event:
    """Blocks of one root entered or left a tier, or a namespace was cleared.

    Where blocks are new on this node, `keys` are their 16-byte keys in prefix order, `parent_key` is the key before
    the first of them, and that one is block `first_block` of its prefix. Where they came from another tier, or left,
    there are only keys, in no order. `last_copy` is true for a removal after which the node holds the blocks nowhere.
    A CLEARED event has no keys.
    """

    sequence: int
    kind: EventKind
    ns_id: bytes
    root_key: bytes = b""
    tier: Tier | None = None
    parent_key: bytes = b""
    keys: tuple[bytes, ...] = ()
    last_copy: bool = False
    first_block: int = 0
    block_tokens: int = 0  # 0 where `first_block` says nothing: no new blocks, or pieces of a state


@dataclass(frozen=True, slots=True)
class EventPage:
    """A piece of the log. `gap` says that events after the asked sequence were lost: take a fresh snapshot.

    Pass `next_after` as `after` of the next call. `epoch` changes whenever the store restarts; sequences then
    start anew.
    """

    epoch: str
    events: tuple[Event, ...]
    next_after: int
    gap: bool


_EVENT_BYTES = 200


def _cost_bytes(event: Event) -> int:
    return _EVENT_BYTES + 64 * len(event.keys)


@dataclass(slots=True)
class _LogState:
    events: deque[Event] = field(default_factory=deque)
    held_bytes: int = 0
    last_sequence: int = 0
    dropped_through: int = 0


class EventLog:
    """The newest events within `capacity_bytes`; older ones are dropped and readers are told of the gap.

    Thread-safe; the lock guards every field of `_state` and is never held while calling out.
    """

    def __init__(self, epoch: str, capacity_bytes: int) -> None:
        self._epoch = epoch
        self._capacity_bytes = capacity_bytes
        self._changed = threading.Condition()
        self._state = _LogState()

    @property
    def epoch(self) -> str:
        """Name of this run of the store."""
        return self._epoch

    def append(
        self,
        kind: EventKind,
        ns_id: bytes,
        *,
        root_key: bytes = b"",
        tier: Tier | None = None,
        parent_key: bytes = b"",
        keys: tuple[bytes, ...] = (),
        last_copy: bool = False,
        first_block: int = 0,
        block_tokens: int = 0,
    ) -> None:
        """Add an event, dropping the oldest while over the byte limit. O(1) amortised."""
        with self._changed:
            state = self._state
            state.last_sequence += 1
            event = Event(
                state.last_sequence,
                kind,
                ns_id,
                root_key,
                tier,
                parent_key,
                keys,
                last_copy,
                first_block,
                block_tokens,
            )
            state.events.append(event)
            state.held_bytes += _cost_bytes(event)
            while state.held_bytes > self._capacity_bytes and len(state.events) > 1:
                gone = state.events.popleft()
                state.held_bytes -= _cost_bytes(gone)
                state.dropped_through = gone.sequence
            self._changed.notify_all()

    def read(self, after: int, limit: int, wait_seconds: float = 0.0) -> EventPage:
        """Events with a sequence above `after`, at most `limit`; waits up to `wait_seconds` for the first one."""
        with self._changed:
            state = self._state
            if wait_seconds > 0:
                self._changed.wait_for(lambda: state.last_sequence > after, timeout=wait_seconds)
            first = state.events[0].sequence if state.events else state.last_sequence + 1
            start = max(0, after + 1 - first)
            page = tuple(state.events[index] for index in range(start, min(len(state.events), start + limit)))
            next_after = page[-1].sequence if page else max(after, state.dropped_through)
            gap = after < state.dropped_through or after > state.last_sequence
            return EventPage(self._epoch, page, next_after if not gap or page else state.last_sequence, gap)
