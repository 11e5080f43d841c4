"""One vLLM engine for bench_vllm.py, as a process: `python vllm_engine.py OPTIONS`, commands and answers as JSON lines.

first   prompt                -> seconds to the first token, and CPU seconds of the process in them
many    prompts, max_tokens   -> the same of all of them together
reset                         -> forget the engine's own prefix cache
stored                        -> wait until all that was copied out has been sent
hooks                         -> CPU microseconds of the scheduling thread in the connector's hooks since the last call,
                                 and what measuring one call of nothing takes
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so its CPU time is the engine's
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "KMP_BLOCKTIME": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
# What vLLM's scheduler calls of a connector.
HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_block_frees",
)


class Engine:
    """A vLLM engine, and what the hooks of its connector took."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(enforce_eager=True, dtype="float32", seed=0, skip_tokenizer_init=True, **options)
        self.spent: Counter[str] = Counter()
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        if self.scheduler.connector is not None:
            for name in HOOKS:
                self.watch(name)

    def watch(self, name: str) -> None:
        hook = getattr(self.scheduler.connector, name)

        def timed(*given: Any, **named: Any) -> Any:  # noqa: ANN401  # whatever the hook takes
            start = time.thread_time_ns()
            try:
                return hook(*given, **named)
            finally:
                self.spent[name] += time.thread_time_ns() - start
                self.spent[f"{name} calls"] += 1

        setattr(self.scheduler.connector, name, timed)

    def many(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        took = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        return took | {"cached": sum(output.num_cached_tokens for output in outputs)}

    def first(self, prompt: list[int]) -> dict[str, Any]:
        return self.many([prompt], 1)

    def reset(self) -> dict[str, Any]:
        return {"reset": self.llm.reset_prefix_cache()}

    def stored(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker  # noqa: SLF001  # no user waits for stores, so nothing public does
        if worker is not None:
            worker._store_thread.submit(lambda: None).result(60)  # noqa: SLF001
        return {}

    def hooks(self) -> dict[str, Any]:
        spent, self.spent = self.spent, Counter()
        calls = {name: spent[f"{name} calls"] for name in HOOKS}
        return {"us": {name: spent[name] / 1e3 for name in HOOKS}, "calls": calls, "floor_us": self.floor() / 1e3}

    @staticmethod
    def floor() -> float:
        """Nanoseconds that two looks at the thread's clock are apart with nothing between them."""
        took = []
        for _ in range(1000):
            start = time.thread_time_ns()
            took.append(time.thread_time_ns() - start)
        return statistics.median(took)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(engine, command.pop("do"))(**command)), file=answers, flush=True)


if __name__ == "__main__":
    main()
