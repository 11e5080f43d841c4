"""Prompts as numbers that say which parts of them are alike, and nothing of what they say.

Polynomials over the integers modulo 2^64 at a secret odd point, so that all windows of a prompt cost one pass of numpy
(Rabin, "Fingerprinting by random polynomials", 1981). A collision makes one request be told as another cause; nothing
is served by these. O(tokens).
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.types import TokenArray

GRAIN_TOKENS = 16  # from one prefix to the next
WINDOW_TOKENS = 16
# One window in so many is kept, chosen by its own value, so that equal text keeps equal windows wherever it stands.
KEPT_ONE_IN = 8
_MIXER = np.uint64(0x9E3779B97F4A7C15)


class Fingerprints:
    """Makes fingerprints under one secret; those of two instances have nothing in common."""

    def __init__(self, tokens_max: int) -> None:
        point = secrets.randbits(64) | 1
        self._tokens_max = tokens_max
        self._powers = _powers(point, tokens_max)
        self._inverses = _powers(pow(point, -1, 1 << 64), tokens_max)
        self._mask = np.uint64(secrets.randbits(64))

    def prefixes(self, tokens: TokenArray) -> list[int]:
        """One for each prefix of a multiple of GRAIN_TOKENS, of the first `tokens_max` tokens."""
        sums = self._sums(tokens)
        ends = np.arange(GRAIN_TOKENS, sums.size, GRAIN_TOKENS)
        found: list[int] = _mixed(sums[ends] ^ self._mask).tolist()
        return found

    def windows(self, tokens: TokenArray) -> tuple[list[int], list[int]]:
        """Those of the windows that are kept, and where each begins, in order."""
        sums = self._sums(tokens)
        if sums.size <= WINDOW_TOKENS:
            return [], []
        found = _mixed(
            ((sums[WINDOW_TOKENS:] - sums[:-WINDOW_TOKENS]) * self._inverses[: sums.size - WINDOW_TOKENS]) ^ self._mask
        )
        kept = np.flatnonzero(found % np.uint64(KEPT_ONE_IN) == 0)
        return found[kept].tolist(), kept.tolist()

    def _sums(self, tokens: TokenArray) -> NDArray[np.uint64]:
        """The polynomial of each prefix, that of no token first."""
        values = tokens[: self._tokens_max].astype(np.uint64) + np.uint64(1)
        sums = np.zeros(values.size + 1, dtype=np.uint64)
        np.cumsum(_mixed(values ^ self._mask) * self._powers[: values.size], out=sums[1:])
        return sums


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    powers = np.ones(count, dtype=np.uint64)
    powers[1:] = np.uint64(base)
    return np.multiply.accumulate(powers)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit depends on all (the finalizer of SplitMix64, with one round)."""
    spread = (values ^ (values >> np.uint64(31))) * _MIXER
    mixed: NDArray[np.uint64] = spread ^ (spread >> np.uint64(29))
    return mixed
