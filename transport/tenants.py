"""What each tenant has open, how fast it asks, and what it may see of what others do."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from kvstore.errors import NoSpaceError
from kvstore.stats import StoreStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.clock import Clock
    from kvstore.transport.limits import ServiceLimits
    from kvstore.types import CommitResult, PrefixMatch

_TENANTS_MAX = 65_536
_OWNED_MAX = 65_536
_BUCKET_SECONDS = 1.0


@dataclass(slots=True)
class _Tenant:
    """What one tenant uses, and what it has done since the start."""

    calls: int = 0
    leases: int = 0
    stages: int = 0
    leased_bytes: int = 0
    allowance: float = 0.0  # calls that may still begin at once
    filled_at: float = 0.0
    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    stored_blocks: int = 0
    present_blocks: int = 0

    @property
    def is_idle(self) -> bool:
        return not (self.calls or self.leases or self.stages)


class Tenants:
    """The limits of each tenant. Thread-safe, O(1) a call; `_lock` guards everything and is held for nothing else."""

    def __init__(self, limits: ServiceLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self.refused: Counter[str] = Counter()

    def begin(self, tenant: str) -> Callable[[], None]:
        """A call of a tenant begins; returns what ends it. Raises NoSpaceError beyond its rate or calls at a time."""
        with self._lock:
            one = self._tenant(tenant)
            if one.calls >= self._limits.calls_per_tenant:
                raise self._refusal("calls", f"tenant {tenant!r} has {one.calls} calls under way, the most it may")
            if self._limits.calls_per_second_per_tenant:
                self._take_allowance(tenant, one)
            one.calls += 1
        return lambda: self._end_call(one)

    def hold_lease(self, tenant: str, leased_bytes: int) -> Callable[[], None]:
        """Count a lease; returns what takes it back. Raises NoSpaceError beyond the tenant's leases or their bytes."""
        limits = self._limits
        with self._lock:
            one = self._tenant(tenant)
            if one.leases >= limits.leases_per_tenant:
                raise self._refusal("leases", f"tenant {tenant!r} holds {one.leases} leases, the most it may")
            if limits.leased_bytes_per_tenant and one.leased_bytes + leased_bytes > limits.leased_bytes_per_tenant:
                raise self._refusal(
                    "leased_bytes",
                    f"tenant {tenant!r} holds leases on {one.leased_bytes} bytes and asks for {leased_bytes} more, "
                    f"it may have {limits.leased_bytes_per_tenant}",
                )
            one.leases += 1
            one.leased_bytes += leased_bytes
        return lambda: self._end_lease(one, leased_bytes)

    def hold_stage(self, tenant: str) -> Callable[[], None]:
        """Count a stage; returns what takes it back. Raises NoSpaceError beyond the tenant's stages."""
        with self._lock:
            one = self._tenant(tenant)
            if one.stages >= self._limits.stages_per_tenant:
                raise self._refusal("stages", f"tenant {tenant!r} has begun {one.stages} stores, the most it may")
            one.stages += 1
        return lambda: self._end_stage(one)

    def count_lookup(self, match: PrefixMatch, prompt_symbols: int) -> None:
        """Remember what a tenant looked up, for its own statistics."""
        layout = match.namespace.layout
        with self._lock:
            one = self._tenant(match.namespace.tenant)
            one.lookups += 1
            one.lookup_tokens += layout.prompt_tokens(prompt_symbols)
            for run in match.runs:
                one.hit_tokens[run.tier.name.lower()] += run.blocks * layout.block_tokens

    def count_commit(self, tenant: str, result: CommitResult) -> None:
        """Remember what a tenant stored."""
        with self._lock:
            one = self._tenant(tenant)
            one.stored_blocks += result.blocks
            one.present_blocks += result.present_blocks

    def stats(self, tenant: str, *, namespaces: int, pins: int) -> StoreStats:
        """What a tenant may know of the store: what it did itself, and nothing of what others have."""
        with self._lock:
            one = self._tenant(tenant)
            return replace(
                _nothing(),
                namespaces=namespaces,
                lookups=one.lookups,
                lookup_tokens=one.lookup_tokens,
                hit_tokens=dict(one.hit_tokens),
                stored_blocks=one.stored_blocks,
                present_blocks=one.present_blocks,
                leases=one.leases,
                stages=one.stages,
                pins=pins,
            )

    def _tenant(self, name: str) -> _Tenant:
        one = self._tenants.get(name)
        if one is None:
            if len(self._tenants) >= _TENANTS_MAX:
                self._forget_one()
            burst = self._limits.calls_per_second_per_tenant * _BUCKET_SECONDS
            one = self._tenants[name] = _Tenant(allowance=burst, filled_at=self._clock.monotonic())
        return one

    def _forget_one(self) -> None:
        """Names come from clients, so there may be no end to them; one that holds something is kept."""
        for name, one in self._tenants.items():
            if one.is_idle:
                del self._tenants[name]
                return
        raise self._refusal("tenants", f"{_TENANTS_MAX} tenants are active, the most there may be")

    def _take_allowance(self, tenant: str, one: _Tenant) -> None:
        """A token bucket that holds the calls of one second."""
        rate = self._limits.calls_per_second_per_tenant
        now = self._clock.monotonic()
        one.allowance = min(rate * _BUCKET_SECONDS, one.allowance + (now - one.filled_at) * rate)
        one.filled_at = now
        if one.allowance < 1:
            error = self._refusal("rate", f"tenant {tenant!r} makes more than {rate:g} calls a second, the most it may")
            error.retry_after_seconds = (1 - one.allowance) / rate
            raise error
        one.allowance -= 1

    def _refusal(self, limit: str, text: str) -> NoSpaceError:
        self.refused[limit] += 1
        return NoSpaceError(f"{text}; try again later")

    def _end_call(self, one: _Tenant) -> None:
        with self._lock:
            one.calls -= 1

    def _end_lease(self, one: _Tenant, leased_bytes: int) -> None:
        with self._lock:
            one.leases -= 1
            one.leased_bytes -= leased_bytes

    def _end_stage(self, one: _Tenant) -> None:
        with self._lock:
            one.stages -= 1


