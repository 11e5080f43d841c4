"""The door of every gRPC call: who calls, whether the role allows it, whether the tenant's limits do."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvstore.errors import UnauthenticatedError
from kvstore.transport.principal import Carrier, Origin, Principal, enter
from kvstore.transport.tenants import Tenants, under_way

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.transport.access import Access

LASTING_METHODS = frozenset({"Session", "WatchEvents"})
_BEARER = "bearer "
_PASSED_ON = "unix-abstract:"
_UNIX = "unix:"


class Origins:
    """Where connections come from that were passed on to gRPC, by the name of the socket that they were passed on by.

    gRPC tells that name as the peer of a call. Thread-safe; `_lock` guards `_origins`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._origins: dict[str, Origin] = {}

    def add(self, name: str, origin: Origin) -> None:
        """A connection is passed on."""
        with self._lock:
            self._origins[name] = origin

    def remove(self, name: str) -> None:
        """It is over."""
        with self._lock:
            self._origins.pop(name, None)

    def of(self, peer: str) -> Origin:
        """Where a call comes from. Who reaches gRPC without us uses loopback, or a Unix socket of mode 0600."""
        if peer.startswith(_PASSED_ON):
            with self._lock:
                return self._origins.get(peer.removeprefix(_PASSED_ON), Origin(Carrier.LOOPBACK))
        return Origin(Carrier.UNIX, same_user=True) if peer.startswith(_UNIX) else Origin(Carrier.LOOPBACK)


class Admission:
    """Lets calls in. Used from the event loop of its server only."""

    def __init__(self, access: Access, tenants: Tenants) -> None:
        self.origins = Origins()
        self._access = access
        self._tenants = tenants

    @contextmanager
    def entered(self, method: str, context: Any) -> Iterator[None]:  # noqa: ANN401  # grpc has no types
        """The time of one call, made by who is let in; raises what it is refused with."""
        principal = self._principal(context)
        principal.require(method)
        enter(principal)
        with under_way(self._tenants, None if method in LASTING_METHODS else principal.tenant):
            yield

    def _principal(self, context: Any) -> Principal:  # noqa: ANN401
        shown = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        if len(shown) > 1:
            raise UnauthenticatedError("the call has several authorizations, expected one")
        token = shown[0] if shown else ""
        if token and token[: len(_BEARER)].lower() != _BEARER:
            raise UnauthenticatedError("the authorization of the call is none that begins with 'Bearer '")
        return self._access.admit(self.origins.of(context.peer()), token[len(_BEARER) :])
