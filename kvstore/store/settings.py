"""Limits of one store. Every queue, table and wait has one; config.py says how users set them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Named limits; all whole numbers of at least 1, seconds at least 0."""

    namespaces_max: int = 1024
    leases_max: int = 4096
    stages_max: int = 1024
    pins_max: int = 4096
    pinned_ratio_max: float = 0.5
    request_ids_max: int = 65536
    events_bytes: int = 64 << 20
    room_seconds_max: float = 2.0
    stage_seconds_max: float = 600.0
    lease_seconds_max: float = 3600.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if isinstance(value, float) else 1
            if value < least:
                raise ConfigError(f"{item.name} is {value}, expected at least {least}")
        if self.pinned_ratio_max > 1:
            raise ConfigError(f"pinned_ratio_max is {self.pinned_ratio_max}, expected 0..1")
