"""One vLLM engine as a process: `python vllm_process.py OPTIONS`, with options and commands as JSON, an answer a line.

generate   prompts (token ids), max_tokens, salts   -> tokens and cached tokens of each
abort      prompt, steps, pace                      -> takes that many steps, aborts, and steps until all is quiet;
           a "patient" pace waits before each step for what the connector has begun
reset      the engine's own cache, and the connector's if `connector` is true
limit      how many blocks of each load arrive; null for all
held       prompts, salts                           -> how many leading tokens of each are in the engine's own cache
counts     what the connector has counted, what is held and leased, and the engine's free blocks
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time

QUIET_SECONDS = 60.0

# One process: no spawned worker, and the scheduler can be looked at.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "KMP_BLOCKTIME": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


class LimitedLease:
    """A lease whose blocks from some number on cannot be loaded."""

    def __init__(self, lease, blocks):
        self.lease = lease
        self.blocks = blocks

    def load_into(self, rows, *, from_block, part):
        result = self.lease.load_into(rows, from_block=from_block, part=part)
        return dataclasses.replace(result, blocks=max(0, min(result.blocks, self.blocks - from_block)))


class Engine:
    """A vLLM engine with its scheduler at hand."""

    def __init__(self, options):
        from vllm import LLM

        self.llm = LLM(**{"enforce_eager": True, "dtype": "float32", "seed": 0, "disable_log_stats": False} | options)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.ids = itertools.count()

    def params(self, max_tokens):
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def generate(self, prompts, max_tokens, salts=None):
        salts = salts or [None] * len(prompts)
        asked = [
            {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
            for prompt, salt in zip(prompts, salts, strict=True)
        ]
        outputs = self.llm.generate(asked, self.params(max_tokens), use_tqdm=False)
        self.settle()
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "reasons": [output.outputs[0].finish_reason for output in outputs],
        }

    def abort(self, prompt, steps, pace, max_tokens=64):
        request_id = f"aborted-{next(self.ids)}"
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, self.params(max_tokens))
        finished = False
        for _ in range(steps):
            if pace == "patient":
                self.wait_begun()
            finished = finished or any(output.finished for output in self.engine.step())
        self.engine.abort_request([request_id])
        self.settle()
        return self.counts() | {"finished": finished}

    def wait_begun(self):
        """Until lookups have their answers, and loads have ended, though nobody has asked for them yet."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        lookups = [tracked.lookup for tracked in self.connector._tracked.values() if tracked.lookup is not None]
        loads = set(self.connector._loads) - {job.request_id for job in self.connector._plan.loads}
        outcomes = get_kv_transfer_group()._worker._outcomes
        ends_at = time.monotonic() + QUIET_SECONDS
        while not all(lookup.settled for lookup in lookups) or not loads <= outcomes.loaded:
            if time.monotonic() > ends_at:
                raise TimeoutError(f"the connector does not end what it began: {self.counts()}")
            time.sleep(0.001)

    def settle(self):
        """Step until the scheduler has nothing to do, and the connector has ended what it began."""
        ends_at = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < ends_at:
            if self.scheduler.has_requests():
                self.engine.step()
            elif self.connector is None or not self.connector.leased_requests:
                return
            else:
                time.sleep(0.001)
        raise TimeoutError(f"the engine is not quiet: {self.counts()}")

    def limit(self, blocks):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        client = get_kv_transfer_group()._worker._parts.client
        client.__dict__.pop("load_leased", None)
        if blocks is not None:
            whole = client.load_leased
            client.load_leased = lambda match, load: whole(match, lambda lease: load(LimitedLease(lease, blocks)))
        return {}

    def reset(self, connector=False):
        return {"reset": self.llm.reset_prefix_cache(reset_connector=connector)}

    def held(self, prompts, salts):
        from vllm.v1.request import Request

        pool = self.scheduler.kv_cache_manager.block_pool
        tokens = []
        for number, (prompt, salt) in enumerate(zip(prompts, salts, strict=True)):
            hasher = self.core.request_block_hasher
            request = Request(f"held-{number}", prompt, self.params(1), None, cache_salt=salt, block_hasher=hasher)
            known = [pool.get_cached_block(block_hash, [0]) is not None for block_hash in request.block_hashes]
            tokens.append([*known, False].index(False) * pool.hash_block_size)
        return {"tokens": tokens}

    @property
    def connector(self):
        return None if self.scheduler.connector is None else self.scheduler.connector._scheduler

    def counts(self):
        pool = self.scheduler.kv_cache_manager.block_pool
        free = {"free_blocks": pool.get_num_free_blocks(), "blocks": pool.num_gpu_blocks}
        free["preemptions"] = sum(
            metric.value for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions"
        )
        if self.scheduler.connector is None:
            return free
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        halves = (self.scheduler.connector, get_kv_transfer_group())
        scheduler, worker = (half._counters.snapshot(0) for half in halves)
        held = 0 if self.connector is None else self.connector.held_requests
        leased = 0 if self.connector is None else self.connector.leased_requests
        return free | {
            "held": held,
            "leased": leased,
            "lookups": scheduler.lookups,
            "matched_tokens": scheduler.matched_tokens,
            "bypassed": scheduler.bypassed,
            "failures": scheduler.failures | worker.failures,
            "loaded_tokens": worker.loaded_tokens,
            "stored_blocks": worker.stored_blocks,
            "present_blocks": worker.present_blocks,
            "dropped_blocks": worker.dropped_blocks,
        }

    def wait_stored(self):
        """Until all that was copied out has been sent."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group()._worker._store_thread.submit(lambda: None).result(QUIET_SECONDS)
        return self.counts()


def main():
    # Whatever else writes to stdout, the engine's own processes among them, writes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    if options.get("tensor_parallel_size", 1) > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    engine = Engine(options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(engine, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
