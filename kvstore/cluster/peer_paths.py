"""How fast each peer answered and sent, as measured: moving averages, in which what was long ago fades."""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvstore.cluster.plan import Path

_PEERS_MAX = 4096
_NEW_RATIO = 0.25
# Less says more of the calls around it than of the way.
_MEASURED_BYTES_MIN = 1 << 20
_SECONDS_MIN = 1e-6


class PeerPaths:
    """The path to each peer, by the node's name; those asked last are remembered. Thread-safe."""

    def __init__(self, assumed: Path) -> None:
        self._assumed = assumed
        self._lock = threading.Lock()
        self._paths: OrderedDict[str, Path] = OrderedDict()  # guarded by _lock

    def path(self, name: str) -> Path:
        """What is known of the way to a peer; what is assumed of any where nothing is."""
        with self._lock:
            return self._paths.get(name, self._assumed)

    def count_answer(self, name: str, seconds: float) -> None:
        """A peer answered a call without bytes after so long."""
        with self._lock:
            known = self._paths.get(name, self._assumed)
            self._keep(name, Path(_mean(known.latency_seconds, seconds), known.bytes_per_second))

    def count_transfer(self, name: str, moved_bytes: int, seconds: float) -> None:
        """A peer sent so many bytes in so long."""
        if moved_bytes < _MEASURED_BYTES_MIN:
            return
        measured = moved_bytes / max(seconds, _SECONDS_MIN)
        with self._lock:
            known = self._paths.get(name, self._assumed)
            self._keep(name, Path(known.latency_seconds, _mean(known.bytes_per_second, measured)))

    def _keep(self, name: str, path: Path) -> None:
        self._paths[name] = path
        self._paths.move_to_end(name)
        if len(self._paths) > _PEERS_MAX:
            self._paths.popitem(last=False)


def _mean(old: float, new: float) -> float:
    return old + _NEW_RATIO * (new - old)
