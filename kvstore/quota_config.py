"""Settings of what namespaces may have of each tier; a part of kvstore.config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError
from kvstore.setting_values import Kind, setting

if TYPE_CHECKING:
    from collections.abc import Mapping

SIZE_BYTES_MAX = 2**60


def _least(tier: str) -> Any:  # noqa: ANN401  # as dataclasses.field
    return setting(0, Kind.SIZE, f"Bytes of blocks {tier} of which others take nothing.", maximum=SIZE_BYTES_MAX)


def _most(tier: str) -> Any:  # noqa: ANN401  # as dataclasses.field
    return setting(None, Kind.SIZE, f"Most bytes that it takes up {tier}.", maximum=SIZE_BYTES_MAX, auto="no limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaConfig:
    """What each namespace that fits may have; the store's Quota has the same. The first one that fits holds."""

    tenant: str = setting("", Kind.TEXT, "Fits namespaces of this tenant; empty: of any.")
    model: str = setting("", Kind.TEXT, "Fits namespaces of this model; empty: of any.")
    host_min: int = _least("in host memory")
    host_max: int | None = _most("in host memory")
    disk_min: int = _least("on disk")
    disk_max: int | None = _most("on disk")
    priority: float = setting(
        1.0, Kind.FACTOR, "What its blocks are worth counts so many times, compared with others'; above 0."
    )


def check_quotas(quotas: Mapping[str, QuotaConfig], capacities: Mapping[str, int | None]) -> None:
    """Raises ConfigError for a quota that contradicts itself, or the capacity of a tier, where that is known."""
    for name, quota in quotas.items():
        for tier, capacity in capacities.items():
            least, most = getattr(quota, f"{tier}_min"), getattr(quota, f"{tier}_max")
            if most is not None and least > most:
                raise ConfigError(f"quota.{name}.{tier}_min is {least}, expected at most {tier}_max, which is {most}")
            if capacity is not None and least > capacity:
                raise ConfigError(
                    f"quota.{name}.{tier}_min is {least}, expected at most the tier's capacity, which is {capacity}"
                )
