"""Sessions: who holds which leases and stages, and what ends with them."""

from __future__ import annotations

import logging
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvstore.errors import ClosedError, InvalidArgumentError, NoSpaceError
from kvstore.hashing import KEY_BYTES
from kvstore.transport.prefetches import Prefetches
from kvstore.transport.principal import caller
from kvstore.transport.status import UnknownSessionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.api import Lease, Stage
    from kvstore.transport.limits import ServiceLimits
    from kvstore.transport.principal import Origin, Principal
    from kvstore.types import KvLayout, Namespace

logger = logging.getLogger(__name__)
SESSION_ID_BYTES = 16
CHALLENGE_BYTES = 32
T = TypeVar("T")


def _nothing() -> None:
    """What is to be done where nothing is."""


@dataclass(frozen=True, slots=True)
class Held(Generic[T]):
    """A lease or stage, whose it is and the layout its rows have; `uncount` takes it off its tenant's account."""

    handle: T
    namespace: Namespace
    uncount: Callable[[], None]

    @property
    def layout(self) -> KvLayout:
        """The layout of its rows."""
        return self.namespace.layout


class Holdings(Generic[T]):
    """The open leases, or stages, of one session, by id. Thread-safe; its lock is never held while calling out."""

    def __init__(self, noun: str, limit: int, end: Callable[[T], None]) -> None:
        self._noun = noun
        self._limit = limit
        self._end = end
        self._lock = threading.Lock()
        self._held: dict[int, Held[T]] = {}  # guarded by _lock, as all below
        self._opening: dict[int, bool] = {}  # whether it is still wanted, by id
        self._closed = False

    def open(
        self,
        held_id: int,
        acquire: Callable[[], T],
        namespace: Namespace,
        count: Callable[[T], Callable[[], None]] = lambda _: _nothing,
    ) -> T:
        """Acquire one and keep it under an id of the client's choice.

        `count` puts it on its tenant's account, or refuses it, and returns what takes it off again.
        What is ended while it is being acquired, by its id or with the session, ends as soon as it is there.
        """
        self._reserve(held_id)
        try:
            held = self._counted(acquire(), namespace, count)
        except BaseException:
            with self._lock:
                del self._opening[held_id]
            raise
        with self._lock:
            wanted = self._opening.pop(held_id) and not self._closed
            if wanted:
                self._held[held_id] = held
        if not wanted:
            self._finish(held)
            raise ClosedError(f"{self._noun} {held_id} was ended before it was open")
        return held.handle

    def _counted(self, handle: T, namespace: Namespace, count: Callable[[T], Callable[[], None]]) -> Held[T]:
        try:
            return Held(handle, namespace, count(handle))
        except BaseException:
            self._end(handle)
            raise

    def _finish(self, held: Held[T]) -> None:
        held.uncount()
        self._end(held.handle)

    def _reserve(self, held_id: int) -> None:
        with self._lock:
            if not held_id or held_id in self._held or held_id in self._opening:
                raise InvalidArgumentError(f"{self._noun} id {held_id} is 0 or in use, expected a new one")
            if len(self._held) + len(self._opening) >= self._limit:
                raise NoSpaceError(f"the session holds {self._limit} {self._noun}s, the most it may; end one first")
            self._opening[held_id] = True

    def get(self, held_id: int) -> Held[T]:
        """Raises ClosedError for an id that is not open in this session."""
        with self._lock:
            held = self._held.get(held_id)
        if held is None:
            raise ClosedError(f"{self._noun} {held_id} is not open in this session")
        return held

    def take(self, held_id: int) -> Held[T]:
        """Like get, and the id is gone; it is off its tenant's account."""
        with self._lock:
            held = self._held.pop(held_id, None)
        if held is None:
            raise ClosedError(f"{self._noun} {held_id} is not open in this session")
        held.uncount()
        return held

    def end(self, held_id: int) -> None:
        """End one; nothing happens if it is not open."""
        held = self._remove(held_id)
        if held is not None:
            self._finish(held)

    def try_to_end(self, held_id: int) -> int:
        """Like end, but a failure is logged and counted: returns how many could not be ended."""
        held = self._remove(held_id)
        return 0 if held is None else self._failures_to_end(held)

    def _remove(self, held_id: int) -> Held[T] | None:
        with self._lock:
            if held_id in self._opening:
                self._opening[held_id] = False
            return self._held.pop(held_id, None)

    def close(self) -> int:
        """End all, now and those still being acquired. Returns how many could not be ended."""
        with self._lock:
            self._closed = True
            held = list(self._held.values())
            self._held.clear()
        return sum(map(self._failures_to_end, held))

    def _failures_to_end(self, held: Held[T]) -> int:
        try:
            self._finish(held)
        except Exception:
            # One that fails must not keep the others from ending.
            logger.exception("a %s could not be ended", self._noun)
            return 1
        return 0


