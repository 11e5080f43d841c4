"""What the service refuses to exceed. Each limit has a name, a unit and a default; full means refused at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias

from kvstore.errors import ConfigError

MIB = 2**20

# Limits that may be 0, which means that there is none.
UNLIMITED_BY_ZERO = frozenset({"leased_bytes_per_tenant", "calls_per_second_per_tenant"})

# Secrets that clients of a tenant may prove, by tenant.
NamespaceSecrets: TypeAlias = Mapping[str, Sequence[bytes]]


class CallObserver(Protocol):
    """Told of every call that ended. Called in the event loop: it must not block."""

    def observe(self, method: str, seconds: float, status: str) -> None:
        """`method` is a name of the API such as "Match", `status` a gRPC code such as "OK"."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Limits of one server. Raises ConfigError where a value is out of range."""

    # One message: the 16 MiB of a prompt of 4 Mi tokens fit.
    message_bytes: int = 20 * MIB
    # One raw frame of Load and Write; 1-4 MiB run fastest.
    frame_bytes: int = 2 * MIB
    # What one bulk call holds in memory, and asks of the store at a time; at least one row is always held.
    bulk_buffer_bytes: int = 4 * MIB
    # One row of a bulk call (a whole block, or one part of it).
    row_bytes: int = 256 * MIB
    sessions: int = 1024
    leases_per_session: int = 1024
    stages_per_session: int = 64
    prefetches_per_session: int = 1024
    namespaces_per_session: int = 256
    # Connections of the addresses that carry both lanes, those that have not said yet what they are included.
    connections: int = 4096
    # Calls that one connection of the fast lane has under way.
    calls_per_connection: int = 256
    # Connections for bytes that one session of the fast lane has.
    bulk_connections_per_session: int = 16
    # Clients that read blocks where they lie, of all sessions together.
    arena_clients: int = 256
    # Prompts remembered for clients of the fast lane that send only what is new, of one session and of all together.
    prompt_bytes_per_session: int = 4 * MIB
    prompt_bytes: int = 256 * MIB
    # Loads and writes at a time, on each lane.
    bulk_calls: int = 16
    # Longest time of one load or write, however slow its client.
    bulk_seconds_max: float = 600.0
    # Lookups and other short calls at a time, running or queued.
    short_calls: int = 1024
    # Flushes, evictions, clears and checks at a time, running or queued.
    long_calls: int = 16
    # Callers that wait for prefetches at a time, each in a thread.
    prefetch_waiters: int = 32
    # Readers that wait for events at a time, each in a thread.
    event_readers: int = 32
    # Tokens of one pinned prompt.
    pin_tokens: int = MIB
    # Tokens of one prompt, whatever is asked about it.
    prompt_tokens: int = 4 * MIB
    # Of all clients of one tenant together: calls under way, leases and stages that are open.
    calls_per_tenant: int = 1024
    leases_per_tenant: int = 4096
    stages_per_tenant: int = 1024
    # Bytes that the leases of one tenant protect, each counted in full; 0: no limit.
    leased_bytes_per_tenant: int = 0
    # Calls of one tenant that begin in a second, of which a second's may begin at once; 0: no limit.
    calls_per_second_per_tenant: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name in UNLIMITED_BY_ZERO else 1
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < 2**63:
                raise ConfigError(f"limit {item.name} is {value!r}, expected a number of at least {least}")
        if self.frame_bytes + 1024 > self.message_bytes:
            raise ConfigError(
                f"limit frame_bytes is {self.frame_bytes}, expected 1024 below message_bytes ({self.message_bytes})"
            )
