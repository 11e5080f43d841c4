"""What a stored state is worth to llama.cpp, and what it costs: the time to the first token cold, and from a state.

    python bench/bench_llama_cpp.py --model FILE.gguf [--prompt-tokens N] [--rounds N] [--json FILE]

For a Python that has llama-cpp-python (`make engine-llama-cpp`). Each round asks one new prompt cold, without
the connector and with it, then again when the engine has forgotten it: from a store in this process and from a sidecar.
Medians, of wall time and of the calling thread's CPU seconds, which others on the machine disturb least. The
engine has one thread. `own_cache` is what the engine does behind an answer for a cache of its own kind (`set_cache`),
`save` and `restore` are the copies of a state out of the context and into it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
from llama_cpp import Llama
from machine import describe

import kvstore
from kvstore.connectors.llama_cpp import Settings, cached, connector_of, uncache
from kvstore.connectors.llama_cpp_cache import Limits
from kvstore.connectors.llama_cpp_context import ContextSequence
from kvstore.connectors.llama_cpp_states import LoadedState
from kvstore.demo.processes import start_sidecar

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.api import KvStore

MIB = 1 << 20
PATIENT = Settings(limits=Limits(lookup_seconds=60.0, load_seconds=60.0))


def took(function: Callable[[], Any]) -> dict[str, float]:
    began, cpu = time.perf_counter(), time.thread_time()
    function()
    return {"wall_ms": 1e3 * (time.perf_counter() - began), "cpu_ms": 1e3 * (time.thread_time() - cpu)}


def first_token(llm: Llama, prompt: list[int]) -> dict[str, float]:
    """Of a prompt that the engine does not hold."""
    llm.reset()
    with closing(llm.generate(prompt, temp=0.0)) as answer:
        return took(lambda: next(answer))


def ask_both(llm: Llama, prompt: list[int], store: KvStore) -> dict[str, dict[str, float]]:
    """Cold through the connector, which stores it, and again from what is stored."""
    cached(llm, store, PATIENT)
    try:
        found = {"cold": first_token(llm, prompt)}
        assert connector_of(llm).flush()
        found["hit"] = first_token(llm, prompt)
        stats = connector_of(llm).stats()
        assert (stats.loaded_tokens, stats.failures, stats.bypassed) == (len(prompt) - 1, {}, {}), stats
        return found
    finally:
        uncache(llm)


def ask_round(llm: Llama, prompt: list[int], stores: dict[str, KvStore]) -> dict[str, dict[str, float]]:
    found = {"without": first_token(llm, prompt)}
    for name, store in stores.items():
        found |= {f"{name}_{kind}": times for kind, times in ask_both(llm, prompt, store).items()}
    sequence = ContextSequence(llm)
    blob = sequence.save()
    assert blob is not None
    state = LoadedState(blob, llm.n_tokens, llm.n_tokens)
    held = sequence.tokens
    return found | {
        "save": took(sequence.save),
        "restore": took(lambda: sequence.restore(state, held)),
        "own_cache": took(llm.save_state),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = arguments.prompt_tokens
    llm = Llama(arguments.model, n_ctx=tokens + 64, n_threads=1, n_threads_batch=1, verbose=False, seed=1, n_batch=512)
    rounds = []
    with tempfile.TemporaryDirectory() as folder, kvstore.open(None, host_bytes=512 * MIB) as embedded:
        address = f"unix://{folder}/kv.sock"
        with start_sidecar(Path(folder), address, 512 * MIB, 512 * MIB) as sidecar:
            sidecar.receive()
            stores = {"embedded": embedded, "sidecar": kvstore.connect(address, lookup_seconds=60.0, bulk_seconds=60.0)}
            first_token(llm, [1, 2, 3])
            for number in range(arguments.rounds):
                prompt = random.Random(number).choices(range(100, 40_000), k=tokens)
                rounds.append(ask_round(llm, prompt, stores))
            state_bytes = ContextSequence(llm).state_bytes
    medians = {
        case: {unit: round(statistics.median(one[case][unit] for one in rounds), 2) for unit in rounds[0][case]}
        for case in rounds[0]
    }
    return {"prompt_tokens": tokens, "rounds": len(rounds), "state_bytes": state_bytes, "medians": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE", required=True, help="a GGUF file")
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=1024)
    parser.add_argument("--rounds", metavar="N", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    result = {"model": Path(arguments.model).name, "llama_cpp_python": llama_cpp.__version__} | measure(arguments)
    for case, times in result["medians"].items():
        print(f"{case:<14} {times['wall_ms']:>10.1f} ms  {times['cpu_ms']:>10.1f} ms of CPU")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe()} | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
