"""What the demo does, step by step, and what must hold at each."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvstore
from kvstore.demo.processes import DemoProcess, start_engine, start_sidecar
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.api import KvStore

BLOCK_TOKENS = 16
ENGINE_NAMES = "ABCDEFGH"
_LOOKUP_SECONDS = 10.0  # this machine is busy computing


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """What is run: `questions` has one sequence for each engine."""

    model_dir: Path
    system_prompt: str
    questions: Sequence[Sequence[str]]
    threads: int
    new_tokens: int = 24
    host_bytes: int = 512 * 2**20
    disk_bytes: int = 1024 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One question, asked without the cache and with it.

    `tiers` are those that tokens were loaded from; `broken` says which promises did not hold.
    """

    engine: str
    question: str
    answer: str
    prompt_tokens: int
    reused_tokens: int
    stored_blocks: int
    ttft_cold_seconds: float
    ttft_kvstore_seconds: float
    identical: bool
    tiers: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """How many times sooner the first token came."""
        return self.ttft_cold_seconds / self.ttft_kvstore_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """All that was seen."""

    rows: list[DemoRow]
    restart: DemoRow
    seconds: float
    machine: dict[str, Any]

    @property
    def holds(self) -> bool:
        """Whether every promise held."""
        return not any(row.broken for row in [*self.rows, self.restart])


@dataclass(slots=True)
class _Engine:
    name: str
    process: DemoProcess

    def ask(self, question: str, *, cache: bool) -> dict[str, Any]:
        self.process.send({"ask": question, "cache": cache})
        return self.process.receive()


@dataclass(slots=True)
class _Seen:
    """Sequences whose blocks the sidecar holds by now, and the answers that were computed without it."""

    sequences: list[list[int]] = field(default_factory=list)
    cold: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Counts:
    stored_blocks: int
    present_blocks: int
    loaded_tokens: dict[str, int]
    hit_tokens: dict[str, int] = field(default_factory=dict)

    def __sub__(self, before: _Counts) -> _Counts:
        loaded, hits = (
            {tier: tokens - earlier.get(tier, 0) for tier, tokens in now.items()}
            for now, earlier in ((self.loaded_tokens, before.loaded_tokens), (self.hit_tokens, before.hit_tokens))
        )
        stored_blocks = self.stored_blocks - before.stored_blocks
        return _Counts(stored_blocks, self.present_blocks - before.present_blocks, loaded, hits)


