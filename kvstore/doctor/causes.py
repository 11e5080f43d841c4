"""Why one prompt was not found as far as it could have been."""

from __future__ import annotations

import bisect
import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.doctor.fingerprints import GRAIN_TOKENS, KEPT_ONE_IN, Fingerprints
from kvstore.doctor.memory import Remembered, SeenPrefixes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.doctor.seen import Home, SeenLookup

# Text behind the point where a prompt parts is known text if this share of its windows is, and there are a few.
_KNOWN_SHARE = 0.5
_WINDOWS_MIN = 4
_IN_ORDER_SHARE = 0.9
# A few tokens more or less are chance: ends of turns, and stores that were still under way.
_SLACK_TOKENS = 2 * GRAIN_TOKENS


class Cause(enum.StrEnum):
    """Why the rest of a prompt had to be computed."""

    FOUND = "found"  # but for less than a block
    SHORT = "short"  # than a block: never stored
    EVICTED = "evicted"  # it was there; more memory would have kept it
    SPLIT = "split"  # the same tokens are kept apart: another revision, layout, adapter or salt
    VOLATILE = "volatile"  # known text stands behind text that differs
    REORDERED = "reordered"  # known text stands in another order
    COLD = "cold"  # new text: nobody can help


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why one prompt was not found further than to token `parted_at`, and how many tokens that cost.

    `differs_in` names what tells its home from the one that has it, for SPLIT.
    """

    cause: Cause
    parted_at: int
    lost_tokens: int
    differs_in: tuple[str, ...] = ()


class Examiner:
    """Compares each prompt with those before it. O(tokens) each; not thread-safe."""

    def __init__(self, tokens_max: int, prefixes_max: int, windows_max: int) -> None:
        self._fingerprints = Fingerprints(tokens_max)
        self._prefixes = SeenPrefixes(prefixes_max)
        self._windows: Remembered[tuple[Home, int, int]] = Remembered(windows_max)  # home, prompt, position
        self._prompts = 0

    @property
    def entries(self) -> int:
        """Fingerprints that are remembered."""
        return len(self._prefixes) + len(self._windows)

    def examine(self, lookup: SeenLookup) -> Diagnosis:
        """Say why it was not found further, and remember it."""
        prefixes = self._fingerprints.prefixes(lookup.tokens)
        windows, places = self._fingerprints.windows(lookup.tokens)
        diagnosis = self._diagnosis(lookup, prefixes, windows, places)
        self._prefixes.add(prefixes, lookup.home)
        self._prompts += 1
        for window, place in zip(windows, places, strict=True):
            self._windows.put(window, (lookup.home, self._prompts, place))
        return diagnosis

    def _diagnosis(
        self, lookup: SeenLookup, prefixes: Sequence[int], windows: Sequence[int], places: Sequence[int]
    ) -> Diagnosis:
        size = lookup.tokens.size
        before = self._prefixes.longest(prefixes, lookup.home) * GRAIN_TOKENS
        matched = lookup.matched_tokens
        if matched is None:
            matched = before // lookup.block_tokens * lookup.block_tokens
        if size < lookup.block_tokens:
            return Diagnosis(Cause.SHORT, 0, size)
        if size - matched < lookup.block_tokens:
            return Diagnosis(Cause.FOUND, matched, 0)
        if before >= matched + max(lookup.block_tokens, _SLACK_TOKENS):
            return Diagnosis(Cause.EVICTED, matched, before - matched)
        parted_at = max(before, matched)
        length, other = self._prefixes.longest_elsewhere(prefixes, lookup.home)
        elsewhere = length * GRAIN_TOKENS
        if other is not None and elsewhere >= parted_at + max(lookup.block_tokens, _SLACK_TOKENS):
            return Diagnosis(Cause.SPLIT, parted_at, elsewhere - parted_at, lookup.home.differs_in(other))
        return self._behind(lookup, parted_at, windows, places)

    def _behind(self, lookup: SeenLookup, parted_at: int, windows: Sequence[int], places: Sequence[int]) -> Diagnosis:
        """Whether what stands behind the point where a prompt parts is known text."""
        behind = [(window, place) for window, place in zip(windows, places, strict=True) if place >= parted_at]
        met = [
            (place, seen) for window, place in behind if (seen := self._windows.get(window)) and seen[0] == lookup.home
        ]
        if len(met) < _WINDOWS_MIN or len(met) < _KNOWN_SHARE * len(behind):
            return Diagnosis(Cause.COLD, parted_at, 0)
        source, _ = Counter(seen[1] for _, seen in met).most_common(1)[0]
        there = [seen[2] for _, seen in met if seen[1] == source]
        in_order = _longest_rise(there) >= _IN_ORDER_SHARE * len(there)
        lost = min(len(met) * KEPT_ONE_IN, lookup.tokens.size - parted_at)
        return Diagnosis(Cause.VOLATILE if in_order else Cause.REORDERED, parted_at, lost)


def _longest_rise(places: Sequence[int]) -> int:
    """How many of the places, at most, rise when the others are left out (patience sorting, O(n log n))."""
    lowest_ends: list[int] = []  # of rises, by their length
    for place in places:
        at = bisect.bisect_left(lowest_ends, place)
        lowest_ends[at : at + 1] = [place]
    return len(lowest_ends)
