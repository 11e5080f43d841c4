"""Looks through a log of requests as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.doctor.causes import Examiner
from kvstore.doctor.report import DAY_SECONDS, Report, Tallies
from kvstore.doctor.request_log import BadLine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.doctor.request_log import LoggedLookup

_PROMPT_TOKENS_MAX = 1 << 20
# About 100 bytes each: 800 MB at most, of which a small log takes little.
_ENTRIES_MAX = 4_000_000
_NAMED_MAX = 20


@dataclass(frozen=True, slots=True)
class LogReport:
    """What a log says, and its lines that are no requests: how many, and the first ones."""

    report: Report
    bad_count: int
    bad_lines: tuple[BadLine, ...]


def examine_log(requests: Iterable[LoggedLookup | BadLine]) -> LogReport:
    """Look at all of them. A log that does not tell its times is taken for one of a day."""
    examiner, tallies = Examiner(_PROMPT_TOKENS_MAX, _ENTRIES_MAX, _ENTRIES_MAX), Tallies()
    began = ended = None
    named: list[BadLine] = []
    bad_count = 0
    for request in requests:
        if isinstance(request, BadLine):
            bad_count += 1
            if len(named) < _NAMED_MAX:
                named.append(request)
            continue
        tallies.add(request.lookup, examiner.examine(request.lookup))
        if request.seconds is not None:
            began = request.seconds if began is None else min(began, request.seconds)
            ended = request.seconds if ended is None else max(ended, request.seconds)
    seconds = DAY_SECONDS if began is None or ended is None or ended <= began else ended - began
    return LogReport(tallies.report(seconds, 0), bad_count, tuple(named))
