"""The secondary tier by vLLM's own factory, in vLLM's own environment: `python vllm_tier.py ADDRESS`, a command a line.

store   rows, numbers   -> puts random bytes of those numbers into rows and stores them
load    rows, numbers   -> loads them into rows; which of them are right
lookup  numbers         -> what each lookup answers in the end
unsettled               -> a tier whose settings cannot be: what its hooks answer
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from types import SimpleNamespace

import numpy as np

ROWS, ROW_BYTES = 8, 4096
WAIT_SECONDS = 60.0


def content(number):
    return np.random.default_rng(number).integers(-128, 128, ROW_BYTES, dtype=np.int8)


class Harness:
    """A tier over memory of its own, called as vLLM's tiering manager does."""

    def __init__(self, **settings):
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        self.rows = np.zeros((ROWS, ROW_BYTES), dtype=np.int8)
        where = {"type": "KvstoreTier", "module_path": "kvstore.connectors.vllm.tier", "locality": "LOCAL"}
        pressure = {"backpressure": {"backpressure_cls": "EMABackpressureDetector"}}
        self.tier = SecondaryTierFactory.create_secondary_tier(where | pressure | settings, memoryview(self.rows), None)
        self.request = ReqContext("r")
        self.jobs = itertools.count(1)
        self.tier.on_new_request(self.request)
        if self.tier._chunks is not None:
            self.tier._chunks.wait_checked(WAIT_SECONDS)

    def key(self, number):
        from vllm.v1.kv_offload.base import make_offload_key

        return make_offload_key(number.to_bytes(32, "big"), 0)

    def run(self, submit, rows, numbers):
        from vllm.v1.kv_offload.tiering.base import TransferJob

        job_id = next(self.jobs)
        keys = [self.key(number) for number in numbers]
        submit(TransferJob(job_id, keys, np.array(rows), submit == self.tier.submit_load, self.request))
        ends_at = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < ends_at:
            for result in self.tier.get_finished_jobs():
                assert result.job_id == job_id
                return {"success": result.success, "keys": len(result.successful_keys or ())}
            time.sleep(0.001)
        raise TimeoutError("the job does not end")

    def store(self, rows, numbers):
        for row, number in zip(rows, numbers, strict=True):
            self.rows[row] = content(number)
        return self.run(self.tier.submit_store, rows, numbers)

    def load(self, rows, numbers):
        ended = self.run(self.tier.submit_load, rows, numbers)
        right = [bool((self.rows[row] == content(number)).all()) for row, number in zip(rows, numbers, strict=True)]
        return ended | {"right": right}

    def lookup(self, numbers):
        ends_at = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < ends_at:
            found = [self.tier.lookup(self.key(number), self.request).name for number in numbers]
            self.tier.on_schedule_end(None)
            if "RETRY" not in found:
                return {"found": found}
            time.sleep(0.001)
        raise TimeoutError("the lookup does not end")

    def forget(self):
        """The request ends, and another begins."""
        self.tier.on_request_finished(self.request)
        return {"busy": self.tier.has_pending_work()}

    def unsettled(self):
        off = Harness(adress="unix:///nowhere")
        return {"found": off.lookup([1])["found"], "store": off.store([0], [1]), "load": off.load([1], [1])["success"]}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    harness = Harness(address=sys.argv[1], model="m", revision="r", lookup_seconds=10.0, bulk_seconds=10.0)
    facts = SimpleNamespace(source=harness.tier.cache_hit_source.name, bytes=harness.tier.block_size_bytes)
    print(json.dumps(vars(facts)), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(harness, command.pop("do"))(**command)), file=answers, flush=True)
    harness.tier.drain_jobs()
    harness.tier.shutdown()


if __name__ == "__main__":
    main()