class Session:
    """What one client has open, and who that is. Thread-safe.

    `dismiss` is called, in the event loop, when the caller is no longer let in; who carries the session sets it.
    """

    def __init__(self, limits: ServiceLimits, principal: Principal) -> None:
        self.principal = principal
        # Where its control connection on the fast lane comes from; its connections for bytes come from there too.
        self.origin: Origin | None = None
        self.dismiss: Callable[[], None] = _nothing
        self.session_id = secrets.token_bytes(SESSION_ID_BYTES)
        self.challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self.leases: Holdings[Lease] = Holdings("lease", limits.leases_per_session, lambda lease: lease.release())
        self.stages: Holdings[Stage] = Holdings("stage", limits.stages_per_session, lambda stage: stage.abort())
        self.prefetches = Prefetches(limits.prefetches_per_session)
        # Those that a lookup of this session has used: the store has read what it keeps of them.
        self.warm_namespaces: set[bytes] = set()
        self._namespaces_max = limits.namespaces_per_session
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, Namespace] = {}  # guarded by _lock

    def open_namespace(self, ns_id: bytes, namespace: Namespace) -> None:
        """Let the session use a namespace; opening one twice is fine."""
        with self._lock:
            if ns_id not in self._namespaces and len(self._namespaces) >= self._namespaces_max:
                raise NoSpaceError(f"the session has opened {self._namespaces_max} namespaces, the most it may")
            self._namespaces[ns_id] = namespace

    def namespace(self, ns_id: bytes) -> Namespace:
        """Raises ClosedError for a namespace that this session has not opened."""
        with self._lock:
            namespace = self._namespaces.get(ns_id)
        if namespace is None:
            if len(ns_id) != KEY_BYTES:
                raise InvalidArgumentError(f"ns_id has {len(ns_id)} bytes, expected {KEY_BYTES}")
            raise ClosedError(f"namespace {ns_id.hex()} is not open in this session; call OpenNamespace first")
        return namespace

    def close(self) -> int:
        """Release all leases, abort all stages, cancel all prefetches. Returns how many could not be ended."""
        self.prefetches.close()
        return self.leases.close() + self.stages.close()


class SessionTable:
    """The sessions of a server. Used from its event loop only."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def open(self, principal: Principal) -> Session:
        """Raises NoSpaceError at the limit of sessions."""
        if len(self._sessions) >= self._limits.sessions:
            raise NoSpaceError(f"{self._limits.sessions} sessions are open, the most this server allows")
        session = Session(self._limits, principal)
        self._sessions[session.session_id] = session
        return session

    def find(self, session_id: bytes) -> Session | None:
        """The session of that id, whoever asks."""
        return self._sessions.get(session_id)

    def get(self, session_id: bytes) -> Session:
        """The caller's session. Raises UnknownSessionError if the caller has none of that id (any more)."""
        session = self._sessions.get(session_id)
        if session is None or not session.principal.is_same(caller()):
            raise UnknownSessionError("open a session first")
        return session

    def remove(self, session: Session) -> None:
        """Forget a session; the caller closes it."""
        del self._sessions[session.session_id]
