"""`kvstore top`: what a sidecar does now, again and again, until q or Ctrl-C."""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import sys
import termios
import time
import tty
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.cli.metrics_page import calls_of, read_metrics
from kvstore.cli.output import ExitCode, print_json
from kvstore.cli.sidecar import connect_sidecar, sidecar_address
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.metrics import CALL_SECONDS_BUCKETS
from kvstore.page.quantiles import quantile
from kvstore.page.wording import amount, duration, percent, size
from kvstore.quantities import parse_duration

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from kvstore.stats import StoreStats
    from kvstore.transport.client import Client

_INTERVAL_SECONDS_MIN = 0.1
_METERS = 20
# Other screen, no cursor; and back (https://invisible-island.net/xterm/ctlseqs/ctlseqs.html).
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a sidecar had counted at a moment, and its calls by method, if its metrics are read."""

    seconds: float
    stats: StoreStats
    calls: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two readings, a second. Shares are of the tokens looked up; None: there were none.

    `p99_seconds` are by method, of those that were called.
    """

    lookups: float
    hit_ratio: float | None
    hit_ratios: dict[str, float | None]
    loaded_tokens: float
    stored_blocks: float
    evicted_blocks: float
    calls: dict[str, float]
    p99_seconds: dict[str, float | None]


def top(arguments: argparse.Namespace) -> int:
    """Draw on a terminal; elsewhere, or with --json or --once, write lines."""
    interval_seconds = _interval_seconds(arguments.interval)
    with connect_sidecar(arguments) as client:
        before = _read(client, arguments.metrics)
        title = f"kvstore top: {sidecar_address(arguments)}"
        with contextlib.suppress(KeyboardInterrupt):
            if sys.stdout.isatty() and sys.stdin.isatty() and not arguments.json and not arguments.once:
                _draw(client, arguments.metrics, interval_seconds, title, before)
            else:
                _write(client, arguments, interval_seconds, before)
    return ExitCode.DONE


def rates_between(before: Reading, after: Reading) -> Rates:
    """What happened meanwhile; counters that began anew count from then on."""
    seconds = max(after.seconds - before.seconds, 1e-9)
    lookup_tokens = _more(before.stats.lookup_tokens, after.stats.lookup_tokens)
    hits = _more_of_each(before.stats.hit_tokens, after.stats.hit_tokens)
    calls = {
        method: [_more(a, b) for a, b in zip(before.calls.get(method, [0] * len(counts)), counts, strict=True)]
        for method, counts in after.calls.items()
    }
    called = {method: counts for method, counts in calls.items() if sum(counts)}
    return Rates(
        lookups=_more(before.stats.lookups, after.stats.lookups) / seconds,
        hit_ratio=sum(hits.values()) / lookup_tokens if lookup_tokens else None,
        hit_ratios={tier: count / lookup_tokens if lookup_tokens else None for tier, count in hits.items()},
        loaded_tokens=sum(_more_of_each(before.stats.loaded_tokens, after.stats.loaded_tokens).values()) / seconds,
        stored_blocks=_more(before.stats.stored_blocks, after.stats.stored_blocks) / seconds,
        evicted_blocks=sum(_more_of_each(before.stats.evicted_blocks, after.stats.evicted_blocks).values()) / seconds,
        calls={method: sum(counts) / seconds for method, counts in called.items()},
        p99_seconds={method: quantile(CALL_SECONDS_BUCKETS, counts, 0.99) for method, counts in called.items()},
    )


def screen(title: str, stats: StoreStats, rates: Rates) -> list[str]:
    """The lines of a screen."""
    by_tier = "  ".join(f"{tier} {percent(ratio)}" for tier, ratio in sorted(rates.hit_ratios.items()))
    did = (
        f"{amount(rates.lookups)} lookups  {amount(rates.loaded_tokens)} tokens loaded  "
        f"{amount(rates.stored_blocks)} blocks stored  {amount(rates.evicted_blocks)} evicted"
    )
    lines = [
        f"{title}{'  node ' + stats.node if stats.node else ''}",
        "",
        f"hit rate  {percent(rates.hit_ratio):>7}   {by_tier}",
        f"a second  {did}",
        f"open      {stats.leases} leases  {stats.stages} stores  {stats.pins} pins  {stats.moves} moves",
        "",
    ]
    for name, tier in sorted(stats.tiers.items()):
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        meter = "#" * round(_METERS * min(share, 1.0))
        lines.append(
            f"{name:<8} [{meter:.<{_METERS}}] {percent(share):>6}  {size(tier.used_bytes)} of "
            f"{size(tier.capacity_bytes)}  {amount(tier.blocks)} blocks"
        )
    if rates.calls:
        lines += ["", f"{'call':<20} {'a second':>10} {'p99':>10}"]
        for method, count in sorted(rates.calls.items(), key=lambda item: -item[1]):
            lines.append(f"{method:<20} {amount(count):>10} {duration(rates.p99_seconds[method]):>10}")
    return lines


