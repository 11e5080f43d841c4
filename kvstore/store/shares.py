"""One stage that several writer ranks fill, each from a process of its own.

The ranks of an engine store the same prompts, and none of them has all parts. The first one that comes opens the
stage, the others join it by staging the same prompt, and it commits when the last of them has committed its share.
Nothing has to be agreed on between the ranks, and each proves the namespace in its own session. A rank that aborts
takes the stage with it; one that stays away does when the stage's time is over. Where the first one was refused, for
lack of room or of budget, the others are too: for none of them could all parts of a block come together.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from kvstore.errors import ClosedError, NoSpaceError
from kvstore.store.refusal import RefusedStage
from kvstore.types import CommitResult, require_own_part

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from numpy.typing import NDArray

    from kvstore.api import BlockBuffer
    from kvstore.store.stage import StoreStage
    from kvstore.types import KvLayout, TokenArray

_OPENING_SECONDS_MAX = 10.0
_REFUSED_MAX = 64  # each keeps its prompt


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the first rank was told that could store nothing."""

    from_block: int
    refused_blocks: int


class SharedStage:
    """A stage under way, which ranks joined it and which are done. `lock` guards all, and is held while it opens."""

    def __init__(self, layout: KvLayout, prompt: TokenArray) -> None:
        self.lock = threading.Lock()
        self.layout = layout
        self.prompt = prompt
        self.stage: StoreStage | None = None
        self.joined: set[int] = set()
        self.done: set[int] = set()
        self.awaited = frozenset(layout.writers)
        self.refusal: Refusal | None = None

    def has_place(self, rank: int, prompt: TokenArray) -> bool:
        """Whether a rank that stages this prompt belongs in here."""
        return rank not in self.joined and np.array_equal(self.prompt, prompt)


class StageShare:
    """What one rank has of a shared stage; a kvstore.api.Stage that takes the parts of this rank alone."""

    def __init__(self, shared: SharedStage, stage: StoreStage, rank: int, requested_from: int) -> None:
        self._shared = shared
        self._stage = stage
        self._rank = rank
        self._requested_from = requested_from
        self._open = True

    @property
    def from_block(self) -> int:
        """First block that wants bytes."""
        return self._stage.from_block

    @property
    def blocks(self) -> int:
        """How many blocks want bytes."""
        return self._stage.blocks

    def wanted(self, part: int) -> tuple[range, ...]:
        """The blocks of which a part is wanted; see kvstore.api.Stage."""
        return self._stage.wanted(part)

    def write_from(self, buffer: BlockBuffer, *, from_block: int | None = None, part: int | None = None) -> int:
        """Copy rows of a part of this rank into the stage; see kvstore.api.Stage."""
        require_own_part(self._shared.layout, self._rank, part)
        self._check_open()
        first = self._requested_from if from_block is None else from_block
        return self._stage.write_from(buffer, from_block=first, part=part)

    def lend(
        self, *, from_block: int, blocks: int, part: int | None
    ) -> AbstractContextManager[list[NDArray[np.uint8]]]:
        """The memory of a part of this rank, to be filled in place; see StoreStage."""
        require_own_part(self._shared.layout, self._rank, part)
        self._check_open()
        return self._stage.lend(from_block=from_block, blocks=blocks, part=part)

    def commit(self) -> CommitResult:
        """Say that this rank's parts are written; the last one to say so commits the stage for all."""
        with self._shared.lock:
            self._check_open()
            self._open = False
            self._shared.done.add(self._rank)
            is_last = self._shared.done >= self._shared.awaited
        if is_last:
            return self._stage.commit()
        self._stage.check_open()
        return CommitResult(0, self._stage.present_blocks, 0)

    def abort(self) -> None:
        """Drop everything that any rank wrote; idempotent, and a no-op after commit."""
        with self._shared.lock:
            if not self._open:
                return
            self._open = False
        self._stage.abort()

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError("this rank's share of the stage has ended: it was committed or aborted")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.commit()


