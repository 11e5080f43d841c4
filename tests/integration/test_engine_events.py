"""A real sidecar follows engines that publish from processes of their own, and tells routers what they hold."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

import kvstore
from kvstore.types import KvLayout, Namespace, Root

pytest.importorskip("zmq")
pytestmark = pytest.mark.kill

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=16)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
TOKENS = list(range(100))
SECONDS_MAX = 30.0


class Process:
    """A program that answers lines with lines of JSON."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first = json.loads(self.process.stdout.readline())

    def ask(self, command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path):
    with ExitStack() as stack:

        def begin(*arguments):
            process = Process(*map(str, arguments))
            stack.callback(process.end)
            return process

        yield begin


@pytest.fixture
def endpoints(tmp_path):
    return f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"


@pytest.fixture
def start_engine(start, endpoints):
    script = Path(__file__).with_name("engine_publisher_process.py")
    return lambda: start(script, *endpoints)


@pytest.fixture
def sidecar(start, endpoints, tmp_path):
    """A sidecar that follows the engine; its address, and that of its metrics."""
    values = {"endpoint": endpoints[0], "replay_endpoint": endpoints[1], "model": "model", "engine": "gpu-0"}
    given = [f"--set=engine_events.first.{name}={value}" for name, value in values.items()]
    address = f"unix://{tmp_path}/kv.sock"
    options = ["--listen", address, "--host-bytes", "1MiB", "--metrics", "127.0.0.1:0"]
    process = start("-m", "kvstore.cli", "serve", *options, *given)
    return address, process.first["metrics"]


def stored(first, count, parent=None, tokens=TOKENS):
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first, first + count)),
        "parent_block_hash": parent,
        "token_ids": tokens[first * 8 : (first + count) * 8],
        "block_size": 8,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def removed(*hashes):
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def located(client, root=None):
    (match,) = client.locate(NAMESPACE, TOKENS, root=root)
    return match.device_tokens


def until_located(client, expected):
    ends_at = time.monotonic() + SECONDS_MAX
    while (found := located(client)) != expected and time.monotonic() < ends_at:
        time.sleep(0.01)
    assert expected == found


def sample(metrics, name):
    with urlopen(f"http://{metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), 0.0)


def test_what_an_engine_holds_is_located_though_no_tier_has_it(start_engine, sidecar):
    engine = start_engine()
    engine.ask([stored(0, 3)])
    with kvstore.connect(sidecar[0]) as client:
        until_located(client, {"gpu-0": 24})
        assert {} == located(client, Root(salt="other"))
        assert 0 == client.match(NAMESPACE, TOKENS).tokens
        engine.ask([stored(3, 2, parent=2), removed(4)])
        until_located(client, {"gpu-0": 32})
        engine.ask([{"type": "AllBlocksCleared"}])
        until_located(client, {})
    assert 1.0 == sample(sidecar[1], 'kvstore_engine_connected{engine="gpu-0"}')


def test_what_was_lost_is_asked_for_again_and_what_is_malformed_is_counted(start_engine, sidecar):
    engine = start_engine()
    with kvstore.connect(sidecar[0]) as client:
        engine.ask([stored(0, 1)])
        until_located(client, {"gpu-0": 8})
        engine.ask({"lose": [stored(1, 2, parent=0)]})
        engine.ask({"raw": "no batch"})
        engine.ask([stored(3, 1, parent=2)])
        until_located(client, {"gpu-0": 32})
        events = 'kvstore_engine_events_total{engine="gpu-0",outcome='
        counts = {name: sample(sidecar[1], f'{events}"{name}"}}') for name in ("applied", "gap", "malformed", "lost")}
        assert {"applied": 3.0, "gap": 1.0, "malformed": 1.0, "lost": 0.0} == counts
        assert 4.0 == sample(sidecar[1], "kvstore_engine_device_blocks")


def test_an_engine_that_dies_holds_nothing_and_one_that_comes_back_is_known_from_its_first_batch(start_engine, sidecar):
    engine = start_engine()
    engine.ask([stored(0, 4)])
    with kvstore.connect(sidecar[0]) as client:
        until_located(client, {"gpu-0": 32})
        engine.end()
        until_located(client, {})
        assert 0.0 == sample(sidecar[1], "kvstore_engine_connected")
        again = start_engine()
        again.ask([stored(0, 2)])
        until_located(client, {"gpu-0": 16})


def test_an_address_that_cannot_be_used_is_refused_at_start(tmp_path):
    options = ["--listen", f"unix://{tmp_path}/kv.sock", "--host-bytes", "1MiB"]
    given = ["--set=engine_events.a.model=m", "--set=engine_events.a.endpoint=tcp://no port"]
    result = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "serve", *options, *given], capture_output=True, text=True, timeout=60
    )
    assert 1 == result.returncode
    assert "engine 'a' cannot be followed at tcp://no port" in result.stderr
