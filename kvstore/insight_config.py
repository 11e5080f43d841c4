"""Settings of what tells people about a sidecar: its log, and the doctor; a part of kvstore.config."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.setting_values import Kind, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """What looks at lookups, to say what would raise the hit rate."""

    enabled: bool = setting(
        True, Kind.SWITCH, "Look at prompts that are looked up, to say why they miss; keeps keyed fingerprints alone."
    )
    cpu_ratio_max: float = setting(
        0.01, Kind.RATIO, "Of one core, for that; prompts that come when it is spent are skipped.", maximum=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What the sidecar writes on stderr."""

    level: str = setting(
        "info", Kind.TEXT, "Least severe level that is logged.", choices=("debug", "info", "warning", "error")
    )
    format: str = setting(
        "text", Kind.TEXT, "One line of text, or one JSON object, an event.", choices=("text", "json")
    )
