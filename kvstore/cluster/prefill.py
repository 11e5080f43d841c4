"""How long an engine takes to compute tokens itself: a model of two numbers, from settings or from what engines report.

    prefill(d, n) = a*n + b*n*(d + n/2)

computes n tokens behind d that are there already: a is the work that each token takes by itself, b that of each pair of
tokens in attention. Both are seconds of one engine.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

from kvstore.errors import InvalidArgumentError

# What a report still counts when as many have come since: an engine that gets a faster GPU is believed soon.
_KEPT_RATIO = 0.98
_REPORTS_MIN = 8
# Below this the two unknowns cannot be told from each other: all reports are alike.
_DETERMINANT_RATIO_MIN = 1e-9


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Seconds of prefill. The defaults are those of a model of 8 billion parameters on one GPU of 400 TFLOP/s."""

    seconds_per_token: float = 5e-5
    seconds_per_pair: float = 1.3e-9

    def __post_init__(self) -> None:
        for name in ("seconds_per_token", "seconds_per_pair"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InvalidArgumentError(f"{name} is {value!r}, expected a number of seconds, at least 0")

    def seconds(self, cached_tokens: int, new_tokens: int) -> float:
        """How long it takes to compute `new_tokens` behind `cached_tokens`."""
        pairs = new_tokens * (cached_tokens + new_tokens / 2)
        return self.seconds_per_token * new_tokens + self.seconds_per_pair * pairs


class PrefillFit:
    """Fits the model of one namespace to what its engines report, by least squares in which old reports fade.

    Errors are weighed relative to the time reported, so that long prompts do not decide alone. O(1) for each report.
    Thread-safe; `_lock` guards all fields. Until there are enough reports, of different lengths, it is `assumed`.
    """

    def __init__(self, assumed: PrefillModel) -> None:
        self._lock = threading.Lock()
        self._model = assumed
        self._count = 0
        # Sums over reports of x*x, x*y, y*y, x, y, where a*x + b*y should be 1.
        self._xx = self._xy = self._yy = self._x = self._y = 0.0

    @property
    def model(self) -> PrefillModel:
        """What is believed now."""
        with self._lock:
            return self._model

    def report(self, cached_tokens: int, new_tokens: int, seconds: float) -> None:
        """An engine computed `new_tokens` behind `cached_tokens` in so long. Raises InvalidArgumentError."""
        if cached_tokens < 0 or new_tokens < 1 or not 0 < seconds < math.inf:
            raise InvalidArgumentError(
                f"prefill of {new_tokens} tokens behind {cached_tokens} in {seconds} s: expected at least 1, 0, above 0"
            )
        x = new_tokens / seconds
        y = new_tokens * (cached_tokens + new_tokens / 2) / seconds
        with self._lock:
            self._xx, self._xy, self._yy = (
                _KEPT_RATIO * old + new for old, new in ((self._xx, x * x), (self._xy, x * y), (self._yy, y * y))
            )
            self._x, self._y = _KEPT_RATIO * self._x + x, _KEPT_RATIO * self._y + y
            self._count += 1
            if self._count >= _REPORTS_MIN:
                self._model = self._solved()

    def _solved(self) -> PrefillModel:
        """The best model whose two numbers are not below 0."""
        determinant = self._xx * self._yy - self._xy * self._xy
        if determinant > _DETERMINANT_RATIO_MIN * self._xx * self._yy:
            a = (self._x * self._yy - self._y * self._xy) / determinant
            b = (self._y * self._xx - self._x * self._xy) / determinant
            if a >= 0 and b >= 0:
                return PrefillModel(a, b)
            if a < 0:
                return PrefillModel(0.0, self._y / self._yy)
        return PrefillModel(self._x / self._xx, 0.0)
