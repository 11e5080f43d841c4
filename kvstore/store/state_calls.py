"""What a store's calls mean for a namespace of sequence states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import NoSpaceError, StorageError
from kvstore.state_blobs import BlobLease, BlobStage
from kvstore.store.interrupts import uninterrupted
from kvstore.store.state_handles import StateRowsLease, StateRowsStage
from kvstore.store.states import path_of
from kvstore.types import PLAIN_ROOT, PrefixMatch, Tier, TierRun, require_state
from kvstore.writers import WriterRun

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvstore.store.index import Index
    from kvstore.store.pins import PinTable
    from kvstore.store.room import RoomMaker
    from kvstore.store.space import Space
    from kvstore.store.states import StateTable
    from kvstore.types import Namespace, Pin, Root, TokenArray


class StateCalls:
    """Owns nothing: lookups, leases and stages of states over the index and the room of a store."""

    def __init__(self, index: Index, room: RoomMaker, pins: PinTable) -> None:
        self._index = index
        self._room = room
        self._pins = pins

    def match(
        self, namespace: Namespace, root: Root | None, prompt: TokenArray, *, touch: bool, request_id: str | None
    ) -> PrefixMatch:
        """As much of a prompt as the best state serves."""
        space = self._index.space(namespace)
        root_key, path = space.root_key(root), path_of(prompt)
        with self._index.lock:
            state, tokens = _table(space).find(root_key, path)
            runs: tuple[TierRun, ...] = ()
            if state is not None:
                runs = (TierRun(Tier.HOST if Tier.HOST in state.slots else Tier.DISK, tokens),)
            accounting = self._index.accounting
            counts = touch and accounting.first_lookup(request_id)
            if counts:
                tick = self._index.next_tick()
                if state is not None:
                    _table(space).touch(state, tick)
                accounting.count_lookup(prompt.size, runs, 1)
        match = PrefixMatch(namespace, PLAIN_ROOT if root is None else root, prompt, tokens, runs)
        if counts:
            accounting.tell(match)
        return match

    @uninterrupted
    def lease(
        self,
        match: PrefixMatch,
        tiers: Collection[Tier] | None,
        enter: Callable[[StateRowsLease], None],
        forget: Callable[[StateRowsLease], None],
    ) -> BlobLease:
        """Protect the state that serves most of a match, as of now; `enter` is called with the index lock held."""
        form = require_state(match.namespace.layout)
        space = self._index.space(match.namespace)
        root_key, path = space.root_key(match.root), path_of(match.prompt[: match.tokens])
        with self._index.lock:
            state, tokens = _table(space).find(root_key, path, tiers)
            lease = StateRowsLease(self._index, self._room, space, forget, tokens)
            enter(lease)
            if state is not None:
                lease.hold(state)
        return BlobLease(lease, lease.size, form.piece_bytes)

    @uninterrupted
    def stage(
        self,
        space: Space,
        root_key: bytes,
        prompt: TokenArray,
        state_bytes: int,
        handlers: tuple[Callable[[StateRowsStage], None], Callable[[StateRowsStage], None]],
        *,
        writer: int,
    ) -> BlobStage:
        """Begin to store a state; of the two handlers one enters it, with the index lock held, one forgets it."""
        form = require_state(space.layout)
        enter, forget = handlers
        table = _table(space)
        state = table.records.make(root_key, path_of(prompt), state_bytes, self._index.latest_tick)
        state.writer = writer
        stage = StateRowsStage(self._index, self._room, space, state, forget)
        if state.index_bytes > table.bytes_max:
            stage.refuse("index_full")
            return BlobStage(stage, state_bytes, form.piece_bytes)
        with self._index.lock:
            if space.retired:
                raise NoSpaceError("the namespace had no states and made room for another one just now; try again")
            enter(stage)
            state.stored_at = state.used_at = self._index.next_tick()
            is_wanted = stage.enter()
        if is_wanted:
            try:
                stage.begin()
            except BaseException:
                stage.abort()
                raise
        return BlobStage(stage, state_bytes, form.piece_bytes)

    def writers(self, space: Space, root_key: bytes, prompt: TokenArray) -> tuple[WriterRun, ...]:
        """Who wrote the state that serves most of a prompt; of the tokens that it serves."""
        with self._index.lock:
            state, tokens = _table(space).find(root_key, path_of(prompt))
            return () if state is None else (WriterRun(state.writer, tokens),)

    def pin(self, space: Space, root_key: bytes, prompt: TokenArray, ttl_seconds: float | None) -> Pin:
        """Protect the state that serves most of a prompt."""
        path = path_of(prompt)
        with self._index.lock:
            state, tokens = _table(space).find(root_key, path)
            return self._pins.add_state(space, state, tokens, ttl_seconds)

    def hint(self, space: Space, root_key: bytes, prompt: TokenArray, seconds: float | None) -> int:
        """Have the states of a prompt, and of what was appended to it, leave first if it is used never again.

        A time until the next use changes nothing. Returns the tokens of the prompt if there is such a state.
        """
        path = path_of(prompt)
        with self._index.lock:
            states = _table(space).below(root_key, path) if path else []
            for state in states if seconds is None else ():
                _table(space).retire(state)
        return int(prompt.size) if states else 0

    def evict(self, space: Space, root_key: bytes, prompt: TokenArray, from_token: int) -> int:
        """Drop the states that have more than `from_token` tokens of a prompt and that nobody holds; how many."""
        path = path_of(prompt[: from_token + 1])
        with self._room.lock, self._index.lock:  # what is being copied is held, and would stay
            found = _table(space).below(root_key, path) if prompt.size > from_token else []
            gone = [state for state in found if not state.holds]
            freed = self._room.states.forget(space, gone)
            self._index.accounting.evicted_blocks["request"] += sum(map(_table(space).records.pieces, gone))
        are_gone = True
        for one in freed:
            if one.tier is Tier.DISK and space.disk is not None:
                are_gone &= space.disk.free_for_good(one.slots)
            else:
                one.pool.free(one.slots)
        if not are_gone:
            raise StorageError(
                f"{len(gone)} states were dropped, but the disk cannot be synced: a power cut may bring them back; "
                "check the kernel log"
            )
        return len(gone)


class StateWriteThrough:
    """A state that was just stored, to be written to disk."""

    def __init__(self, room: RoomMaker, stage: StateRowsStage) -> None:
        self._room = room
        self._stage = stage

    def run(self) -> None:
        """Write it if it is there still."""
        with self._room.lock:
            self._room.states.write_through(self._stage.space, self._stage.state)

    def drop(self) -> None:
        """The store closes, and flushes."""


def _table(space: Space) -> StateTable:
    assert space.states is not None, "a namespace of blocks has no states"
    return space.states