class SharedStages:
    """The shared stages of a store that are open. Thread-safe; calls out with no lock held but that of one stage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[bytes, list[SharedStage]] = {}  # guarded by _lock, as below
        self._refused: OrderedDict[SharedStage, bytes] = OrderedDict()  # those of them that not all ranks heard of

    def join(self, stage: StoreStage, rank: int, begin: Callable[[], None]) -> StageShare | RefusedStage:
        """A rank's share of the open stage of the same prompt; where there is none, of `stage`, begun by `begin`."""
        key = _key(stage)
        while True:
            shared, is_new = self._find(key, stage, rank)
            if is_new:
                return self._begin(key, shared, stage, rank, begin)
            if not shared.lock.acquire(timeout=_OPENING_SECONDS_MAX):
                raise NoSpaceError("the stage of this prompt is still being opened by another rank; try again")
            try:
                opened, refusal = shared.stage, shared.refusal
                if refusal is not None:
                    self._end_refusal(shared)
                    return _refused(stage, refusal)
                if opened is not None and opened.is_open:
                    return StageShare(shared, opened, rank, stage.requested_from)
            finally:
                shared.lock.release()

    def forget(self, stage: StoreStage) -> None:
        """A stage has ended."""
        with self._lock:
            for key, stages in list(self._open.items()):
                kept = [shared for shared in stages if shared.stage is not stage]
                if len(kept) < len(stages):
                    self._replace(key, kept)

    def _find(self, key: bytes, stage: StoreStage, rank: int) -> tuple[SharedStage, bool]:
        """Where the rank belongs, and whether that is new: then its lock is held."""
        with self._lock:
            for shared in tuple(self._open.get(key, ())):
                if shared.has_place(rank, stage.prompt):
                    shared.joined.add(rank)
                    return shared, False
                if shared in self._refused and np.array_equal(shared.prompt, stage.prompt):
                    self._forget_refused(shared)  # who was refused comes again
            shared = SharedStage(stage.layout, stage.prompt)
            shared.joined.add(rank)
            shared.lock.acquire()
            self._replace(key, [*self._open.get(key, ()), shared])
            return shared, True

    def _begin(
        self, key: bytes, shared: SharedStage, stage: StoreStage, rank: int, begin: Callable[[], None]
    ) -> StageShare:
        """Begin a new stage. One that wants nothing is nobody else's business."""
        try:
            begin()
            if not stage.wants_nothing:
                shared.stage = stage
            else:
                shared.awaited = frozenset({rank})
                if stage.refused_blocks:
                    shared.refusal = Refusal(stage.from_block, stage.refused_blocks)
        finally:
            with self._lock:
                if shared.refusal is not None:
                    self._refused[shared] = key
                    if len(self._refused) > _REFUSED_MAX:
                        self._forget_refused(next(iter(self._refused)))
                elif shared.stage is None:
                    self._replace(key, [other for other in self._open.get(key, ()) if other is not shared])
            shared.lock.release()
            self._end_refusal(shared)
        return StageShare(shared, stage, rank, stage.requested_from)

    def _end_refusal(self, shared: SharedStage) -> None:
        """Forget a refusal that all ranks heard of."""
        with self._lock:
            if shared in self._refused and shared.joined >= set(shared.layout.writers):
                self._forget_refused(shared)

    def _forget_refused(self, shared: SharedStage) -> None:
        """`_lock` must be held."""
        key = self._refused.pop(shared)
        self._replace(key, [other for other in self._open.get(key, ()) if other is not shared])

    def _replace(self, key: bytes, stages: list[SharedStage]) -> None:
        if stages:
            self._open[key] = stages
        else:
            self._open.pop(key, None)


def _refused(stage: StoreStage, refusal: Refusal) -> RefusedStage:
    first = max(stage.requested_from, refusal.from_block)
    whole_count = stage.prompt.size // stage.layout.block_symbols
    return RefusedStage(
        stage.layout,
        from_block=first,
        refused_blocks=min(refusal.refused_blocks, whole_count - first),
        present_blocks=first - stage.requested_from,
    )


def _key(stage: StoreStage) -> bytes:
    text = hashlib.blake2b(stage.prompt.tobytes(), digest_size=16, key=stage.ns_id, person=b"kvstore.shared")
    text.update(stage.root_key)
    return text.digest()
