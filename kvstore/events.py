"""What happened to blocks, as a bounded log that routers, dashboards and other nodes follow."""

from __future__ import annotations

import enum
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvstore.errors import InvalidArgumentError

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


_EVENT_BYTES = 240  # with its place in the log of its tenant
_TENANTS_MAX = 4096


def _cost_bytes(event: Event) -> int:
    return _EVENT_BYTES + 64 * len(event.keys)


@dataclass(slots=True)
class _Log:
    """Events that follow each other; their sequences end with `last_sequence`."""

    events: deque[Event] = field(default_factory=deque)
    last_sequence: int = 0

    @property
    def dropped_through(self) -> int:
        """Sequence of the last event that is here no more."""
        return self.last_sequence - len(self.events)


class EventLog:
    """The newest events within `capacity_bytes`; older ones are dropped and readers are told of the gap.

    Each tenant has a log of its own beside that of all: its own events, with sequences that count nobody else's. What
    is dropped is the oldest of all, so how far a log goes back depends on others, and nothing else does.

    Thread-safe; the lock guards what is below it and is never held while calling out.
    """

    def __init__(self, epoch: str, capacity_bytes: int) -> None:
        self._epoch = epoch
        self._capacity_bytes = capacity_bytes
        self._changed = threading.Condition()
        self._all = _Log()
        self._held_bytes = 0
        self._tenants: dict[str, _Log] = {}
        self._owners: deque[str] = deque()  # tenants of the events of `_all`
        self._forgotten_through = 0  # no log of a tenant that was forgotten went further

    @property
    def epoch(self) -> str:
        """Name of this run of the store."""
        return self._epoch

    def append(
        self,
        kind: EventKind,
        ns_id: bytes,
        *,
        tenant: str = "",
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
            log = self._all
            log.last_sequence += 1
            event = Event(
                log.last_sequence,
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
            log.events.append(event)
            self._owners.append(tenant)
            own = self._tenants.setdefault(tenant, _Log(last_sequence=self._forgotten_through))
            own.last_sequence += 1
            own.events.append(event)
            self._held_bytes += _cost_bytes(event)
            while self._held_bytes > self._capacity_bytes and len(log.events) > 1:
                self._drop_oldest()
            self._changed.notify_all()

    def read(self, after: int, limit: int, wait_seconds: float = 0.0) -> EventPage:
        """Events with a sequence above `after`, at most `limit`; waits up to `wait_seconds` for the first one."""
        _check_page(after, limit, wait_seconds)
        with self._changed:
            log = self._all
            if wait_seconds > 0:
                self._changed.wait_for(lambda: log.last_sequence > after, timeout=wait_seconds)
            return self._page(log, after, limit)

    def read_own(self, tenant: str, after: int, limit: int, wait_seconds: float = 0.0) -> EventPage:
        """The same of a tenant's own log; what others do neither ends the wait nor moves a sequence."""
        _check_page(after, limit, wait_seconds)
        with self._changed:
            if wait_seconds > 0:
                self._changed.wait_for(lambda: self._log_of(tenant).last_sequence > after, timeout=wait_seconds)
            log = self._log_of(tenant)
            page = self._page(log, after, limit)
        first = page.next_after - len(page.events) + 1
        return replace(page, events=tuple(replace(event, sequence=first + at) for at, event in enumerate(page.events)))

    def _page(self, log: _Log, after: int, limit: int) -> EventPage:
        start = max(0, after - log.dropped_through)
        page = tuple(log.events[index] for index in range(start, min(len(log.events), start + limit)))
        gap = not log.dropped_through <= after <= log.last_sequence
        next_after = log.dropped_through + start + len(page) if page else log.last_sequence
        return EventPage(self._epoch, page, next_after, gap)

    def _log_of(self, tenant: str) -> _Log:
        return self._tenants.get(tenant) or _Log(last_sequence=self._forgotten_through)

    def _drop_oldest(self) -> None:
        gone, tenant = self._all.events.popleft(), self._owners.popleft()
        self._held_bytes -= _cost_bytes(gone)
        own = self._tenants[tenant]
        own.events.popleft()
        if not own.events and len(self._tenants) > _TENANTS_MAX:
            self._forgotten_through = max(self._forgotten_through, own.last_sequence)
            del self._tenants[tenant]


def _check_page(after: int, limit: int, wait_seconds: float) -> None:
    if after < 0 or limit < 1 or wait_seconds < 0:
        raise InvalidArgumentError(
            f"after={after}, limit={limit}, wait_seconds={wait_seconds}: expected at least 0, 1 and 0"
        )
