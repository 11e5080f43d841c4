"""What a sidecar knows of a real vLLM engine by its KV events is what the engine holds, also after evictions."""

from __future__ import annotations

import random
import time

import pytest

import kvstore
from kvstore.demo.processes import DemoProcess
from kvstore.types import KvLayout, Namespace, Root

pytest.importorskip("zmq")
pytestmark = [pytest.mark.engine, pytest.mark.kill, pytest.mark.timeout(1500)]

BLOCK_TOKENS = 32
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=16)
NAMESPACE = Namespace(model="tiny", revision="revision", layout=LAYOUT)
SECONDS_MAX = 60.0


def tokens_of(count, seed):
    return random.Random(seed).choices(range(3, 500), k=count)


def mixed_prompts():
    """Shared beginnings, conversations that go on, and more of all than the engine has memory for."""
    systems = [tokens_of(200, f"system {number}") for number in range(4)]
    prompts = [system + tokens_of(40 * turn, f"turn {turn}") for system in systems for turn in range(5)]
    prompts += [tokens_of(500, f"alone {number}") for number in range(12)]
    return prompts + prompts[:6]


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("events")
    return f"ipc://{folder}/live", f"ipc://{folder}/replay"


@pytest.fixture(scope="module")
def engine(start_engine, endpoints):
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoints[0]}
    return start_engine(
        kv_events_config=events | {"replay_endpoint": endpoints[1]}, num_gpu_blocks_override=96, max_num_seqs=4
    )


@pytest.fixture(scope="module")
def address(endpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sidecar")
    address = f"unix://{folder}/kv.sock"
    values = {"endpoint": endpoints[0], "replay_endpoint": endpoints[1], "model": "tiny", "engine": "vllm"}
    given = [f"--set=engine_events.first.{name}={value}" for name, value in values.items()]
    arguments = ["serve", "--listen", address, "--host-bytes", "1MiB", *given]
    with DemoProcess("sidecar", "kvstore.cli", arguments, folder / "sidecar.log") as process:
        process.receive()
        yield address


def located(client, prompts, salts):
    found = []
    for prompt, salt in zip(prompts, salts, strict=True):
        (match,) = client.locate(NAMESPACE, prompt, root=Root(salt=salt))
        found.append(match.device_tokens.get("vllm", 0))
    return found


def until_same(client, engine, prompts, salts):
    expected = engine.ask("held", prompts=prompts, salts=salts)["tokens"]
    ends_at = time.monotonic() + SECONDS_MAX
    while (found := located(client, prompts, salts)) != expected and time.monotonic() < ends_at:
        time.sleep(0.05)
    assert expected == found
    return expected


def test_a_sidecar_knows_what_the_engine_holds_after_evictions_resets_and_with_salts(engine, address, record_vllm):
    prompts = mixed_prompts()
    salts = [None if number % 4 else "tenant-b" for number in range(len(prompts))]
    with kvstore.connect(address) as client:
        for first in range(0, len(prompts), 10):
            some = slice(first, first + 10)
            engine.ask("generate", prompts=prompts[some], max_tokens=20, salts=salts[some])
            held = until_same(client, engine, prompts, salts)
        assert 0 < sum(held) < sum(len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts)
        assert {True} == {tokens % BLOCK_TOKENS == 0 for tokens in held}
        assert {"reset": True} == engine.ask("reset")  # told of with the next step
        engine.ask("generate", prompts=prompts[-1:], max_tokens=2, salts=salts[-1:])
        again = until_same(client, engine, prompts, salts)
        assert (0, True) == (again[0], again[-1] > 0)
    record_vllm("KV events: what the engine holds in its device's memory, for routers")
