"""Who calls: where a connection comes from, and what was found out about who is behind it."""

from __future__ import annotations

import enum
from contextvars import ContextVar
from dataclasses import dataclass

from kvstore.errors import PermissionDeniedError, UnauthenticatedError
from kvstore.transport.roles import EVERY_TENANT_CALLS, Role, role_for


class Carrier(enum.Enum):
    """What a connection came over."""

    UNIX = "unix"
    LOOPBACK = "loopback"
    TLS = "tls"


@dataclass(frozen=True, slots=True)
class Origin:
    """What the kernel, and TLS, say of the other side of a connection.

    `same_user` is for Unix sockets, by SO_PEERCRED (https://man7.org/linux/man-pages/man7/unix.7.html).
    """

    carrier: Carrier
    same_user: bool = False
    certificate_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. `tenant` is the only one whose namespaces are there for it; None: all of them.

    `source` says what it was known by, in words that hold no secret; with it the server asks whether it still holds.
    """

    name: str
    tenant: str | None
    role: Role
    source: str
    expires_at: float | None = None  # as of clock.unix()

    def is_same(self, other: Principal) -> bool:
        """Whether both are the same caller, whatever token each has shown."""
        return (self.name, self.tenant) == (other.name, other.tenant)

    def require(self, method: str) -> None:
        """Raises PermissionDeniedError unless the role allows the call, and the tenant if all are concerned."""
        needed = role_for(method)
        if self.role < needed:
            raise PermissionDeniedError(
                f"{method} needs the role {needed.word}, {self.name!r} has {self.role.word}; use a token with that role"
                + (", or the Unix socket as the user of the server" if self.source == "local" else "")
            )

        if self.tenant is not None and method in EVERY_TENANT_CALLS:
            raise PermissionDeniedError(
                f"{method} is about the blocks of all tenants, {self.name!r} is of tenant {self.tenant!r}; use a token "
                "for every tenant (`*`)"
            )

    def require_tenant(self, tenant: str) -> None:
        """Raises PermissionDeniedError for a namespace of another tenant."""
        if self.tenant is not None and self.tenant != tenant:
            raise PermissionDeniedError(
                f"{self.name!r} may use namespaces of tenant {self.tenant!r}, not of {tenant!r}"
            )


_CALLER: ContextVar[Principal | None] = ContextVar("kvstore_caller", default=None)


def enter(principal: Principal) -> None:
    """From here on, in this task, this one calls."""
    _CALLER.set(principal)


def caller() -> Principal:
    """Who the call under way is of; raises UnauthenticatedError where nobody was let in."""
    principal = _CALLER.get()
    if principal is None:
        raise UnauthenticatedError("nobody was let in to make this call")
    return principal
