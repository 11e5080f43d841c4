"""Keeps one client connected: opens its link at the first call, again when it has ended, behind a circuit breaker."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, TypeVar

from grpc_health.v1 import health_pb2

from kvstore.errors import ClosedError, UnauthenticatedError, UnavailableError
from kvstore.transport.breaker import GuardedServer
from kvstore.transport.connection import Connection
from kvstore.transport.link import ArenaStatus
from kvstore.transport.plans import CHECK, is_serving
from kvstore.transport.wire_dial import NoFastLaneError
from kvstore.transport.wire_link import WireLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.transport.address import TcpAddress, UnixAddress
    from kvstore.transport.breaker import BreakerStatus
    from kvstore.transport.bulk_client import BulkEngineClient, BulkStatus
    from kvstore.transport.link import Link

T = TypeVar("T")
logger = logging.getLogger(__name__)
PROBE_SECONDS = 1.0
_keepers: weakref.WeakSet[LinkKeeper] = weakref.WeakSet()


class LinkKeeper:
    """The link of one client. Thread-safe; `_lock` guards it, and is held while connecting and for nothing else.

    Whoever calls opens the link within its own deadline. While the breaker is open calls fail without touching a
    socket, and the probe, which has more time, brings the link to life again.
    """

    def __init__(
        self,
        address: UnixAddress | TcpAddress,
        on_breaker_change: Callable[[BreakerStatus], None] | None,
        bulk: BulkEngineClient | None = None,
    ) -> None:
        self._address = address
        self._bulk = bulk
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._closed = False
        this = weakref.ref(self)  # a client that was dropped must not live on for its probes
        self._guard = GuardedServer(str(address), lambda: _probe(this), on_breaker_change)
        _keepers.add(self)

    @property
    def breaker(self) -> BreakerStatus:
        """State of the breaker."""
        return self._guard.breaker.status

    @property
    def arena(self) -> ArenaStatus:
        """Whether the link reads blocks where they lie."""
        link = self._link
        return ArenaStatus() if link is None else link.arena

    @property
    def bulk(self) -> BulkStatus | None:
        """What its engine for bytes has done; None if it has none."""
        return None if self._bulk is None else self._bulk.status

    def run(
        self,
        attempt: Callable[[Link, float], T],
        seconds: float,
        again: Callable[[Link, float], T] | None = None,
    ) -> T:
        """Run `attempt` on a link, with the moment it must end by.

        If the connection is lost meanwhile, `again` is tried once on a fresh one within the same time; None says
        that the call cannot be repeated.
        """
        ends_at = time.monotonic() + seconds
        self._check()
        try:
            answer = self._attempt(attempt, again, ends_at)
        except UnavailableError as error:
            self._guard.record_failure(error)
            raise
        self._guard.breaker.record_success()
        return answer

    def run_on(self, link: Link, attempt: Callable[[float], T], seconds: float) -> T:
        """Run `attempt`, which is about what the session of `link` holds, within `seconds`."""
        ends_at = time.monotonic() + seconds
        self._guard.breaker.check()
        try:
            answer = attempt(ends_at)
        except UnavailableError as error:
            if not link.ended:  # the end of an old session says nothing of the server
                self._guard.record_failure(error)
            raise
        self._guard.breaker.record_success()
        return answer

    def check_server(self) -> None:
        """Raises UnavailableError while the breaker is open."""
        self._guard.breaker.check()

    def close(self) -> None:
        """End the link and the probes; idempotent. Waits for no call, and for a probe under way at most its time."""
        self._closed = True  # before the link goes, so that nobody who finds none makes another
        self._guard.close()
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()
        if self._bulk is not None:
            self._bulk.close()

    def probe(self) -> None:
        """Find out whether the server answers. A link that does not, though it had all this time, is given up."""
        ends_at = time.monotonic() + PROBE_SECONDS
        link = self._connect(ends_at)
        try:
            health = link.call(CHECK, health_pb2.HealthCheckRequest(), ends_at)
        except UnavailableError:
            link.close()
            raise
        if not is_serving(health):
            raise UnavailableError(f"{self._address} takes no calls now")

    def forget(self) -> None:
        """In the child of a fork: what another thread of the parent held is held for ever."""
        self._lock = threading.Lock()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the client is closed")
        self._guard.breaker.check()

    def _attempt(
        self, attempt: Callable[[Link, float], T], again: Callable[[Link, float], T] | None, ends_at: float
    ) -> T:
        link = self._connect(ends_at)
        try:
            return attempt(link, ends_at)
        except (UnavailableError, UnauthenticatedError):  # the token file may have another one by now
            if again is None or not link.ended or time.monotonic() >= ends_at:
                raise
        return again(self._connect(ends_at), ends_at)

    def _connect(self, ends_at: float) -> Link:
        link = self._link
        if link is not None and not link.ended:
            return link
        if not self._lock.acquire(timeout=max(0.0, ends_at - time.monotonic())):
            raise UnavailableError(f"no answer from {self._address} within the deadline")
        try:
            if self._closed:
                raise ClosedError("the client is closed")
            if self._link is None or self._link.ended:
                if self._link is not None:
                    self._link.close()
                    self._link = None
                self._link = open_link(self._address, ends_at, self._bulk)
            return self._link
        finally:
            self._lock.release()


def open_link(address: UnixAddress | TcpAddress, ends_at: float, bulk: BulkEngineClient | None = None) -> Link:
    """A link over the fast lane where it is there, else over gRPC; `bulk` moves bytes of the first if it can."""
    if not address.grpc_only:
        try:
            return WireLink(address, ends_at, bulk)
        except NoFastLaneError as err:
            logger.info("no fast lane, using gRPC: cause=%s", err)
    return Connection(address, ends_at)


def _probe(this: weakref.ref[LinkKeeper]) -> bool:
    """Probe for a keeper; false if it is gone or closed."""
    keeper = this()
    if keeper is None:
        return False
    try:
        keeper.probe()
    except ClosedError:
        return False
    except UnauthenticatedError:
        return True  # the server is well, and the next call is told that it lets us in no more
    return True


def _forget_all() -> None:
    for keeper in list(_keepers):
        keeper.forget()


os.register_at_fork(after_in_child=_forget_all)
