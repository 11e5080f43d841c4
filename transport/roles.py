"""Who may call what: the one table of calls and the roles they need."""

from __future__ import annotations

import enum

from kvstore.security_config import ROLE_WORDS


class Role(enum.IntEnum):
    """What a caller may do; each role includes the ones before it."""

    READ = 1
    WRITE = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        """How users write it."""
        return self.name.lower()


# Every call of kvstore.v1 by its name, on either lane.
ROLES: dict[str, Role] = {
    "Session": Role.READ,
    "OpenNamespace": Role.READ,
    "Match": Role.READ,
    "Prefetch": Role.READ,
    "CancelPrefetch": Role.READ,
    "Lease": Role.READ,
    "Load": Role.READ,
    "Release": Role.READ,
    "GetStats": Role.READ,
    "ReadEvents": Role.READ,
    "WatchEvents": Role.READ,
    "Hint": Role.WRITE,
    "Stage": Role.WRITE,
    "Write": Role.WRITE,
    "Commit": Role.WRITE,
    "Abort": Role.WRITE,
    "Pin": Role.ADMIN,
    "Unpin": Role.ADMIN,
    "Evict": Role.ADMIN,
    "EvictWriter": Role.ADMIN,
    "FindWriters": Role.READ,
    "Clear": Role.ADMIN,
    "Flush": Role.ADMIN,
    "Verify": Role.ADMIN,
    "Scrub": Role.ADMIN,
    "ListNodes": Role.READ,
    "Locate": Role.READ,
    "Drain": Role.ADMIN,
    "Undrain": Role.ADMIN,
    "ListNamespaces": Role.ADMIN,
    "DeleteNamespace": Role.ADMIN,
    "GetDiagnosis": Role.READ,
    "ResetDiagnosis": Role.ADMIN,
}
# Those that are about the blocks of all tenants, whoever asks.
EVERY_TENANT_CALLS = frozenset({"Scrub", "EvictWriter", "Drain", "Undrain", "ResetDiagnosis"})
# What anybody may ask who got through to the server: health and the public API's own description tell of no tenant.
OPEN_SERVICES = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
OPEN_CALLS = frozenset({"Check"})


def role_for(method: str) -> Role:
    """The role that a call needs; one that nobody wrote down is for administrators."""
    return ROLES.get(method, Role.ADMIN)


def role_of(word: object) -> Role:
    """The role of that name; raises ValueError that says which ones there are."""
    if isinstance(word, str) and word in ROLE_WORDS:
        return Role[word.upper()]
    raise ValueError(f"role is {word!r}, expected one of {', '.join(ROLE_WORDS)}")
