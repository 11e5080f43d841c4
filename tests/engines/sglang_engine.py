"""Starts sglang_process.py in the venv of SGLang, and talks to it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

ANSWER_SECONDS_MAX = 900.0
BACKEND = {
    "backend_name": "kvstore",
    "module_path": "kvstore.connectors.sglang",
    "class_name": "KvstoreStorage",
    "interface_v1": 1,
    "prefetch_threshold": 16,
}
# On a busy machine an answer takes its time, and what is asked here is whether it is right.
PATIENT = {"lookup_seconds": 20.0, "bulk_seconds": 20.0}


def with_storage(address, **backend):
    """SGLang's own settings for pages in a server; `direct` copies are those that a CPU can make."""
    extra = BACKEND | backend | {"kvstore": PATIENT | {"address": address}}
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


class SglangProcess:
    """An engine that takes a command as a line of JSON and answers with one."""

    def __init__(self, python, options, folder, environment=None):
        self.log = folder / f"sglang-{os.urandom(4).hex()}.log"
        script = Path(__file__).with_name("sglang_process.py")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [python, script, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "KMP_BLOCKTIME": "0", **(environment or {})},
            )

    def answer(self):
        timer = threading.Timer(ANSWER_SECONDS_MAX, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line, f"the engine ended with {self.process.wait()}: {self.log.read_text(errors='replace')[-3000:]}"
        return json.loads(line)

    def ask(self, do, **arguments):
        self.process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
