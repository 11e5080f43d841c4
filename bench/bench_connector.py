"""What the transformers connector costs a model that it cannot help: time to the first token with it over without.

    python bench/bench_connector.py [--pairs N] [--prompt-tokens N] [--json FILE]

Pairs of calls, one of transformers alone and one through the connector, in turn which of them is first. `ratio` is that
of the medians. `added_ms` is the median of what a call through the connector spends outside the generate() of
transformers, `added_cpu_ms` the calling thread's CPU seconds of it and `added_cpu_ratio` these over those of
transformers: what others on the machine disturb least. No prompt comes twice. Cases: a sidecar that was never there;
one that is killed after the model was attached; a store that works and finds nothing, so that each prompt is also
copied to be stored. The model is a random Llama; torch has one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from machine import describe
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore
from kvstore.connectors.huggingface import cached, connector_of, uncache
from kvstore.demo.processes import start_sidecar

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
VOCABULARY = 4096


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of a call, and those in which its thread had a processor."""

    wall: float
    cpu: float


class Stopwatch:
    """Both clocks since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def read(self) -> Took:
        return Took(time.perf_counter() - self._wall, time.thread_time() - self._cpu)


class TimedGenerate:
    """generate() of transformers, which notes how long its last call took."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self.took = Took(0.0, 0.0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        watch = Stopwatch()
        result = type(self._model).generate(self._model, *args, **kwargs)
        self.took = watch.read()
        return result


def measure(model: LlamaForCausalLM, timed: TimedGenerate, pairs: int, prompt_tokens: int) -> dict[str, Any]:
    """Times to the first token of transformers alone and through the connector, on prompts that never came before."""
    calls: dict[str, Callable[..., Any]] = {"plain": timed, "cached": model.generate}
    took: dict[str, list[Took]] = {"plain": [], "cached": []}
    added: list[Took] = []
    seeds = count(1)
    for pair in range(pairs + 2):
        for name in sorted(calls, reverse=bool(pair % 2)):
            generator = torch.Generator().manual_seed(next(seeds))
            ids = torch.randint(VOCABULARY, (1, prompt_tokens), generator=generator)
            watch = Stopwatch()
            calls[name](ids, max_new_tokens=1, do_sample=False)
            whole = watch.read()
            connector_of(model).flush()
            if pair >= 2:  # the first calls warm up
                took[name].append(whole)
                if name == "cached":
                    added.append(Took(whole.wall - timed.took.wall, whole.cpu - timed.took.cpu))
    stats = connector_of(model).stats()
    plain, through = (statistics.median(call.wall for call in took[name]) for name in ("plain", "cached"))
    plain_cpu = statistics.median(call.cpu for call in took["plain"])
    added_cpu = statistics.median(call.cpu for call in added)
    return {
        "plain_ms": round(1e3 * plain, 2),
        "cached_ms": round(1e3 * through, 2),
        "ratio": round(through / plain, 4),
        "added_ms": round(1e3 * statistics.median(call.wall for call in added), 3),
        "plain_cpu_ms": round(1e3 * plain_cpu, 2),
        "added_cpu_ms": round(1e3 * added_cpu, 3),
        "added_cpu_ratio": round(added_cpu / plain_cpu, 4),
        "loaded_tokens": stats.loaded_tokens,
        "stored_blocks": stats.stored_blocks,
        "bypassed": dict(stats.bypassed),
        "failures": dict(stats.failures),
    }


def run_case(case: str, pairs: int, prompt_tokens: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = f"unix://{folder}/kv.sock"
        store: Any = address
        sidecar = None
        if case == "killed":
            sidecar = stack.enter_context(start_sidecar(folder, address, 64 * MIB, 0))
            sidecar.receive()
        elif case == "no reuse":
            store = stack.enter_context(kvstore.open(None, host_bytes=512 * MIB))
        model = new_model()
        timed = model.__dict__["generate"] = TimedGenerate(model)
        cached(model, store)
        stack.callback(uncache, model)
        if sidecar is not None:
            sidecar.kill()
        return {"case": case, **measure(model, timed, pairs, prompt_tokens)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in ("unreachable", "killed", "no reuse"):
        rows.append(run_case(case, arguments.pairs, arguments.prompt_tokens))
        print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if arguments.json:
        command = f"python bench/bench_connector.py --pairs {arguments.pairs} --prompt-tokens {arguments.prompt_tokens}"
        result = {"command": command, "machine": describe(), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
