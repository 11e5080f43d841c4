"""What one node has told the directory, and what it has yet to tell: a fold of the store's events, without any I/O."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.cluster.directory import key_group
from kvstore.events import EventKind
from kvstore.nodes import boundary_step

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvstore.events import Event


class Announcements:
    """Boundaries of one node: *young* (stored a moment ago), *due* (to be told), *told*, and *gone* (to be withdrawn).

    Owned by one thread. The first three are held, so they are as many as the store holds at most; of those gone the
    last `gone_max` are withdrawn, and entries of others expire, since nobody repeats them.
    """

    def __init__(self, announce_tokens: int, young_seconds: float, gone_max: int) -> None:
        self._announce_tokens = announce_tokens
        self._young_seconds = young_seconds
        self._gone_max = gone_max
        self._young: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()  # when, and namespace; oldest first
        self._due: OrderedDict[bytes, bytes] = OrderedDict()  # namespace
        self._told: dict[bytes, bytes] = {}  # namespace
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._seen: set[bytes] = set()  # by a snapshot that was begun

    @property
    def told(self) -> int:
        """Boundaries that the directory was told of."""
        return len(self._told)

    @property
    def waiting(self) -> int:
        """Boundaries that it is still to be told of, or that they are gone."""
        return len(self._young) + len(self._due) + len(self._gone)

    def apply(self, event: Event, now: float) -> None:
        """Follow one event of the store."""
        if event.kind is EventKind.STORED and event.block_tokens:
            for key in self._boundaries(event):
                self._stored(key, event.ns_id, now)
        elif event.kind is EventKind.STORED:
            for key in event.keys:  # it has moved between tiers, so it is no longer young
                if self._young.pop(key, None) is not None:
                    self._due[key] = event.ns_id
        elif event.kind is EventKind.REMOVED and event.last_copy:
            for key in event.keys:
                self._left(key)
        elif event.kind is EventKind.CLEARED:
            self._cleared(event.ns_id)

    def begin_snapshot(self) -> None:
        """What the store holds is looked at anew. No event is applied until the end."""
        self._seen.clear()

    def add_snapshot(self, ns_id: bytes, keys: Iterable[bytes]) -> None:
        """Boundaries that the store holds."""
        for key in keys:
            self._seen.add(key)
            if key not in self._told and key not in self._young:
                self._gone.pop(key, None)
                self._due[key] = ns_id

    def end_snapshot(self) -> None:
        """Nothing but what it named is held; events from before its beginning on follow."""
        for key in [key for key in (*self._told, *self._due, *self._young) if key not in self._seen]:
            self._left(key)
        self._seen.clear()

    def mature(self, now: float) -> None:
        """Young ones that are old enough become due."""
        while self._young:
            key, (since, ns_id) = next(iter(self._young.items()))
            if now < since + self._young_seconds:
                return
            del self._young[key]
            self._due[key] = ns_id

    def take_due(self, limit: int) -> list[bytes]:
        """The next ones to announce; they count as told from now on. `tell_again` where that failed."""
        keys = list(islice(self._due, limit))
        for key in keys:
            self._told[key] = self._due.pop(key)
        return keys

    def take_gone(self, limit: int) -> list[bytes]:
        """The next ones to withdraw; forgotten from now on. `withdraw_again` where that failed."""
        keys = list(islice(self._gone, limit))
        for key in keys:
            del self._gone[key]
        return keys

    def tell_again(self, keys: Iterable[bytes]) -> None:
        """What was told is to be told once more."""
        for key in keys:
            ns_id = self._told.pop(key, None)
            if ns_id is not None:
                self._due[key] = ns_id

    def withdraw_again(self, keys: Iterable[bytes]) -> None:
        """It is not known whether these were withdrawn."""
        for key in keys:
            if key not in self._told and key not in self._due:
                self._add_gone(key)

    def tell_groups_again(self, groups: Collection[int]) -> None:
        """The same of all that was told in some groups."""
        if groups:
            self.tell_again([key for key in self._told if key_group(key) in groups])

    def withdraw_all(self) -> list[bytes]:
        """Everything that was told, which is forgotten."""
        keys = [*self._told, *self._gone]
        for waiting in (self._told, self._gone, self._due, self._young):
            waiting.clear()
        return keys

    def _boundaries(self, event: Event) -> Sequence[bytes]:
        step = boundary_step(self._announce_tokens, event.block_tokens)
        return event.keys[(-event.first_block - 1) % step :: step]

    def _stored(self, key: bytes, ns_id: bytes, now: float) -> None:
        if self._gone.pop(key, key) is None:
            self._due[key] = ns_id  # it was told, and not withdrawn yet
        elif key not in self._told and key not in self._due:
            self._young[key] = (now, ns_id)
            self._young.move_to_end(key)

    def _left(self, key: bytes) -> None:
        self._young.pop(key, None)
        if self._told.pop(key, self._due.pop(key, None)) is not None:
            self._add_gone(key)  # what is due may have been told before

    def _add_gone(self, key: bytes) -> None:
        self._gone[key] = None
        if len(self._gone) > self._gone_max:
            self._gone.popitem(last=False)

    def _cleared(self, ns_id: bytes) -> None:
        held = [*self._told.items(), *self._due.items(), *((key, owner) for key, (_, owner) in self._young.items())]
        for key, owner in held:
            if owner == ns_id:
                self._left(key)
