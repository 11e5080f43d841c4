"""Files that may change while the server runs: noticed, read again, and kept as they were if they have become bad."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.transport.private_files import signature

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.transport.private_files import Signature

logger = logging.getLogger(__name__)
# How soon keys are asked for again that a token has named and that were not there.
_ASKED_SECONDS_MIN = 10.0


@dataclass(slots=True)
class Reloadable:
    """What is made from files, or from a URL that is asked every `seconds`; `is_wanted` says that it is out of date."""

    noun: str
    load: Callable[[], None]
    files: Sequence[Path] = ()
    seconds: float | None = None
    is_wanted: Callable[[], bool] = lambda: False
    seen: Signature = field(default=())
    loaded_at: float = 0.0


class Reloader:
    """Looks after reloadable things. Used from the event loop of its server only; loads in threads.

    `outcomes` counts loads by what was loaded and how that went.
    """

    def __init__(self, items: Sequence[Reloadable], clock: Clock) -> None:
        self._items = items
        self._clock = clock
        self._loading = asyncio.Lock()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        for item in items:
            item.seen = signature(item.files)
            item.loaded_at = clock.monotonic()

    async def look(self) -> bool:
        """Load what has changed, or is due; says whether anything was."""
        async with self._loading:
            return any([await self._load(item) for item in self._items if self._is_due(item)])

    async def load_all(self) -> bool:
        """Load everything, changed or not; says whether anything could be."""
        async with self._loading:
            return any([await self._load(item) for item in self._items])

    def _is_due(self, item: Reloadable) -> bool:
        if item.files and signature(item.files) != item.seen:
            return True
        age_seconds = self._clock.monotonic() - item.loaded_at
        if item.is_wanted() and age_seconds >= _ASKED_SECONDS_MIN:
            return True
        return item.seconds is not None and age_seconds >= item.seconds

    async def _load(self, item: Reloadable) -> bool:
        item.seen = signature(item.files)  # of before: what changes meanwhile is looked at again
        item.loaded_at = self._clock.monotonic()
        try:
            await asyncio.to_thread(item.load)
        except ConfigError as err:
            self.outcomes[item.noun, "refused"] += 1
            logger.warning("kept what was loaded before: what=%s cause=%s", item.noun, err)
            return False
        self.outcomes[item.noun, "ok"] += 1
        logger.info("loaded again: what=%s", item.noun)
        return True
