"""Whether an engine will work with kvstore, told before its server starts. Knows no engine; imports one when asked.

An engine joins by a line in CHECKERS and a generator in a file of its own, which looks at the engine's installation,
the model and its layout, and stores and loads a block. It yields a finding for each; after a failure it ends.
"""

from __future__ import annotations

import enum
import importlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from kvstore.errors import InvalidArgumentError, KvstoreError, NoSpaceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.api import KvStore
    from kvstore.connectors.common import ConnectorStats

# What is asked for on the command line, and where its checker is.
CHECKERS = {
    "hf": "kvstore.connectors.check_huggingface:check",
    "sglang": "kvstore.connectors.check_sglang:check",
    "llama-cpp": "kvstore.connectors.check_llama_cpp:check",
    "vllm": "kvstore.connectors.check_vllm:check",
}


class Verdict(enum.StrEnum):
    """How a finding turned out. A warning keeps nothing from working."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what, how it turned out, and a sentence with what to do where it is not right."""

    subject: str
    verdict: Verdict
    sentence: str


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What is checked: a model in a folder or file, or a tiny one made up, in blocks of so many tokens, or as usual.

    `engine_arguments` are further arguments of the engine's own command line, as one would write them in a shell.
    """

    model: str | None = None
    block_tokens: int | None = None
    engine_arguments: str = ""


class Checker(Protocol):
    """Looks at one engine, step by step."""

    def __call__(self, options: CheckOptions, store: KvStore) -> Iterator[Finding]:
        """The findings, in order; nothing follows a failure."""
        ...


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All findings about an engine."""

    engine: str
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether nothing failed."""
        return all(finding.verdict is not Verdict.FAILED for finding in self.findings)


def check_engine(engine: str, options: CheckOptions, store: KvStore, about_store: Finding) -> CheckReport:
    """Check an engine against a store, of which the first finding is known; where that failed it is the only one.

    Raises InvalidArgumentError for an engine that is not known.
    """
    if engine not in CHECKERS:
        raise InvalidArgumentError(f"engine is {engine!r}, expected one of {', '.join(CHECKERS)}")
    findings = [about_store]
    if about_store.verdict is Verdict.FAILED:
        return CheckReport(engine, tuple(findings))
    try:
        checker = _checker(CHECKERS[engine])
        for finding in checker(options, store):
            findings.append(finding)  # noqa: PERF402  # what was found before an error is told too
    except ImportError as error:
        findings.append(Finding("engine", Verdict.FAILED, f"{error}; install the engine into this Python environment"))
    except KvstoreError as error:
        findings.append(Finding("store", Verdict.FAILED, f"{type(error).__name__}: {error}"))
    return CheckReport(engine, tuple(findings))


def round_trip(subject: str, gives_back_what_it_takes: Callable[[], bool]) -> Finding:
    """What came of storing something of random bytes and loading it, which tells whether they were equal."""
    start = time.perf_counter()
    try:
        equal = gives_back_what_it_takes()
    except NoSpaceError as error:
        sentence = (
            f"{error}: give the store more host memory (tiers.host.capacity_bytes), or this tenant a larger quota"
        )
        return Finding(subject, Verdict.FAILED, sentence)
    milliseconds = 1e3 * (time.perf_counter() - start)
    if not equal:
        return Finding(subject, Verdict.FAILED, f"a random {subject} came back with other bytes than were stored")
    sentence = f"a random {subject} was stored and came back the same, in {milliseconds:.1f} ms"
    return Finding(subject, Verdict.OK, sentence)


def came_again(stats: ConnectorStats, *, reusable_tokens: int, prompt_tokens: int, same: bool, excuse: str) -> Finding:
    """What came of asking an engine for one prompt twice: what was reused, and whether it was answered the same."""
    if stats.bypassed or stats.failures:
        reasons = ", ".join([*stats.bypassed, *stats.failures])
        return Finding("prompt", Verdict.FAILED, f"a prompt was computed without the store: {reasons}")
    if stats.loaded_tokens != reusable_tokens:
        sentence = f"a prompt that came again reused {stats.loaded_tokens} tokens, expected {reusable_tokens}"
        return Finding("prompt", Verdict.FAILED, sentence)
    sentence = f"a prompt that came again reused {stats.loaded_tokens} of its {prompt_tokens} tokens, and was answered "
    if not same:
        return Finding("prompt", Verdict.WARNING, f"{sentence}differently: {excuse}")
    return Finding("prompt", Verdict.OK, f"{sentence}the same")


def _checker(place: str) -> Checker:
    module, _, name = place.partition(":")
    return cast("Checker", getattr(importlib.import_module(module), name))