def run_flow(plan: DemoPlan, progress: Callable[[str], None]) -> DemoReport:
    """Run the plan; every process and file of it is gone afterwards. Raises DemoError if a process fails."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as name, ExitStack() as stack:
        folder = Path(name)
        address = f"unix://{folder}/kvstore.sock"
        progress("starting a sidecar and two engines ...")
        sidecar = stack.enter_context(start_sidecar(folder, address, plan.host_bytes, plan.disk_bytes))
        engines = _start_engines(plan, folder, stack)
        sidecar.receive()
        for engine in engines:
            _attach(engine, address)
        seen = _Seen()
        with kvstore.connect(address, lookup_seconds=_LOOKUP_SECONDS) as store:
            rows = _ask_all(plan, engines, store, seen, progress)
            progress("flushing, killing the sidecar with SIGKILL, starting it again ...")
            store.flush()
        sidecar.kill()
        again = stack.enter_context(start_sidecar(folder, address, plan.host_bytes, plan.disk_bytes))
        again.receive()
        restart = _ask_after_restart(plan, engines[-1], address, seen)
    return DemoReport(rows=rows, restart=restart, seconds=time.monotonic() - start, machine=_machine(plan.threads))


def _start_engines(plan: DemoPlan, folder: Path, stack: ExitStack) -> list[_Engine]:
    system_prompt = folder / "system-prompt.txt"
    system_prompt.write_text(plan.system_prompt, encoding="utf-8")
    arguments = ["--model-dir", str(plan.model_dir), "--system-prompt", str(system_prompt)]
    arguments += ["--new-tokens", str(plan.new_tokens), "--threads", str(plan.threads)]
    names = ENGINE_NAMES[: len(plan.questions)]
    engines = [_Engine(name, stack.enter_context(start_engine(folder, name, arguments))) for name in names]
    for engine in engines:
        engine.process.receive()
    return engines


def _attach(engine: _Engine, address: str) -> None:
    engine.process.send({"attach": address})
    engine.process.receive()


def _ask_all(
    plan: DemoPlan, engines: list[_Engine], store: KvStore, seen: _Seen, progress: Callable[[str], None]
) -> list[DemoRow]:
    rows = []
    for engine, questions in zip(engines, plan.questions, strict=True):
        for question in questions:
            progress(f"engine {engine.name}, without the cache: {question}")
            seen.cold[engine.name, question] = engine.ask(question, cache=False)
            progress(f"engine {engine.name}, with kvstore:      {question}")
            rows.append(_ask_cached(engine, question, store, seen))
    return rows


def _ask_after_restart(plan: DemoPlan, engine: _Engine, address: str, seen: _Seen) -> DemoRow:
    """The last question again, by an engine that lived on. Only the disk can hold its blocks now."""
    with kvstore.connect(address, lookup_seconds=_LOOKUP_SECONDS) as store:
        row = _ask_cached(engine, plan.questions[-1][-1], store, seen)
    if Tier.DISK.name.lower() in row.tiers:
        return row
    return replace(row, broken=(*row.broken, "no block came from disk after the restart"))


def _ask_cached(engine: _Engine, question: str, store: KvStore, seen: _Seen) -> DemoRow:
    before = _counts(store)
    answer = engine.ask(question, cache=True)
    counted = _counts(store) - before
    cold = seen.cold[engine.name, question]
    row = DemoRow(
        engine=engine.name,
        question=question,
        answer=answer["text"].strip(),
        prompt_tokens=len(answer["prompt"]),
        reused_tokens=answer["reused_tokens"],
        stored_blocks=answer["stored_blocks"],
        ttft_cold_seconds=cold["ttft_seconds"],
        ttft_kvstore_seconds=answer["ttft_seconds"],
        identical=answer["tokens"] == cold["tokens"],
        tiers=tuple(tier for tier, tokens in counted.hit_tokens.items() if tokens),
        broken=_broken_promises(answer, cold, counted, seen),
    )
    seen.sequences.append(_computed(answer))
    return row


def _broken_promises(answer: dict[str, Any], cold: dict[str, Any], counted: _Counts, seen: _Seen) -> tuple[str, ...]:
    """What should hold and does not. `counted` is what the sidecar counted meanwhile."""
    computed = _computed(answer)
    shared_blocks = max((_common_blocks(computed, earlier) for earlier in seen.sequences), default=0)
    # At least one token of a prompt is computed, to have something to go on from.
    reusable_blocks = min(shared_blocks, (len(answer["prompt"]) - 1) // BLOCK_TOKENS)
    expected = {
        "generated tokens": (cold["tokens"], answer["tokens"]),
        "failures of the connector": ({}, answer["failures"]),
        "tokens reused": (reusable_blocks * BLOCK_TOKENS, answer["reused_tokens"]),
        "tokens the sidecar loaded": (answer["reused_tokens"], sum(counted.loaded_tokens.values())),
        "blocks stored": (len(computed) // BLOCK_TOKENS - shared_blocks, answer["stored_blocks"]),
        "blocks the sidecar stored": (answer["stored_blocks"], counted.stored_blocks),
        "blocks offered again": (shared_blocks - reusable_blocks, answer["present_blocks"]),
        "blocks the sidecar had already": (answer["present_blocks"], counted.present_blocks),
    }
    return tuple(f"{name}: {seen}, expected {wanted}" for name, (wanted, seen) in expected.items() if wanted != seen)


def _computed(answer: dict[str, Any]) -> list[int]:
    """The tokens whose KV the engine has: all but the last."""
    computed: list[int] = answer["prompt"] + answer["tokens"][:-1]
    return computed


def _common_blocks(one: list[int], other: list[int]) -> int:
    common = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in common) // BLOCK_TOKENS


def _counts(store: KvStore) -> _Counts:
    stats = store.stats()
    return _Counts(stats.stored_blocks, stats.present_blocks, dict(stats.loaded_tokens), dict(stats.hit_tokens))


def _machine(threads: int) -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "engine_threads": threads,
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