def plain_line(stats: StoreStats, rates: Rates) -> str:
    """The same in a line."""
    used = " ".join(
        f"{name}={percent(tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else None)}"
        for name, tier in sorted(stats.tiers.items())
    )
    p99s = " ".join(f"p99.{method}={duration(seconds)}" for method, seconds in sorted(rates.p99_seconds.items()))
    line = (
        f"hit={percent(rates.hit_ratio)} lookups/s={rates.lookups:.1f} loaded_tokens/s={rates.loaded_tokens:.0f} "
        f"stored_blocks/s={rates.stored_blocks:.1f} evicted_blocks/s={rates.evicted_blocks:.1f} {used} {p99s}"
    )
    return line.rstrip()


def frame(lines: Sequence[str], columns: int, rows: int) -> str:
    """What a terminal of this size is sent: whole lines from its top left corner, nothing of what was there before."""
    shown = [f"{line[:columns]}{_REST_OF_LINE}" for line in lines[:rows]]
    return _HOME + "\r\n".join(shown) + _REST_OF_SCREEN


def _draw(client: Client, metrics: str | None, interval_seconds: float, title: str, before: Reading) -> None:
    with _raw_screen():
        lines = [title, "", "reading ..."]
        while True:
            size_now = shutil.get_terminal_size()
            sys.stdout.write(frame([*lines, "", "q: quit"], size_now.columns, size_now.lines))
            sys.stdout.flush()
            if _is_quit_within(interval_seconds):
                return
            try:
                after = _read(client, metrics)
            except UnavailableError as err:
                lines = [title, "", str(err)]
            else:
                lines = screen(title, after.stats, rates_between(before, after))
                before = after


def _write(client: Client, arguments: argparse.Namespace, interval_seconds: float, before: Reading) -> None:
    while True:
        time.sleep(interval_seconds)
        after = _read(client, arguments.metrics)
        rates = rates_between(before, after)
        if arguments.json:
            print_json(_as_json(after.stats, rates))
        elif arguments.once:
            print("\n".join(screen(f"kvstore top: {sidecar_address(arguments)}", after.stats, rates)))
        else:
            print(plain_line(after.stats, rates))
        sys.stdout.flush()
        if arguments.once:
            return
        before = after


def _as_json(stats: StoreStats, rates: Rates) -> dict[str, object]:
    return {
        "lookups_per_second": rates.lookups,
        "hit_ratio": rates.hit_ratio,
        "hit_ratios": rates.hit_ratios,
        "loaded_tokens_per_second": rates.loaded_tokens,
        "stored_blocks_per_second": rates.stored_blocks,
        "evicted_blocks_per_second": rates.evicted_blocks,
        "used_bytes": {name: tier.used_bytes for name, tier in stats.tiers.items()},
        "capacity_bytes": {name: tier.capacity_bytes for name, tier in stats.tiers.items()},
        "calls_per_second": rates.calls,
        "p99_seconds": rates.p99_seconds,
    }


def _read(client: Client, metrics: str | None) -> Reading:
    calls = {} if metrics is None else calls_of(read_metrics(metrics))
    return Reading(time.monotonic(), client.stats(), calls)


@contextlib.contextmanager
def _raw_screen() -> Iterator[None]:
    """A screen of our own and keys without Enter, until the end; then all as it was."""
    kept = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, kept)


def _is_quit_within(seconds: float) -> bool:
    """Whether q is pressed, or the terminal goes away, within this time; other keys bring the next reading at once."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"")


def _interval_seconds(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as err:
        raise InvalidArgumentError(f"--interval {text!r}: {err}") from err
    if not _INTERVAL_SECONDS_MIN <= seconds < math.inf:
        raise InvalidArgumentError(f"--interval {text!r}: expected at least {_INTERVAL_SECONDS_MIN} s")
    return seconds


def _more(before: int, after: int) -> int:
    return after - before if after >= before else after


def _more_of_each(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: _more(before.get(name, 0), count) for name, count in after.items()}
