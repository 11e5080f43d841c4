"""What the transformers connector costs a model that it cannot help: time to the first token with it over without.

    python bench/bench_connector.py [--pairs N] [--prompt-tokens N] [--json FILE]

Pairs of calls, one of transformers alone and one through the connector, in turn which of them is first. `added_ms` is
the median of what a call through the connector spends outside the generate() of transformers, `added_ratio` that over
`plain_ms`: what others on the machine disturb least. `ratio` is that of the medians of whole calls, `cpu_ratio` that
of CPU seconds, stores in the background included. No prompt comes twice. Cases: a sidecar that was never there; one
that is killed after the model was attached; a store that works and finds nothing, so that each prompt is also copied
to be stored. The model is a random Llama; torch has one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
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
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


class TimedGenerate:
    """generate() of transformers, which notes how long its last call took."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        result = type(self._model).generate(self._model, *args, **kwargs)
        self.seconds = time.perf_counter() - began
        return result


def measure(model: LlamaForCausalLM, timed: TimedGenerate, pairs: int, prompt_tokens: int) -> dict[str, Any]:
    """Seconds to the first token of transformers alone and through the connector, on prompts that never came before."""
    seconds: dict[str, list[float]] = {"plain": [], "cached": []}
    cpu_seconds: dict[str, list[float]] = {"plain": [], "cached": []}
    calls: dict[str, Callable[..., Any]] = {
        "plain": lambda ids: timed(ids, max_new_tokens=1, do_sample=False),
        "cached": lambda ids: model.generate(ids, max_new_tokens=1, do_sample=False),
    }
    added: list[float] = []
    seeds = count(1)
    for pair in range(pairs + 2):
        for name in sorted(calls, reverse=bool(pair % 2)):
            generator = torch.Generator().manual_seed(next(seeds))
            ids = torch.randint(VOCABULARY, (1, prompt_tokens), generator=generator)
            began, began_cpu = time.perf_counter(), time.process_time()
            calls[name](ids)
            took = time.perf_counter() - began
            connector_of(model).flush()
            took_cpu = time.process_time() - began_cpu
            if pair >= 2:  # the first calls warm up
                seconds[name].append(took)
                cpu_seconds[name].append(took_cpu)
                if name == "cached":
                    added.append(took - timed.seconds)
    plain, through = (statistics.median(seconds[name]) for name in ("plain", "cached"))
    plain_cpu, through_cpu = (statistics.median(cpu_seconds[name]) for name in ("plain", "cached"))
    stats = connector_of(model).stats()
    return {
        "plain_ms": round(1e3 * plain, 2),
        "cached_ms": round(1e3 * through, 2),
        "added_ms": round(1e3 * statistics.median(added), 3),
        "added_ratio": round(statistics.median(added) / plain, 4),
        "ratio": round(through / plain, 4),
        "cpu_ratio": round(through_cpu / plain_cpu, 4),
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
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--prompt-tokens", type=int, default=256)
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
