"""What the vLLM connector costs an engine that it cannot help, and what a hit is worth; engines as processes.

    python bench/bench_vllm.py [--vllm PYTHON] [--rounds N] [--prompt-tokens N] [--json FILE]

PYTHON is that of an environment with vLLM and kvstore (make engines). Three engines of one random Llama take turns, one
at work at a time, request by request: `plain` has no connector, `gone` one whose server was never there, `live` one
with a sidecar. A round is one request of each, so a ratio is of two that ran one after the other: `paired_wall` and
`paired_cpu` are the median and the quartiles of these, seconds on the clock and CPU seconds of the whole process; other
work on the machine disturbs the latter least. The first rounds warm up and do not count. No prompt comes twice but
where a hit is measured, and there the engine forgets its own cache before. `scheduler` is the connector's half in
vLLM's scheduler without vLLM, on prompts of 1,024 to 32,768 tokens: CPU microseconds of the thread in each call, waits
excluded since another thread has them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from machine import describe
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore
from kvstore.clock import SystemClock
from kvstore.connectors.common import CacheClient, ConnectorCounters
from kvstore.connectors.vllm.scheduler import SchedulerParts, SchedulerSide
from kvstore.connectors.vllm.settings import VllmSettings
from kvstore.connectors.vllm.soundness import Soundness
from kvstore.demo.processes import start_sidecar
from kvstore.types import KvLayout, Namespace

MIB = 1 << 20
VOCABULARY, BLOCK_TOKENS = 4096, 32
REPOSITORY = Path(__file__).parents[1]
BATCH, BATCH_TOKENS = 4, 8
WARM_UP = 3
SCHEDULER_TOKENS = (1024, 8192, 32768)
SCHEDULER_ROUNDS = 40
PATIENT = {"lookup_seconds": 5.0, "bulk_seconds": 20.0}


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class EngineProcess:
    """An engine that answers commands; see vllm_engine.py."""

    def __init__(self, python: Path, model: Path, prompt_tokens: int, settings: dict[str, Any] | None) -> None:
        options: dict[str, Any] = {"model": str(model), "block_size": BLOCK_TOKENS, "max_model_len": prompt_tokens + 64}
        if settings is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KvstoreConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": settings,
            }
        log = model / f"engine-{time.monotonic_ns()}.log"
        with log.open("wb") as opened:
            self._process = subprocess.Popen(
                [python, "-P", Path(__file__).with_name("vllm_engine.py"), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=opened,
                cwd=model,
                text=True,
            )
        self._log = log
        self._answer()

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine ended: {self._log.read_text(errors='replace')[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Prompts:
    """Random prompts, none of which comes twice."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def new(self, tokens: int) -> list[int]:
        return self._random.choices(range(3, VOCABULARY), k=tokens)


def median(took: list[dict[str, Any]], name: str) -> float:
    return statistics.median(one[name] for one in took)


