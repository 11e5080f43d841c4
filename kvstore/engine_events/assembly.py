"""The engines of the settings, and the thread that follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.clock import Clock
    from kvstore.engine_event_config import EngineEventConfig
    from kvstore.engine_events.overlay import DeviceOverlay
    from kvstore.engine_events.subscriber import EngineSubscriber


@dataclass(frozen=True, slots=True)
class Engines:
    """What engines hold, and who learns it."""

    overlay: DeviceOverlay
    subscriber: EngineSubscriber


def open_engines(engines: Mapping[str, EngineEventConfig], clock: Clock) -> Engines | None:
    """Followers of all engines, not started yet; None where there are none. Raises ConfigError."""
    if not engines:
        return None
    try:
        from kvstore.engine_events.overlay import DeviceOverlay
        from kvstore.engine_events.subscriber import EngineSubscriber
    except ImportError as err:
        raise ConfigError(
            f"engine_events needs pyzmq and msgspec, and {err.name} is not installed: pip install "
            "'prefix-kvstore[events]'"
        ) from err
    overlay = DeviceOverlay(engines)
    return Engines(overlay, EngineSubscriber(overlay, clock))
