"""What a stored state is worth to llama.cpp, and what it costs: the time to the first token cold, and from a state.

    python bench/bench_llama_cpp.py --model FILE.gguf [--prompt-tokens N] [--rounds N] [--json FILE]

For a Python that has llama-cpp-python (`make engine-llama-cpp`). Each round asks one new prompt cold, without the
connector, with it, and with a server that was never there (`absent`), in an order of its own, and again when the engine
has forgotten it: from a store in this process and from a sidecar. Medians, of wall time and of the calling thread's CPU
seconds. `added` is what a cold prompt took over the one without the connector of the same round, in percent, median
and quartiles; `control` is a second one without the connector, whose spread is what the machine adds by itself.
`connector` is the time inside the connector before a cold prompt, measured there: what it adds for sure. The engine has
one thread. `own_cache` is what the engine does behind an answer for a cache of its own kind (`set_cache`),
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
from functools import partial
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
    """Also the CPU time of all other threads of this process meanwhile, which is the connector's and the store's."""
    began, cpu, process = time.perf_counter(), time.thread_time(), time.process_time()
    function()
    wall, cpu, process = time.perf_counter() - began, time.thread_time() - cpu, time.process_time() - process
    return {"wall_ms": 1e3 * wall, "cpu_ms": 1e3 * cpu, "others_cpu_ms": 1e3 * (process - cpu)}


def first_token(llm: Llama, prompt: list[int]) -> dict[str, float]:
    """Of a prompt that the engine does not hold."""
    llm.reset()
    with closing(llm.generate(prompt, temp=0.0)) as answer:
        return took(lambda: next(answer))


def ask_absent(llm: Llama, prompt: list[int], address: str) -> dict[str, dict[str, float]]:
    """Cold where no server was ever there, with the settings that one has by default."""
    cached(llm, address)
    try:
        return {"absent_connector": in_connector(llm, prompt), "absent": first_token(llm, prompt)}
    finally:
        uncache(llm)


def in_connector(llm: Llama, prompt: list[int]) -> dict[str, float]:
    """What stands before a prompt that nothing is stored of, without the prompt itself."""
    other = [*prompt[1:], prompt[0]]
    llm.reset()
    return took(lambda: connector_of(llm).restore(other))


def ask_both(llm: Llama, prompt: list[int], store: KvStore) -> dict[str, dict[str, float]]:
    """Cold through the connector, which stores it, and again from what is stored."""
    cached(llm, store, PATIENT)
    try:
        found = {"connector": in_connector(llm, prompt), "cold": first_token(llm, prompt)}
        assert connector_of(llm).flush()
        found["hit"] = first_token(llm, prompt)
        stats = connector_of(llm).stats()
        assert (stats.loaded_tokens, stats.failures, stats.bypassed) == (len(prompt) - 1, {}, {}), stats
        return found
    finally:
        uncache(llm)


def ask_round(
    llm: Llama, prompt: list[int], stores: dict[str, KvStore], absent: str, order: random.Random
) -> dict[str, dict[str, float]]:
    def ask_store(name: str) -> dict[str, dict[str, float]]:
        return {f"{name}_{kind}": times for kind, times in ask_both(llm, prompt, stores[name]).items()}

    cases: list[Callable[[], dict[str, dict[str, float]]]] = [
        lambda: {"without": first_token(llm, prompt)},
        lambda: {"control": first_token(llm, prompt)},
        lambda: ask_absent(llm, prompt, absent),
        *(partial(ask_store, name) for name in stores),
    ]
    found: dict[str, dict[str, float]] = {}
    for ask in order.sample(cases, len(cases)):
        found |= ask()
    return found | copies(llm)


def copies(llm: Llama) -> dict[str, dict[str, float]]:
    """Of the state that the engine holds now."""
    sequence = ContextSequence(llm)
    blob = sequence.save()
    assert blob is not None
    state = LoadedState(blob, llm.n_tokens, llm.n_tokens)
    held = sequence.tokens
    return {
        "save": took(sequence.save),
        "restore": took(lambda: sequence.restore(state, held)),
        "own_cache": took(llm.save_state),
    }


def added(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Percent over `without` of the same round: the lower quartile, the median, the upper quartile."""
    return {
        case: {
            unit: [
                round(100 * (cut - 1), 2)
                for cut in statistics.quantiles([one[case][unit] / one["without"][unit] for one in rounds], n=4)
            ]
            for unit in ("wall_ms", "cpu_ms")
        }
        for case in ("control", "absent", "embedded_cold", "sidecar_cold")
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
                rounds.append(ask_round(llm, prompt, stores, f"unix://{folder}/absent.sock", random.Random(-number)))
            state_bytes = ContextSequence(llm).state_bytes
    medians = {
        case: {unit: round(statistics.median(one[case][unit] for one in rounds), 2) for unit in rounds[0][case]}
        for case in rounds[0]
    }
    sizes = {"prompt_tokens": tokens, "rounds": len(rounds), "state_bytes": state_bytes}
    return sizes | {"medians": medians, "added_percent": added(rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE", required=True, help="a GGUF file")
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=1024)
    parser.add_argument("--rounds", metavar="N", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    result = {"model": Path(arguments.model).name, "llama_cpp_python": llama_cpp.__version__} | measure(arguments)
    for case, times in result["medians"].items():
        cpu = f"{times['cpu_ms']:>10.1f} ms of CPU, {times['others_cpu_ms']:.1f} in other threads"
        print(f"{case:<18} {times['wall_ms']:>10.1f} ms  {cpu}")
    for case, shares in result["added_percent"].items():
        print(
            f"{case:<14} adds {shares['wall_ms'][1]:>6.2f} %  {shares['cpu_ms'][1]:>6.2f} % of CPU  {shares['cpu_ms']}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe()} | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
