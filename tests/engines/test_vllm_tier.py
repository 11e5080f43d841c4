"""The secondary tier made by vLLM's own factory, over a real sidecar that is killed and comes back."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

import kvstore

pytestmark = [pytest.mark.engine, pytest.mark.kill, pytest.mark.timeout(600)]
RETURN_SECONDS = 120.0


class TierProcess:
    def __init__(self, python, address, folder):
        self.log = folder / "tier.log"
        script = Path(__file__).with_name("vllm_tier.py")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-P", script, address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                text=True,
            )
        self.facts = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, self.log.read_text(errors="replace")[-3000:]
        return json.loads(line)

    def ask(self, do, **arguments):
        self.process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        self.process.stdin.close()
        try:
            assert self.process.wait(60) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


def until_found(tier, numbers):
    ends_at = time.monotonic() + RETURN_SECONDS
    found = ["MISS"]
    while found != ["HIT"] * len(numbers) and time.monotonic() < ends_at:
        tier.ask("forget")
        found = tier.ask("lookup", numbers=numbers)["found"]
    return found


@pytest.fixture
def new_tier(vllm_python, tmp_path_factory):
    started = []

    def start(address):
        started.append(TierProcess(vllm_python, address, tmp_path_factory.mktemp("tier")))
        return started[-1]

    yield start
    for tier in started:
        tier.close()


def test_chunks_survive_their_engine_and_a_killed_server_is_a_miss_until_it_is_back(
    new_tier, start_server, new_address
):
    address = new_address()
    server = start_server(address)
    first, second = new_tier(address), new_tier(address)
    assert first.facts == {"source": "DISK", "bytes": 4096}
    assert first.ask("lookup", numbers=[1, 2]) == {"found": ["MISS", "MISS"]}
    assert first.ask("store", rows=[0, 1, 2], numbers=[1, 2, 3]) == {"success": True, "keys": 3}
    assert second.ask("lookup", numbers=[1, 3, 4]) == {"found": ["HIT", "HIT", "MISS"]}
    assert second.ask("load", rows=[5, 7], numbers=[3, 1]) == {"success": True, "keys": 2, "right": [True, True]}
    with kvstore.connect(address, lookup_seconds=10.0) as client:
        client.flush()
    server.kill()
    assert second.ask("load", rows=[0, 1], numbers=[1, 3])["success"] is False
    assert second.ask("lookup", numbers=[1, 3]) == {"found": ["MISS", "MISS"]}
    assert first.ask("store", rows=[0], numbers=[9]) == {"success": False, "keys": 0}
    start_server(address)
    assert until_found(second, [1, 2, 3]) == ["HIT"] * 3
    assert second.ask("load", rows=[2, 3, 4], numbers=[1, 2, 3])["right"] == [True] * 3
    assert second.ask("unsettled") == {"found": ["MISS"], "store": {"success": False, "keys": 0}, "load": False}
