"""Limits of one store, and who may have how much of it. config.py says how users set them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.radix.tree import POLICIES
from kvstore.store.placement import DiskAdmission
from kvstore.tiers.extent_stock import HostMemory
from kvstore.tiers.host import EXTENTS_MAX
from kvstore.tiers.huge_pages import HUGE_PAGES

if TYPE_CHECKING:
    from kvstore.store.codecs import CodecRule
    from kvstore.types import Namespace

COUNTING_POLICIES = ("survival", "survival_flops", "lfu")
# Their values are uses per second of a block's room, of survival_flops times its cost. Others only give an order.
MEASURING_POLICIES = ("survival", "survival_flops")
_WHOLE = ("host_min", "host_max", "disk_min", "disk_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What each namespace of a tenant, of a model, or of both, may have; None stands for any.

    `min`: bytes of blocks of which others take nothing. `max`: bytes of memory or of files that its blocks lie in;
    None for no limit. What a block is worth counts `priority` times when blocks of several namespaces are compared.
    """

    tenant: str | None = None
    model: str | None = None
    host_min: int = 0
    host_max: int | None = None
    disk_min: int = 0
    disk_max: int | None = None
    priority: float = 1.0

    def __post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if value is None and name.endswith("_max"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"quota: {name} is {value!r}, expected a whole number of bytes, at least 0")
        for tier, least, most in (("host", self.host_min, self.host_max), ("disk", self.disk_min, self.disk_max)):
            if most is not None and least > most:
                raise ConfigError(f"quota: {tier}_min is {least}, expected at most {tier}_max, which is {most}")
        if not 0 < self.priority < math.inf:
            raise ConfigError(f"quota: priority is {self.priority}, expected a number above 0")

    def covers(self, namespace: Namespace) -> bool:
        """Whether it speaks of this namespace."""
        return self.tenant in (None, namespace.tenant) and self.model in (None, namespace.model)


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Named limits: whole numbers of at least 1, seconds at least 0.

    The first quota that covers a namespace holds, and the first codec.
    """

    namespaces_max: int = 1024
    leases_max: int = 4096
    stages_max: int = 1024
    pins_max: int = 4096
    pinned_ratio_max: float = 0.5
    sparse_ratio_max: float = 0.5
    state_index_bytes: int = 64 << 20
    request_ids_max: int = 65536
    events_bytes: int = 64 << 20
    room_seconds_max: float = 2.0
    stage_seconds_max: float = 600.0
    lease_seconds_max: float = 3600.0
    eviction_policy: str = "survival"
    huge_pages: str = "auto"
    reserve_from_bytes: int = 128 << 20
    lock_memory: bool = False
    poison_freed: bool = False
    disk_admission: str = DiskAdmission.WORTH.value
    extent_bytes: int | None = None
    store_bytes_per_second: int | None = None
    prefetch_ratio: float = 0.1
    prefetches_max: int = 64
    quotas: tuple[Quota, ...] = ()
    codecs: tuple[CodecRule, ...] = ()
    # What namespaces without a secret are kept under, the same on all nodes that share them; None: this store's own.
    node_secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                continue
            least = 0 if isinstance(value, float) else 1
            if value < least:
                raise ConfigError(f"{item.name} is {value}, expected at least {least}")
        for name in ("pinned_ratio_max", "sparse_ratio_max", "prefetch_ratio"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0..1")
        if self.eviction_policy not in POLICIES:
            raise ConfigError(f"eviction_policy is {self.eviction_policy!r}, expected one of {', '.join(POLICIES)}")
        if self.huge_pages not in HUGE_PAGES:
            raise ConfigError(f"huge_pages is {self.huge_pages!r}, expected one of {', '.join(HUGE_PAGES)}")
        self._check_admission()

    @property
    def host_memory(self) -> HostMemory:
        """How the host tier takes its memory."""
        return HostMemory(
            huge_pages=self.huge_pages, lock_memory=self.lock_memory, reserve_from_bytes=self.reserve_from_bytes
        )

    def _check_admission(self) -> None:
        if self.disk_admission not in tuple(DiskAdmission):
            raise ConfigError(f"disk_admission is {self.disk_admission!r}, expected one of {', '.join(DiskAdmission)}")
        if self.disk_admission == DiskAdmission.REUSE and self.eviction_policy not in COUNTING_POLICIES:
            raise ConfigError(
                f"disk_admission is 'reuse', which needs an eviction_policy that counts uses "
                f"({', '.join(COUNTING_POLICIES)}), but that is {self.eviction_policy!r}"
            )

    def check_capacities(self, host_bytes: int, disk_bytes: int) -> None:
        """Raise ConfigError where a quota ensures more than a tier has, or extents are too small for host memory."""
        if self.extent_bytes is not None and self.extent_bytes * EXTENTS_MAX < host_bytes:
            raise ConfigError(
                f"extent_bytes is {self.extent_bytes}, expected at least {-(-host_bytes // EXTENTS_MAX)}: host_bytes "
                f"is {host_bytes}, and there are at most {EXTENTS_MAX} extents"
            )
        for quota in self.quotas:
            for name, least, capacity in (("host", quota.host_min, host_bytes), ("disk", quota.disk_min, disk_bytes)):
                if least > capacity:
                    raise ConfigError(
                        f"quota: {name}_min is {least}, expected at most {name}_bytes, which is {capacity}"
                    )

    def quota(self, namespace: Namespace) -> Quota:
        """What holds for a namespace."""
        return next((quota for quota in self.quotas if quota.covers(namespace)), NO_QUOTA)
