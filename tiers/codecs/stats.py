"""What the codecs of a tier did since it was opened, by pipeline."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from kvstore.stats import CodecStats


@dataclass(frozen=True, slots=True)
class _Sums:
    shown: CodecStats = field(default_factory=CodecStats)
    relative_errors: float = 0.0


class CodecCounts:
    """Counters by the name of a pipeline. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, _Sums] = {}

    def count_written(self, pipeline: str, written: CodecStats) -> None:
        """Add what was written; of the errors the largest count, and the mean over blocks."""
        with self._lock:
            sums = self._sums.get(pipeline, _Sums())
            shown = sums.shown
            blocks = shown.written_blocks + written.written_blocks
            relative_errors = sums.relative_errors + written.rms_relative_error * written.written_blocks
            self._sums[pipeline] = _Sums(
                replace(
                    shown,
                    written_blocks=blocks,
                    raw_bytes=shown.raw_bytes + written.raw_bytes,
                    slot_bytes=shown.slot_bytes + written.slot_bytes,
                    encode_seconds=shown.encode_seconds + written.encode_seconds,
                    max_absolute_error=max(shown.max_absolute_error, written.max_absolute_error),
                    rms_relative_error=relative_errors / blocks if blocks else 0.0,
                ),
                relative_errors,
            )

    def count_read(self, pipeline: str, blocks: int, seconds: float) -> None:
        """Add blocks that were read and decoded."""
        with self._lock:
            sums = self._sums.get(pipeline, _Sums())
            shown = sums.shown
            self._sums[pipeline] = replace(
                sums,
                shown=replace(
                    shown, read_blocks=shown.read_blocks + blocks, decode_seconds=shown.decode_seconds + seconds
                ),
            )

    def snapshot(self) -> dict[str, CodecStats]:
        """The counters now."""
        with self._lock:
            return {name: sums.shown for name, sums in self._sums.items()}
