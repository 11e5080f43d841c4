"""Whether this node drains, and the hand-over that comes with it: by an operator's order, or before it stops."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

from kvstore.cluster.handover import HandOver, HandOverSettings
from kvstore.errors import InvalidArgumentError
from kvstore.nodes import DrainOrder, DrainProgress, NodeState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.clock import Clock
    from kvstore.cluster.directory import Directory
    from kvstore.cluster.handover import Clients, LeavingStore

logger = logging.getLogger(__name__)

SECONDS_MAX = 3600.0
TARGETS_MAX = 64
_END_SECONDS = 10.0  # for a hand-over that was stopped; one answer of a peer takes less


class TakingPart(Protocol):
    """What behaves otherwise while its node drains: it takes nothing from other nodes, and says so."""

    def drain(self) -> None:
        """From now on; idempotent."""
        ...

    def undrain(self) -> None:
        """No more; idempotent."""
        ...


class Drainer:
    """The one owner of this node's draining. Thread-safe. One hand-over runs at a time, on a thread of its own; one
    that was undone ends within one answer of a peer."""

    def __init__(
        self,
        name: str,
        store: LeavingStore,
        directory: Directory,
        clients: Clients,
        parts: Sequence[TakingPart],
        *,
        announce_tokens: int,
        settle_seconds: float,
        clock: Clock,
    ) -> None:
        """`settle_seconds` is how long it takes until the directory knows what was stored here last."""
        self._name = name
        self._store = store
        self._directory = directory
        self._clients = clients
        self._parts = tuple(parts)
        self._announce_tokens = announce_tokens
        self._settle_seconds = settle_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._hand_over: HandOver | None = None  # the latest one, while it drains; guarded by _lock

    @property
    def unready(self) -> str | None:
        """Why the node should be sent nothing; None: it does not drain."""
        return "draining" if self._hand_over is not None else None

    @property
    def progress(self) -> DrainProgress:
        """How far it is."""
        hand_over = self._hand_over
        return DrainProgress() if hand_over is None else hand_over.progress

    def begin(self, order: DrainOrder) -> None:
        """Drain from now on, and hand over. One that is under way goes on as it was ordered.

        Raises InvalidArgumentError for an order that cannot be followed; DirectoryUnavailableError where it names nodes
        and the directory does not answer.
        """
        self._check(order)
        settings = HandOverSettings(
            order.seconds,
            order.limit_bytes,
            self._announce_tokens,
            frozenset(order.targets),
            self._settle_seconds,
        )
        with self._lock:
            if self._hand_over is not None and not self._hand_over.progress.is_done:
                return
            hand_over = HandOver(self._store, self._directory, self._clients, settings, self._clock)
            self._hand_over = hand_over
            for part in self._parts:
                part.drain()
        logger.info("draining: seconds=%g bytes=%d", order.seconds, order.limit_bytes)
        threading.Thread(target=hand_over.run, name="kvstore-drain", daemon=True).start()

    def wait(self, seconds: float) -> DrainProgress:
        """Wait for the end of the hand-over, at most so long; how far it is then."""
        hand_over = self._hand_over
        if hand_over is not None:
            hand_over.wait(seconds)
        return self.progress

    def undo(self) -> bool:
        """Take part again; false where it did not drain. What others took stays with them, too."""
        with self._lock:
            hand_over, self._hand_over = self._hand_over, None
            if hand_over is None:
                return False
            hand_over.stop()
            for part in self._parts:
                part.undrain()
        logger.info("no longer draining")
        return True

    def leave(self, order: DrainOrder) -> None:
        """Hand over before this node stops: returns when that has ended, or its time is over."""
        self.begin(order)
        hand_over = self._hand_over
        if hand_over is not None:
            hand_over.wait(order.seconds)
        self.close()

    def close(self) -> None:
        """End a hand-over that is under way; the node drains on. Idempotent."""
        hand_over = self._hand_over
        if hand_over is not None:
            hand_over.stop()
            hand_over.wait(_END_SECONDS)

    def _check(self, order: DrainOrder) -> None:
        if not 0 <= order.seconds <= SECONDS_MAX:
            raise InvalidArgumentError(f"seconds is {order.seconds:g}, expected 0..{SECONDS_MAX:g}")
        if order.limit_bytes < 0:
            raise InvalidArgumentError(f"limit_bytes is {order.limit_bytes}, expected at least 0")
        if len(order.targets) > TARGETS_MAX:
            raise InvalidArgumentError(f"{len(order.targets)} nodes are named, expected {TARGETS_MAX} at most")
        if not order.targets:
            return
        ready = {node.name for node in self._directory.nodes() if node.state is NodeState.READY} - {self._name}
        strange = sorted(set(order.targets) - ready)
        if strange:
            raise InvalidArgumentError(
                f"{', '.join(map(repr, strange))[:200]}: no other node of that name is ready; ready are "
                f"{', '.join(sorted(ready)[:20]) or 'none'}; `kvstore nodes` lists them"
            )