def _nothing() -> StoreStats:
    """Statistics that tell nothing: what is counted for no tenant by itself stays hidden from all."""
    empty: dict[str, Any] = {"dict": {}, "tupl": (), "int": 0, "str": "", "floa": 0.0}
    return StoreStats(**{item.name: copy(empty[str(item.type)[:4]]) for item in fields(StoreStats)})


class Owners:
    """Which tenant something is of, by its id: namespaces, pins. Thread-safe; the oldest are forgotten at the limit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: OrderedDict[bytes | int, str] = OrderedDict()  # guarded by _lock

    def add(self, owned: bytes | int, tenant: str) -> None:
        """Remember whose it is."""
        with self._lock:
            self._tenants[owned] = tenant
            if len(self._tenants) > _OWNED_MAX:
                self._tenants.popitem(last=False)

    def remove(self, owned: bytes | int) -> None:
        """Forget it."""
        with self._lock:
            self._tenants.pop(owned, None)

    def is_of(self, owned: bytes | int, tenant: str) -> bool:
        """Whether it is that tenant's."""
        with self._lock:
            return self._tenants.get(owned) == tenant

    def of(self, tenant: str) -> list[bytes | int]:
        """Everything of a tenant."""
        with self._lock:
            return [owned for owned, owner in self._tenants.items() if owner == tenant]


@contextmanager
def under_way(tenants: Tenants, tenant: str | None) -> Iterator[None]:
    """A call of a tenant, for the time it takes; callers that belong to none are not counted."""
    if tenant is None:
        yield
        return
    end = tenants.begin(tenant)
    try:
        yield
    finally:
        end()
