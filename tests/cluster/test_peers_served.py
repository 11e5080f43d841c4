"""Three `kvstore serve --cluster` and a real Valkey: what one node stored, the others serve, whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.patience import ANSWER_SECONDS, wait_until
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.testing.valkey_server import ValkeyServer

pytestmark = pytest.mark.kill
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16)
SECRET = b"what the engines of team-a know"
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a", secret=SECRET)
OPEN_TO_ALL = Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a")
BLOCKS = 96
# Prefill so slow that fetches always win, and that who waits for another waits until he has given up.
SETTINGS = """
[tenants.team-a]
secret_files = ["{folder}/secret"]
[cluster]
announce_after_seconds = 0
lease_seconds = 10
secret_file = "{folder}/cluster-secret"
prefill_tokens_per_second = 100
fetch_seconds_max = 12
answer_seconds_max = 1
directory_seconds_max = 5
"""


def prompt_of(name: int) -> list[int]:
    return list(range(name * 100_000, name * 100_000 + BLOCKS * LAYOUT.block_tokens))


@dataclass
class Served:
    """A node in a process of its own, and a patient client of it."""

    process: subprocess.Popen[str]
    client: kvstore.Client
    metrics: str

    def bring(self, name: int, namespace: Namespace = NAMESPACE) -> int:
        """Ask until the prompt is there; its blocks, each asserted right."""

        def is_there() -> bool:
            with self.client.prefetch(namespace, prompt_of(name), wait_seconds=5.0):
                return self.client.match(namespace, prompt_of(name), touch=False).blocks == BLOCKS

        wait_until(is_there)
        return verified_blocks(self.client, namespace, prompt_of(name))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics") as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture
def nodes(own_valkey: ValkeyServer, tmp_path: Path) -> Iterator[list[Served]]:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "cluster-secret").write_bytes(b"of all nodes of this cluster")
    (tmp_path / "kvstore.toml").write_text(SETTINGS.format(folder=tmp_path))
    flags = ["--config", str(tmp_path / "kvstore.toml"), "--cluster", own_valkey.url, "--host-bytes", "16MiB"]
    flags += ["--listen", f"127.0.0.1:0,unix://{tmp_path}/NODE.sock", "--metrics", "127.0.0.1:0"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    with contextlib.ExitStack() as stack:
        processes = []
        for name in ("n0", "n1", "n2"):
            own = [flag.replace("NODE", name) for flag in flags]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvstore.cli", "serve", "--node", name, *own],
                stdout=subprocess.PIPE, text=True, env=environ,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        served = []
        for process in processes:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            client = kvstore.connect(ready["listen"][0], lookup_seconds=10.0, bulk_seconds=10.0)
            served.append(Served(process, stack.enter_context(client), ready["metrics"]))
        # A node that joins is not known to all at once, and until then nobody heeds its claims.
        wait_until(lambda: all(len(node.client.nodes()[1]) == len(served) for node in served))
        yield served


def test_a_prefix_is_served_by_all_nodes_while_nodes_and_the_directory_are_killed(
    nodes: list[Served], own_valkey: ValkeyServer
) -> None:
    first, second, third = nodes
    for name in (1, 2):
        store_prompt(first.client, NAMESPACE, prompt_of(name))
    store_prompt(first.client, OPEN_TO_ALL, prompt_of(1))
    assert [BLOCKS, BLOCKS] == [node.bring(1) for node in (second, third)]
    assert BLOCKS == second.bring(1, OPEN_TO_ALL)
    assert BLOCKS == second.bring(2)
    assert 3 * BLOCKS * LAYOUT.block_tokens == second.metric("kvstore_peer_fetched_tokens_total")

    first.process.kill()
    first.process.wait()
    assert BLOCKS == third.bring(2)  # from the one that had fetched it

    own_valkey.kill()
    assert [BLOCKS, BLOCKS] == [verified_blocks(node.client, NAMESPACE, prompt_of(2)) for node in (second, third)]
    store_prompt(second.client, NAMESPACE, prompt_of(3))
    began = time.monotonic()
    with third.client.prefetch(NAMESPACE, prompt_of(3), wait_seconds=ANSWER_SECONDS) as prefetch:
        assert 0 == prefetch.host_blocks
    assert time.monotonic() - began < ANSWER_SECONDS / 2

    own_valkey.start()
    assert BLOCKS == third.bring(3)


def test_what_all_ask_for_at_once_is_computed_by_one(nodes: list[Served]) -> None:
    computed = []

    def engine(node: Served) -> None:
        with node.client.prefetch(NAMESPACE, prompt_of(7), wait_seconds=ANSWER_SECONDS):
            pass
        if node.client.match(NAMESPACE, prompt_of(7)).blocks < BLOCKS:
            computed.append(node)
            store_prompt(node.client, NAMESPACE, prompt_of(7))

    threads = [threading.Thread(target=engine, args=(node,)) for node in nodes for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 == len(computed)
    assert [BLOCKS] * 3 == [verified_blocks(node.client, NAMESPACE, prompt_of(7)) for node in nodes]
