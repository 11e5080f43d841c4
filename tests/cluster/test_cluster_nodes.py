"""`kvstore serve --cluster` as processes: nodes find each other, say where prompts lie, and are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.cli import main
from kvstore.nodes import NodeState
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.patience import ANSWER_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.testing.valkey_server import ValkeyServer

pytestmark = pytest.mark.kill
LAYOUT = kvstore.KvLayout(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
NAMESPACE = kvstore.Namespace(model="m", revision="r", layout=LAYOUT, secret=b"shared by all nodes")
PROMPT = list(range(46))


@contextmanager
def serving(tmp_path: Path, name: str, url: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A node and its address; it is killed at the end if it still runs."""
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    secret = folder / "secret"
    secret.write_bytes(b"shared by all nodes")
    secret.chmod(0o600)
    settings = {
        "cluster.lease_seconds": "1s",  # so that tests may wait for its end; a busy node loses it for a while
        "cluster.announce_tokens": "16",
        "cluster.announce_after_seconds": "0s",
        "tenants.default.secret_files": str(secret),
    }
    command = [sys.executable, "-P", "-m", "kvstore.cli", "serve", "--listen", f"unix://{folder}/s", "--node", name]
    command += ["--cluster", url, "--host-bytes", "4MiB"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")] + [*flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["listen"][0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def names(client: kvstore.Client) -> list[str]:
    return sorted(node.name for node in client.nodes()[1] if node.state is not NodeState.GONE)


def tokens_by_node(client: kvstore.Client) -> dict[str, int]:
    return {match.node.name: match.tokens for match in client.locate(NAMESPACE, PROMPT)}


def test_nodes_find_each_other_and_say_where_a_prompt_lies(
    own_valkey: ValkeyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = own_valkey.url
    with (
        serving(tmp_path, "a", url) as (first, a),
        serving(tmp_path, "b", url) as (second, b),
        kvstore.connect(a) as at_a,
        kvstore.connect(b) as at_b,
    ):
        wait_until(lambda: ["a", "b"] == names(at_a) == names(at_b))
        store_prompt(at_a, NAMESPACE, PROMPT)
        wait_until(lambda: {"a": 32, "b": 0} == tokens_by_node(at_b))
        wait_until(lambda: {"a": 44, "b": 0} == tokens_by_node(at_a))
        assert "b" == at_b.stats().node
        own_valkey.ask("FLUSHALL")
        wait_until(lambda: {"a": 32, "b": 0} == tokens_by_node(at_b))

        def shows_both() -> bool:
            capsys.readouterr()
            assert 0 == main(["nodes", "--address", b, "--json"])
            told = json.loads(capsys.readouterr().out)
            addresses = {node["name"]: node["addresses"] for node in told["nodes"]}
            return ("b", [a], [b]) == (told["node"], addresses.get("a"), addresses.get("b"))

        wait_until(shows_both)
        first.send_signal(signal.SIGKILL)
        wait_until(lambda: {"b": 0} == tokens_by_node(at_b))
        wait_until(lambda: ["b"] == names(at_b))
        own_valkey.kill()
        store_prompt(at_b, NAMESPACE, PROMPT)
        assert 11 == at_b.match(NAMESPACE, PROMPT).blocks
        second.send_signal(signal.SIGTERM)
        assert 0 == second.wait(ANSWER_SECONDS)


def test_what_a_node_held_is_on_the_one_that_stays_after_an_orderly_stop(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    prompt = list(range(800))
    flags = ("--set", "cluster.handover_seconds=20s", "--set", "cluster.lease_seconds=10s")
    with (
        serving(tmp_path, "a", own_valkey.url, *flags) as (leaving, a),
        serving(tmp_path, "b", own_valkey.url, *flags) as (_, b),
        kvstore.connect(a) as at_a,
        kvstore.connect(b) as at_b,
    ):
        wait_until(lambda: ["a", "b"] == names(at_a) == names(at_b))
        store_prompt(at_a, NAMESPACE, prompt)
        wait_until(lambda: 800 == next(m.tokens for m in at_b.locate(NAMESPACE, prompt) if m.node.name == "a"))
        leaving.send_signal(signal.SIGTERM)
        assert 0 == leaving.wait(ANSWER_SECONDS)
        assert 200 == verified_blocks(at_b, NAMESPACE, prompt)


def test_locate_prints_what_each_node_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = "layers=2,kv_heads=1,head_dim=8,dtype=float32,block_tokens=4"
    secret = tmp_path / "alone" / "secret"
    with serving(tmp_path, "alone", "") as (_, address):
        with kvstore.connect(address) as client:
            wait_until(lambda: ["alone"] == names(client))
            store_prompt(client, NAMESPACE, PROMPT)
        flags = ["--model", "m", "--revision", "r", "--layout", layout, "--secret-file", str(secret)]
        words = [str(token) for token in PROMPT]
        assert 0 == main(["locate", "--address", address, *flags, *words])
        assert ["alone", "44", "44", "in", "host"] == capsys.readouterr().out.splitlines()[1].split()
        assert 0 == main(["locate", "--address", address, "--json", *flags, *words])
        expected = {
            "prompt_tokens": 46,
            "nodes": [{"node": "alone", "tokens": 44, "tiers": {"host": 44}, "device": {}}],
        }
        assert expected == json.loads(capsys.readouterr().out)
        assert 0 == main(["nodes", "--address", address])
        assert "alone (this one)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cluster", "http://cache"], "expected valkey://host:port"),
        (["--set", "cluster.entry_seconds=20s"], "expected at least 4 times cluster.lease_seconds"),
        (["--set", "cluster.name=a b"], "expected ASCII without braces"),
        (["--set", "cluster.directory_seconds_max=0s"], "expected more"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listen = ["--listen", f"unix://{tmp_path}/s", "--host-bytes", "1MiB"]
    assert 1 == main(["serve", *listen, *flags])
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in told
