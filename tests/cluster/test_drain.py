"""`kvstore drain` on three nodes and a real Valkey: what is hot is elsewhere afterwards, and the node serves on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.cli import main
from kvstore.cluster.routing import choose_node
from kvstore.errors import InvalidArgumentError
from kvstore.nodes import DrainOrder, NodeState
from kvstore.testing.blocks import store_prompt, verified_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.testing.valkey_server import ValkeyServer

pytestmark = pytest.mark.kill
LAYOUT = kvstore.KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16)
SECRET = b"shared by all nodes"
NAMESPACE = kvstore.Namespace(model="m", revision="r", layout=LAYOUT, secret=SECRET)
BLOCKS = 32
PROMPTS = [[head] * 16 + list(range((BLOCKS - 1) * 16)) for head in range(4)]
SECONDS_MAX = 30.0
_LOOK_SECONDS = 0.05
SETTINGS = {
    "cluster.lease_seconds": "4s",
    "cluster.announce_after_seconds": "0s",
    "cluster.prefill_tokens_per_second": "100",  # so slow that fetches always win
    "cluster.directory_seconds_max": "5s",
}


@dataclass(frozen=True)
class Served:
    """A node as a process, a patient client of it, and its address."""

    process: subprocess.Popen[str]
    client: kvstore.Client
    address: str

    def states(self) -> dict[str, NodeState]:
        return {node.name: node.state for node in self.client.nodes()[1]}


@contextmanager
def serving(tmp_path: Path, name: str, url: str) -> Iterator[Served]:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    settings = {**SETTINGS, "tenants.default.secret_files": str(secret)}
    command = [sys.executable, "-P", "-m", "kvstore.cli", "serve", "--listen", f"unix://{tmp_path}/{name}.s"]
    command += ["--node", name, "--cluster", url, "--host-bytes", "8MiB"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["listen"][0]
            with kvstore.connect(address, lookup_seconds=10.0, bulk_seconds=10.0) as client:
                yield Served(process, client, address)
        finally:
            process.kill()


@pytest.fixture
def nodes(own_valkey: ValkeyServer, tmp_path: Path) -> Iterator[list[Served]]:
    with ExitStack() as stack:
        served = [stack.enter_context(serving(tmp_path, name, own_valkey.url)) for name in ("a", "b", "c")]
        until(lambda: all(3 == len(node.states()) for node in served))
        yield served


def until(holds: Callable[[], bool]) -> None:
    """Ask again and again, as a user would, until it is so."""
    end = time.monotonic() + SECONDS_MAX
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < end, "it does not come about"
        pause.wait(_LOOK_SECONDS)


def store_hot_prompts(node: Served) -> None:
    for prompt in PROMPTS:
        store_prompt(node.client, NAMESPACE, prompt)


def refuses_what_cannot_be_followed(node: Served) -> None:
    client = node.client
    with pytest.raises(InvalidArgumentError, match="'x': no other node of that name is ready; ready are b, c"):
        client.drain(DrainOrder(1.0, 1, ("x",)))
    with pytest.raises(InvalidArgumentError, match=r"seconds is 3601, expected 0\.\.3600"):
        client.drain(DrainOrder(3601.0, 1))
    assert 1 == main(["drain", "nobody", "--address", node.address])
    assert not client.drain(None).is_draining


def test_what_is_hot_hits_elsewhere_after_a_drain_and_the_stop_of_the_node(
    nodes: list[Served], capsys: pytest.CaptureFixture[str]
) -> None:
    leaving, *staying = nodes
    store_hot_prompts(leaving)
    capsys.readouterr()
    # Another node is asked, finds the address in the directory, and goes there.
    assert 0 == main(["drain", "a", "--address", staying[0].address, "--seconds", "30s", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert ("a", True, len(PROMPTS), len(PROMPTS)) == (
        told["node"],
        told["is_draining"],
        told["prefixes"],
        told["taken"],
    )
    assert [BLOCKS] * len(PROMPTS) == [verified_blocks(leaving.client, NAMESPACE, prompt) for prompt in PROMPTS]
    until(lambda: all(node.states()["a"] is NodeState.DRAINING for node in staying))
    chosen = choose_node(staying[0].client.locate(NAMESPACE, PROMPTS[0]), len(PROMPTS[0]), {})
    assert chosen is not None
    assert chosen.node.name != "a"

    leaving.process.send_signal(signal.SIGTERM)
    assert 0 == leaving.process.wait(SECONDS_MAX)
    for prompt in PROMPTS:
        assert BLOCKS == max(verified_blocks(node.client, NAMESPACE, prompt) for node in staying)
    until(lambda: staying[0].states()["a"] is NodeState.GONE)
    assert 0 == main(["nodes", "--address", staying[0].address])
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["a", "gone"] in [row[:2] for row in rows]


def test_a_node_that_drained_takes_part_again_when_that_is_undone(nodes: list[Served]) -> None:
    leaving, other, _ = nodes
    refuses_what_cannot_be_followed(leaving)
    assert 0 == main(["drain", "--address", leaving.address, "--to", "b"])
    until(lambda: other.states()["a"] is NodeState.DRAINING)
    store_prompt(other.client, NAMESPACE, PROMPTS[0])
    until(lambda: BLOCKS * 16 <= max(match.tokens for match in leaving.client.locate(NAMESPACE, PROMPTS[0])))
    with leaving.client.prefetch(NAMESPACE, PROMPTS[0], wait_seconds=5.0) as prefetch:
        assert 0 == prefetch.host_blocks
    assert 0 == main(["drain", "--address", leaving.address, "--undo"])
    until(lambda: other.states()["a"] is NodeState.READY)
    with leaving.client.prefetch(NAMESPACE, PROMPTS[0], wait_seconds=SECONDS_MAX) as prefetch:
        assert BLOCKS == prefetch.host_blocks
    assert not leaving.client.undrain()


def test_a_drain_whose_command_is_killed_leaves_the_node_serving(nodes: list[Served]) -> None:
    leaving, other, third = nodes
    store_hot_prompts(leaving)
    for node in (other, third):
        node.process.send_signal(signal.SIGSTOP)  # so that nobody takes anything
    command = [sys.executable, "-P", "-m", "kvstore.cli", "drain", "--address", leaving.address, "--seconds", "60s"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        until(lambda: leaving.client.drain(None).is_draining)
        process.kill()
    assert [BLOCKS] * len(PROMPTS) == [verified_blocks(leaving.client, NAMESPACE, prompt) for prompt in PROMPTS]
    more = [9] * 16 * BLOCKS
    store_prompt(leaving.client, NAMESPACE, more)
    assert BLOCKS == verified_blocks(leaving.client, NAMESPACE, more)
    assert leaving.client.undrain()
    assert not leaving.client.drain(None).is_draining
    for node in (other, third):
        node.process.send_signal(signal.SIGCONT)
