"""How fast each peer answered and sent, as measured: moving averages, in which what was long ago fades.

What was measured fades to what is assumed of any peer, too, with a half-life of a minute: who is taken for slow is
asked for nothing, so nobody would ever find out that it is quick again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.cluster.plan import Path

if TYPE_CHECKING:
    from kvstore.clock import Clock

_PEERS_MAX = 4096
_NEW_RATIO = 0.25
_HALF_LIFE_SECONDS = 60.0
# Less says more of the calls around it than of the way.
_MEASURED_BYTES_MIN = 1 << 20
_SECONDS_MIN = 1e-6


@dataclass(frozen=True, slots=True)
class _Measured:
    path: Path
    at: float


class PeerPaths:
    """The path to each peer, by the node's name; those asked last are remembered. Thread-safe."""

    def __init__(self, assumed: Path, clock: Clock) -> None:
        self._assumed = assumed
        self._clock = clock
        self._lock = threading.Lock()
        self._measured: OrderedDict[str, _Measured] = OrderedDict()  # guarded by _lock

    def path(self, name: str) -> Path:
        """What is known of the way to a peer; what is assumed of any where nothing is, or not any more."""
        with self._lock:
            return self._known(name)

    def count_answer(self, name: str, seconds: float) -> None:
        """A peer answered a call without bytes after so long."""
        with self._lock:
            known = self._known(name)
            latency_seconds = _mixed(known.latency_seconds, seconds, _NEW_RATIO)
            self._keep(name, Path(latency_seconds, known.bytes_per_second))

    def count_transfer(self, name: str, moved_bytes: int, seconds: float) -> None:
        """A peer sent so many bytes in so long."""
        if moved_bytes < _MEASURED_BYTES_MIN:
            return
        measured = moved_bytes / max(seconds, _SECONDS_MIN)
        with self._lock:
            known = self._known(name)
            self._keep(name, Path(known.latency_seconds, _mixed(known.bytes_per_second, measured, _NEW_RATIO)))

    def _known(self, name: str) -> Path:
        measured = self._measured.get(name)
        if measured is None:
            return self._assumed
        faded = 1 - 0.5 ** ((self._clock.monotonic() - measured.at) / _HALF_LIFE_SECONDS)
        return Path(
            _mixed(measured.path.latency_seconds, self._assumed.latency_seconds, faded),
            _mixed(measured.path.bytes_per_second, self._assumed.bytes_per_second, faded),
        )

    def _keep(self, name: str, path: Path) -> None:
        self._measured[name] = _Measured(path, self._clock.monotonic())
        self._measured.move_to_end(name)
        if len(self._measured) > _PEERS_MAX:
            self._measured.popitem(last=False)


def _mixed(old: float, new: float, new_ratio: float) -> float:
    return old + new_ratio * (new - old)
