"""Who gets what of a peer: TLS, tokens, tenants, and the secrets of namespaces."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.cluster.memory_directory import SharedDirectory
from kvstore.cluster.peer_settings import PeerCredentials, peer_credentials, peer_settings
from kvstore.errors import ConfigError
from kvstore.peer_config import PeerConfig
from kvstore.store import StoreSettings
from kvstore.testing.blocks import verified_blocks
from kvstore.testing.peering import PeerNode
from kvstore.testing.securing import Keyring
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16)
SECRET = b"what the engines of team-a know"
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a", secret=SECRET)
OPEN_TO_ALL = Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a")
BLOCKS = 64
PROMPT = list(range(BLOCKS * LAYOUT.block_tokens))


@pytest.fixture
def start_node() -> Iterator[Callable[..., PeerNode]]:
    shared = SharedDirectory(SystemClock())
    with ExitStack() as stack:

        def start(name: str, **options: object) -> PeerNode:
            given = {"secrets": {"team-a": (SECRET,)}, **options}
            return stack.enter_context(PeerNode(shared, name, **given))  # type: ignore[arg-type]

        yield start


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    return Keyring(tmp_path_factory.mktemp("keys"))


def fetched(holder: PeerNode, asker: PeerNode, namespace: Namespace) -> dict[str, int]:
    """Have a node ask for what another has; by outcome."""
    holder.store_and_announce(namespace, PROMPT)
    holder.membership.announce(asker.store.block_keys(namespace, PROMPT)[31::32])
    asker.store.prefetch(namespace, PROMPT, wait_seconds=None)
    outcomes = asker.peers.stats().fetches
    assert verified_blocks(asker.store, namespace, PROMPT) == (BLOCKS if "fetched" in outcomes else 0)
    return outcomes


@pytest.mark.parametrize("tenant", ["team-a", "*"])
def test_peers_that_show_a_token_over_tls_are_served(
    start_node: Callable[..., PeerNode], keyring: Keyring, tenant: str
) -> None:
    token_file = keyring.let_in(f"peer-{len(tenant)}", tenant, "read")
    credentials = PeerCredentials(tls_ca=keyring.ca, token_file=token_file)
    holder = start_node("holder", listen="tls://127.0.0.1:0", security=keyring.security())
    assert {"fetched": 1} == fetched(holder, start_node("asker", credentials=credentials), NAMESPACE)


def test_peers_that_show_a_certificate_are_served(start_node: Callable[..., PeerNode], keyring: Keyring) -> None:
    keyring.let_in_certificate("peers", "CN:engine", "*", "read")
    credentials = PeerCredentials(
        tls_ca=keyring.ca, tls_cert=keyring.path("client-engine.pem"), tls_key=keyring.path("client-engine.key")
    )
    holder = start_node("holder", listen="tls://127.0.0.1:0", security=keyring.security())
    assert {"fetched": 1} == fetched(holder, start_node("asker", credentials=credentials), NAMESPACE)


def test_strangers_get_nothing(start_node: Callable[..., PeerNode], keyring: Keyring) -> None:
    holder = start_node("holder", listen="tls://127.0.0.1:0", security=keyring.security())
    asker = start_node("asker", credentials=PeerCredentials(tls_ca=keyring.ca))
    assert {"refused": 1} == fetched(holder, asker, NAMESPACE)


def test_a_peer_of_another_tenant_gets_nothing(start_node: Callable[..., PeerNode], keyring: Keyring) -> None:
    token_file = keyring.let_in("other-tenant", "team-b", "read")
    credentials = PeerCredentials(tls_ca=keyring.ca, token_file=token_file)
    holder = start_node("holder", listen="tls://127.0.0.1:0", security=keyring.security())
    assert {"refused": 1} == fetched(holder, start_node("asker", credentials=credentials), NAMESPACE)


def test_a_token_never_travels_in_the_clear(start_node: Callable[..., PeerNode], keyring: Keyring) -> None:
    token_file = keyring.let_in("in-the-clear", "*", "read")
    holder = start_node("holder")
    asker = start_node("asker", credentials=PeerCredentials(tls_ca=keyring.ca, token_file=token_file))
    assert {"refused": 1} == fetched(holder, asker, NAMESPACE)


def test_nodes_with_one_secret_share_namespaces_that_have_none(start_node: Callable[..., PeerNode]) -> None:
    alike = StoreSettings(node_secret=b"of all nodes of this cluster")
    holder, asker = start_node("holder", settings=alike), start_node("asker", settings=alike)
    assert {"fetched": 1} == fetched(holder, asker, OPEN_TO_ALL)


def test_a_node_that_does_not_know_the_secret_of_a_namespace_serves_none_of_it(
    start_node: Callable[..., PeerNode],
) -> None:
    holder = start_node("holder", secrets={})
    assert {"refused": 1} == fetched(holder, start_node("asker"), NAMESPACE)


def test_the_settings_say_what_is_assumed_and_shown(keyring: Keyring) -> None:
    config = PeerConfig(
        prefill_tokens_per_second=1000, peer_latency_seconds=0.5, tls_ca=keyring.ca, fetches_per_holder_max=2
    )
    chosen = peer_settings(config, announce_tokens=1024)
    assert (0.001, 0.5, 2, 1024) == (
        chosen.prefill.seconds_per_token,
        chosen.path.latency_seconds,
        chosen.fetches_per_holder_max,
        chosen.announce_tokens,
    )
    assert PeerCredentials(tls_ca=keyring.ca) == peer_credentials(config)


def test_files_that_cannot_be_shown_are_refused_at_the_start(keyring: Keyring, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    for config in (
        PeerConfig(tls_ca=missing),
        PeerConfig(token_file=missing),
        PeerConfig(tls_cert=keyring.path("client-engine.pem")),
        PeerConfig(tls_cert=keyring.ca, tls_key=keyring.path("client-engine.key")),  # not the key of that certificate
    ):
        with pytest.raises(ConfigError, match=r"cluster\.tls_\* and cluster\.token_file: "):
            peer_credentials(config)


def test_settings_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="answer_seconds_max is 0"):
        peer_settings(PeerConfig(answer_seconds_max=0.0), announce_tokens=512)