def paired(found: list[dict[str, Any]], base: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Median and quartiles of the ratios of two engines in the same round."""
    ratios = [one[name] / other[name] for one, other in zip(found, base, strict=True)]
    lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": round(middle, 4), "lower": round(lower, 4), "upper": round(upper, 4)}


def compare(case: str, took: dict[str, list[dict[str, Any]]], base: str) -> list[dict[str, Any]]:
    """A row for each engine: medians, and their ratios to those of `base`."""
    return [
        {
            "case": case,
            "engine": name,
            "rounds": len(found),
            "wall_ms": round(1e3 * median(found, "seconds"), 2),
            "cpu_ms": round(1e3 * median(found, "cpu_seconds"), 2),
            "wall_ratio": round(median(found, "seconds") / median(took[base], "seconds"), 4),
            "cpu_ratio": round(median(found, "cpu_seconds") / median(took[base], "cpu_seconds"), 4),
            "paired_wall": paired(found, took[base], "seconds"),
            "paired_cpu": paired(found, took[base], "cpu_seconds"),
        }
        for name, found in took.items()
    ]


def in_turns(
    engines: dict[str, EngineProcess],
    rounds: int,
    command: Any,  # noqa: ANN401  # a call of any command
) -> dict[str, list[dict[str, Any]]]:
    """What a command took each engine, in a different order each round, without those that warm up."""
    took: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    names = list(engines)
    for turn in range(rounds + WARM_UP):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            answer = command(engines[name])
            if turn >= WARM_UP:
                took[name].append(answer)
    return took


def measure_hits(engine: EngineProcess, prompts: Prompts, rounds: int, tokens: int) -> dict[str, list[dict[str, Any]]]:
    took: dict[str, list[dict[str, Any]]] = {"cold": [], "hit": []}
    for turn in range(rounds + WARM_UP):
        prompt = prompts.new(tokens)
        cold = engine.ask("first", prompt=prompt)
        engine.ask("stored")
        engine.ask("reset")
        hit = engine.ask("first", prompt=prompt)
        if hit["cached"] == 0:
            raise RuntimeError("a prompt that was stored was not found")
        if turn >= WARM_UP:
            took["cold"].append(cold)
            took["hit"].append(hit)
    return took


def measure_engines(python: Path, rounds: int, tokens: int) -> list[dict[str, Any]]:
    prompts = Prompts()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_model(folder)
        address = f"unix://{folder}/kv.sock"
        sidecar = stack.enter_context(start_sidecar(folder, address, 512 * MIB, 0))
        sidecar.receive()
        settings: dict[str, dict[str, Any] | None] = {
            "plain": None,
            "gone": {"address": f"unix://{folder}/nobody"},
            "live": {"address": address} | PATIENT,
        }
        engines = {}
        for name, given in settings.items():
            engines[name] = EngineProcess(python, folder, tokens, given)
            stack.callback(engines[name].close)
        first = in_turns(engines, rounds, lambda engine: engine.ask("first", prompt=prompts.new(tokens)))
        rows = compare("first token", first, "plain")
        engines["live"].ask("hooks")
        pair = {name: engines[name] for name in ("plain", "live")}
        batch = partial(_batch, prompts, tokens)
        rows += compare("throughput without reuse", in_turns(pair, rounds, batch), "plain")
        rows.append(_hooks_row(engines["live"].ask("hooks"), tokens))
        rows += compare("hit", measure_hits(engines["live"], prompts, rounds, tokens), "cold")
    return rows


def _batch(prompts: Prompts, tokens: int, engine: EngineProcess) -> dict[str, Any]:
    return engine.ask("many", prompts=[prompts.new(tokens) for _ in range(BATCH)], max_tokens=BATCH_TOKENS)


def _hooks_row(hooks: dict[str, Any], tokens: int) -> dict[str, Any]:
    """CPU microseconds of vLLM's scheduling thread in the hooks, for each request of a workload without reuse."""
    requests = hooks["calls"]["on_new_request"]
    calls = hooks["calls"]
    spent = {name: max(0.0, us - calls[name] * hooks["floor_us"]) for name, us in hooks["us"].items()}
    asks = "get_num_new_matched_tokens"
    return {
        "case": "hooks",
        "engine": "live",
        "prompt_tokens": tokens,
        "requests": requests,
        "asks_per_request": round(calls[asks] / requests, 1),
        "floor_us": round(hooks["floor_us"], 2),
        "us_per_ask": round(spent[asks] / calls[asks], 1),
        "us_per_request": {name: round(us / requests, 1) for name, us in spent.items() if us},
    }


@dataclass
class Request:
    """What the connector reads of vLLM's requests."""

    request_id: str
    prompt_token_ids: list[int]
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    cache_salt: str | None = None
    sampling_params: object = None
    pooling_params: object = None
    prompt_embeds: object = None
    lora_request: object = None
    mm_features: tuple[object, ...] = ()
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    all_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids = self.prompt_token_ids
        self.num_tokens = self.num_prompt_tokens = len(self.prompt_token_ids)


def measure_scheduler(tokens: int) -> dict[str, Any]:
    """CPU microseconds of the scheduling thread in each call about a request that finds nothing, and one that hits."""
    layout = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=16, engine="vllm")
    namespace = Namespace(model="m", revision="r", layout=layout)
    prompts = Prompts()
    shared = prompts.new(tokens)
    took: dict[str, list[dict[str, float]]] = {"miss": [], "hit": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sidecar = stack.enter_context(start_sidecar(folder, f"unix://{folder}/s", 256 * MIB, 0))
        sidecar.receive()
        client = stack.enter_context(kvstore.connect(f"unix://{folder}/s", lookup_seconds=10.0))
        with client.stage(namespace, shared) as stage:
            stage.write_from(bytes(stage.blocks * layout.block_bytes))
        counters = ConnectorCounters()
        parts = SchedulerParts(
            CacheClient(client, counters), counters, SystemClock(), VllmSettings(**PATIENT), layout, lambda _: namespace
        )
        side = SchedulerSide(parts, lambda: "r")
        stack.callback(side.close)
        side.wait_started(30)
        side.workers_are(Soundness.SOUND)
        # Made before, so that making them does not take the caches away from what is measured.
        cases = [("miss", prompts.new(tokens)) if turn % 2 else ("hit", shared) for turn in range(2 * SCHEDULER_ROUNDS)]
        for turn, (case, prompt) in enumerate(cases):
            took[case].append(_one_request(side, Request(f"{case} {turn}", prompt)))
    calls = ("add", "ask", "answer", "allocated", "scheduled", "finished")
    return {
        "case": "scheduler",
        "prompt_tokens": tokens,
        "wake_floor_us": round(statistics.median(_wake_floor() for _ in range(SCHEDULER_ROUNDS)), 1),
        **{
            f"{case}_us": {call: round(statistics.median(one[call] for one in found), 1) for call in calls}
            for case, found in took.items()
        },
        **{
            f"{case}_lookup_us": round(statistics.median(one["add"] + one["ask"] + one["answer"] for one in found), 1)
            for case, found in took.items()
        },
    }


def _wake_floor() -> float:
    """CPU microseconds of handing nothing to a thread that waits for it, which every lookup has in it."""
    handed: SimpleQueue[None] = SimpleQueue()
    thread = threading.Thread(target=handed.get)
    thread.start()
    time.sleep(0.001)
    start = time.thread_time_ns()
    handed.put(None)
    spent = time.thread_time_ns() - start
    thread.join()
    return spent / 1e3


def _one_request(side: SchedulerSide, request: Request) -> dict[str, float]:
    spent: dict[str, float] = {}

    def timed(name: str, call: Any) -> Any:  # noqa: ANN401
        start = time.thread_time_ns()
        answer = call()
        spent[name] = (time.thread_time_ns() - start) / 1e3
        return answer

    blocks = list(range(request.num_tokens // 16))
    timed("add", lambda: side.add(request))
    timed("ask", lambda: side.matched_tokens(request, 0))
    found: tuple[int | None, bool] = (None, False)
    while found[0] is None:
        time.sleep(0.001)
        found = timed("answer", lambda: side.matched_tokens(request, 0))
    timed("allocated", lambda: side.allocated(request, (blocks,), found[0] or 0))
    timed("scheduled", lambda: side.scheduled(request.request_id, request.num_tokens, lambda: (blocks,)))
    side.worker_said(set(), {request.request_id}, set())
    request.num_computed_tokens = request.num_tokens
    timed("finished", lambda: side.finished(request, (blocks,)))
    side.take_plan()
    side.worker_said({request.request_id}, set(), set())
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, default=REPOSITORY / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    rows = [measure_scheduler(tokens) for tokens in SCHEDULER_TOKENS]
    rows += measure_engines(arguments.vllm, arguments.rounds, arguments.prompt_tokens)
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if arguments.json:
        command = f"python bench/bench_vllm.py --rounds {arguments.rounds} --prompt-tokens {arguments.prompt_tokens}"
        result = {"command": command, "machine": describe(), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
