"""The engines of the settings, and the thread that follows them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore.clock import Clock
    from kvstore.engine_event_config import EngineEventConfig
    from kvstore.engine_events.overlay import DeviceOverlay
    from kvstore.engine_events.subscriber import EngineSubscriber
    from kvstore.stats import EngineStats
    from kvstore.tokens import Tokens
    from kvstore.types import Namespace, Root


class Engines:
    """All engines that a node follows, which may be none."""

    def __init__(self, overlay: DeviceOverlay | None = None, subscriber: EngineSubscriber | None = None) -> None:
        self._overlay = overlay
        self._subscriber = subscriber

    @property
    def is_alive(self) -> bool:
        """Whether they are followed as they should be."""
        return self._subscriber is None or self._subscriber.is_alive

    def device_tokens(self, namespace: Namespace, tokens: Tokens, root: Root | None) -> dict[str, int]:
        """Leading tokens of a prompt that each holds in its device's memory, by its name."""
        return {} if self._overlay is None else self._overlay.device_tokens(namespace, tokens, root)

    def stats(self) -> tuple[EngineStats, ...]:
        """What was learnt of them so far."""
        return () if self._overlay is None else self._overlay.stats()


@contextmanager
def following(engines: Mapping[str, EngineEventConfig], clock: Clock) -> Iterator[Engines]:
    """The engines of the settings, followed while this is open. Raises ConfigError where they cannot be."""
    if not engines:
        yield Engines()
        return
    try:
        from kvstore.engine_events.overlay import DeviceOverlay
        from kvstore.engine_events.subscriber import EngineSubscriber
    except ImportError as err:
        raise ConfigError(
            f"engine_events needs pyzmq and msgspec, and {err.name} is not installed: pip install "
            "'prefix-kvstore[events]'"
        ) from err
    overlay = DeviceOverlay(engines)
    subscriber = EngineSubscriber(overlay, clock)
    subscriber.start()
    try:
        yield Engines(overlay, subscriber)
    finally:
        subscriber.stop()
