"""A progress bar on stderr, for people only: where stderr is no terminal, nothing is written."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

_WIDTH = 30


class ProgressBar:
    """Shows how much of `total` steps is done. A context manager; its end wipes the bar away."""

    def __init__(self, total: int) -> None:
        self._total = max(1, total)
        self._done = 0
        self._shown = ""
        self._visible = sys.stderr.isatty()

    def advance(self, label: str, steps: int = 1) -> None:
        """More steps are done. Writes only when what is shown changes."""
        self._done = min(self._done + steps, self._total)
        if not self._visible:
            return
        filled = _WIDTH * self._done // self._total
        text = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {100 * self._done // self._total:3d} %  {label}"
        if text != self._shown:
            sys.stderr.write(f"\r{text.ljust(len(self._shown))}")
            sys.stderr.flush()
            self._shown = text

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            sys.stderr.write(f"\r{' ' * len(self._shown)}\r")
            sys.stderr.flush()
