"""Loads and stores that go layer by layer while the engine computes: opt-in, and of one step. Knows no engine.

A load is read from the server as a whole, since a block is verified as a whole; then each layer of it is copied while
the engine computes those before. A store leaves the engine's memory layer by layer, and is sent when the last one has.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.errors import KvstoreError
from kvstore.tiers.device import CopyOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.api import Lease
    from kvstore.connectors.vllm.plan import BlockJob
    from kvstore.tiers.base import Bytes2D
    from kvstore.tiers.device import BlockCopier, CopyHandle, PagedKv
    from kvstore.tiers.device_copies import Stream

WAIT_SECONDS_MAX = 60.0


@dataclass(slots=True)
class LayeredLoad:
    """One load. A thread of the worker fills it, while the engine's thread waits for layers, and at last for its end.

    `blocks` lead the job and are in the engine, verified. `lock` guards the step from a load that can be given up to
    one whose copies are under way.
    """

    job: BlockJob
    blocks: int = 0
    _layers: tuple[CopyHandle, ...] = ()
    _is_given_up: bool = False
    _begun: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fill(
        self, lease: Lease, copier: BlockCopier, pages: PagedKv, rows: Bytes2D, *, part: int | None, stream: Stream
    ) -> None:
        """On a thread: read runs of as many blocks as there are rows, and copy each by layer."""
        targets = self.job.block_ids
        for start in range(0, len(targets), len(rows)):
            ids = targets[start : start + len(rows)]
            good = lease.load_into(rows[: len(ids)], from_block=self.job.first_block + start, part=part).blocks
            if not good:
                return
            with self._lock:
                if self._is_given_up:
                    return
                self._layers = copier.load_by_layer(pages, ids[:good], rows[:good], stream=stream)
            if start + len(ids) == len(targets):
                self._begun.set()
            outcomes = [handle.wait() for handle in self._layers]
            if any(outcome is not CopyOutcome.COPIED for outcome in outcomes):
                return
            self.blocks += good
            if good < len(ids):
                return

    def end(self) -> None:
        """Nothing more comes; idempotent."""
        self._begun.set()
        self._ended.set()

    def wait_layer(self, layer: int, stream: Stream) -> None:
        """Let what `stream` computes from now on begin behind the copy of a layer, if there is one."""
        self._begun.wait(WAIT_SECONDS_MAX)
        layers = self._layers
        if layers and layers[layer].outcome is CopyOutcome.PENDING:
            layers[layer].record(stream)

    def wait_end(self) -> int:
        """How many leading blocks are loaded, once that is known; a load that takes too long is given up."""
        if self._ended.wait(WAIT_SECONDS_MAX):
            return self.blocks
        with self._lock:
            self._is_given_up = True
            under_way = self._layers
        for handle in under_way:
            handle.wait()
        return 0


class LayeredCopy:
    """Copies of one run of blocks into rows, a layer at a time, seen as one.

    Belongs to the engine's thread until each layer was asked for, with `copy_layer` or at last with `copy_rest`.
    """

    def __init__(self, begin: Callable[[range], CopyHandle], layers: int) -> None:
        self._begin = begin
        self._handles: list[CopyHandle | None] = [None] * layers
        self.error: KvstoreError | None = None

    @property
    def outcome(self) -> CopyOutcome:
        """COPIED if all layers are; PENDING while any is under way, or still to come."""
        outcomes = [CopyOutcome.PENDING if handle is None else handle.outcome for handle in self._handles]
        return _together(outcomes, self.error)

    def copy_layer(self, layer: int) -> None:
        """Begin to copy a layer, which the engine has just computed."""
        if self._handles[layer] is None and self.error is None:
            try:
                self._handles[layer] = self._begin(range(layer, layer + 1))
            except KvstoreError as error:
                self.error = error

    def copy_rest(self) -> None:
        """Begin what no hook has asked for: the step has computed all of it."""
        for layer, handle in enumerate(self._handles):
            if handle is None:
                self.copy_layer(layer)
        if self.error is not None:
            self._handles = [handle for handle in self._handles if handle is not None]

    def wait(self, timeout_seconds: float | None = None) -> CopyOutcome:
        """As CopyHandle."""
        for handle in self._handles:
            if handle is not None:
                handle.wait(timeout_seconds)
        return self.outcome

    def record(self, stream: Stream) -> None:
        """As CopyHandle."""
        for handle in self._handles:
            if handle is not None and handle.outcome is CopyOutcome.PENDING:
                handle.record(stream)


def _together(outcomes: Sequence[CopyOutcome], error: KvstoreError | None) -> CopyOutcome:
    """How copies ended that count as one."""
    for worst in (CopyOutcome.LOST, CopyOutcome.PENDING):
        if worst in outcomes:
            return worst
    if error is not None or any(outcome is not CopyOutcome.COPIED for outcome in outcomes):
        return CopyOutcome.FAILED
    return CopyOutcome.COPIED
