"""Settings of the metrics; a part of kvstore.config."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.setting_values import Kind, setting

OTHER = "other"  # what stands for all that are not listed
TENANTS_MAX = 32
MODELS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Which names become labels. Each pair of them is a few series, so there is a limit to both."""

    tenants: tuple[str, ...] = setting(
        (), Kind.LIST, f"Tenants with series of their own, at most {TENANTS_MAX}; others count as `{OTHER}`."
    )
    models: tuple[str, ...] = setting(
        (), Kind.LIST, f"Models with series of their own, at most {MODELS_MAX}; others count as `{OTHER}`."
    )


def check_metrics(config: MetricsConfig) -> None:
    """Raise ConfigError for a list that is too long, or does not name what it means."""
    for key, names, limit in (("tenants", config.tenants, TENANTS_MAX), ("models", config.models, MODELS_MAX)):
        if len(names) > limit:
            raise ConfigError(f"metrics.{key} has {len(names)} names, expected at most {limit}; list those that matter")
        for name in names:
            if name in ("*", OTHER):
                raise ConfigError(
                    f"metrics.{key} has {name!r}, expected names of {key}: what is not listed counts as {OTHER!r}"
                )
