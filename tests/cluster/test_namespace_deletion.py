"""`kvstore namespace delete` on nodes with disks and a real Valkey: also where a node was away, or is killed at it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.cli import main
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.testing.valkey_server import ValkeyServer

pytestmark = pytest.mark.kill
LAYOUT = kvstore.KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16)
SECRET = b"shared by all nodes"
NAMESPACE, OTHER = (
    kvstore.Namespace(model=model, revision="r", layout=LAYOUT, secret=SECRET) for model in ("deleted", "kept")
)
BLOCKS = 64
PROMPT = list(range(BLOCKS * 16))
SECONDS_MAX = 30.0
_LOOK_SECONDS = 0.05
SETTINGS = {
    "cluster.lease_seconds": "2s",
    "cluster.announce_after_seconds": "0s",
    "cluster.prefill_tokens_per_second": "100",
    "cluster.directory_seconds_max": "5s",
}


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[str]
    client: kvstore.Client
    address: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def fetched(self) -> int:
        with self.client.prefetch(NAMESPACE, PROMPT, wait_seconds=5.0) as prefetch:
            return prefetch.host_blocks


@contextmanager
def serving(folder: Path, name: str, url: str) -> Iterator[Served]:
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    settings = {**SETTINGS, "tenants.default.secret_files": str(secret)}
    command = [sys.executable, "-P", "-m", "kvstore.cli", "serve", "--listen", f"unix://{folder}/{name}.s"]
    command += ["--node", name, "--cluster", url, "--host-bytes", "4MiB", "--data-dir", str(folder / name)]
    command += ["--disk-bytes", "128MiB"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["listen"][0]
            with kvstore.connect(address, lookup_seconds=10.0, bulk_seconds=10.0) as client:
                yield Served(process, client, address)
        finally:
            process.kill()


def until(holds: Callable[[], bool]) -> None:
    """Ask again and again, as a user would, until it is so."""
    end = time.monotonic() + SECONDS_MAX
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < end, "it does not come about"
        pause.wait(_LOOK_SECONDS)


def held(node: Served, namespace: kvstore.Namespace = NAMESPACE) -> int:
    return node.client.match(namespace, PROMPT, touch=False).blocks


def store_on_disk(node: Served) -> None:
    for namespace in (NAMESPACE, OTHER):
        store_prompt(node.client, namespace, PROMPT)
    node.client.flush()


def delete(node: Served, *flags: str) -> int:
    ns_id = node.client.namespace_id(NAMESPACE).hex()
    return main(["namespace", "delete", ns_id, "--address", node.address, "--json", *flags])


def test_what_was_deleted_is_gone_from_every_node_and_from_one_that_was_away(
    own_valkey: ValkeyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = own_valkey.url
    with ExitStack() as stack:
        first, second = [stack.enter_context(serving(tmp_path, name, url)) for name in ("a", "b")]
        with serving(tmp_path, "away", url) as away:
            store_on_disk(away)
            store_on_disk(first)
            store_on_disk(second)
            away.kill()
        until(lambda: {"a", "b"} == {n.name for n in first.client.nodes()[1] if n.state.value == "ready"})
        capsys.readouterr()
        with first.client.lease(first.client.match(NAMESPACE, PROMPT)) as lease:
            assert 0 == delete(first)
            rows = np.zeros((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8)
            assert BLOCKS == lease.load_into(rows).blocks  # who had leased it, finishes
            assert np.array_equal(expected_rows(NAMESPACE, PROMPT), rows)
        told = json.loads(capsys.readouterr().out)
        assert (BLOCKS, True, []) == (told["blocks"], told["told"], told["behind"])
        assert [0, 0] == [held(node) for node in (first, second)]
        assert [BLOCKS, BLOCKS] == [verified_blocks(node.client, OTHER, PROMPT) for node in (first, second)]

        back = stack.enter_context(serving(tmp_path, "away", url))
        assert 0 == held(back)  # at once, before anything else
        assert BLOCKS == verified_blocks(back.client, OTHER, PROMPT)
        assert 0 == second.fetched()

        store_prompt(back.client, NAMESPACE, PROMPT)  # it may be used anew
        until(lambda: BLOCKS == second.fetched())
        assert BLOCKS == verified_blocks(second.client, NAMESPACE, PROMPT)
        assert 0 == main(["namespace", "list", "--address", second.address, "--json"])
        listed = json.loads(capsys.readouterr().out)
        assert {"deleted", "kept"} == {stats["model"] for stats in listed}


def test_one_that_the_directory_does_not_hear_of_is_told_when_it_is_back(
    own_valkey: ValkeyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        first, second = [stack.enter_context(serving(tmp_path, name, own_valkey.url)) for name in ("a", "b")]
        until(lambda: 2 == len(first.client.nodes()[1]))
        store_on_disk(first)
        store_on_disk(second)
        own_valkey.kill()
        assert 3 == delete(first)
        assert not json.loads(capsys.readouterr().out)["told"]
        assert [0, BLOCKS] == [held(node) for node in (first, second)]
        own_valkey.start()
        until(lambda: held(second) == 0)


@pytest.mark.parametrize("delay_seconds", [0.0, 0.005, 0.02, 0.1])
def test_a_node_that_is_killed_at_it_has_dropped_all_when_it_is_back_or_was_never_asked(
    own_valkey: ValkeyServer, tmp_path: Path, delay_seconds: float
) -> None:
    with serving(tmp_path, "a", own_valkey.url) as node:
        store_on_disk(node)
        ns_id = node.client.namespace_id(NAMESPACE)
        killer = threading.Timer(delay_seconds, os.kill, (node.process.pid, 9))
        killer.start()
        try:
            node.client.delete_namespace(ns_id)
            is_answered = True
        except kvstore.KvstoreError:
            is_answered = False
        killer.join()
        node.process.wait()
    with serving(tmp_path, "a", own_valkey.url) as node:
        left = held(node)
        assert left in ((0,) if is_answered else (0, BLOCKS))
        assert left == verified_blocks(node.client, NAMESPACE, PROMPT)
        assert BLOCKS == verified_blocks(node.client, OTHER, PROMPT)
