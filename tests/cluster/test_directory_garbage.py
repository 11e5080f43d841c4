"""A directory in which somebody else has written: what no node of ours wrote costs nobody his place there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.cluster.directory import NodeProfile
from kvstore.nodes import NodeReport
from kvstore.transport import convert_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.cluster.valkey_directory import ValkeyDirectory
    from kvstore.testing.valkey_server import ValkeyServer

KEY = bytes(range(16))
BUCKET = "{c:0}:4"
LEASE = "{c:nodes}:lease:"
FAR = "9999999999999"
RIGHT = {
    "name": "x", "identity": "00", "incarnation": "1", "addresses": ["a:1"], "host_bytes": 1, "disk_bytes": 1,
    "queue": 0,
}  # fmt: skip


@pytest.fixture
def join(own_valkey: ValkeyServer, open_directory: Callable[..., ValkeyDirectory]) -> Callable[[str], ValkeyDirectory]:
    def joined(name: str) -> ValkeyDirectory:
        directory = open_directory(own_valkey.url, "c")
        directory.join(NodeProfile(name, name.encode(), ("127.0.0.1:1",)))
        return directory

    return joined


def names(directory: ValkeyDirectory) -> list[str]:
    return [convert_nodes.node_to_proto(node).name for node in directory.nodes()]


@pytest.mark.parametrize(
    "lease",
    [
        pytest.param("{nope", id="no JSON"),
        pytest.param("[" * 50_000, id="deep"),
        pytest.param("5", id="number"),
        pytest.param(json.dumps({**RIGHT, "host_bytes": float("inf")}), id="infinite"),
        pytest.param(json.dumps({**RIGHT, "host_bytes": 2**80}), id="large"),
        pytest.param(json.dumps({**RIGHT, "incarnation": "f" * 40}), id="long incarnation"),
        pytest.param(json.dumps({**RIGHT, "queue": -5}), id="negative"),
        pytest.param(json.dumps({**RIGHT, "name": "\ud800"}), id="surrogate"),
        pytest.param(json.dumps({**RIGHT, "name": "\x1b[2J"}), id="control characters"),
        pytest.param(json.dumps({**RIGHT, "addresses": "abc"}), id="one address"),
        pytest.param(json.dumps({**RIGHT, "name": "x" * 100_000}), id="long name"),
    ],
)
def test_a_strange_lease_hides_no_other_node(
    own_valkey: ValkeyServer, join: Callable[[str], ValkeyDirectory], lease: str
) -> None:
    join("one")
    own_valkey.ask("SET", f"{LEASE}7", lease)
    own_valkey.ask("ZADD", "{c:nodes}:ends", FAR, "7")
    other = join("other")
    assert ["one", "other"] == names(other)
    assert "other" == other.renew(NodeReport()).node.name


def test_a_slot_that_is_no_number_hides_no_node(
    own_valkey: ValkeyServer, join: Callable[[str], ValkeyDirectory]
) -> None:
    join("one")
    own_valkey.ask("SET", f"{LEASE}seven", json.dumps(RIGHT))
    own_valkey.ask("ZADD", "{c:nodes}:ends", FAR, "seven")
    assert ["one", "other"] == names(join("other"))


@pytest.mark.parametrize(
    "words", [("SET", f"{LEASE}0", "{nope"), ("SET", f"{LEASE}0", "5"), ("SADD", f"{LEASE}0", "x")]
)
def test_who_lost_its_lease_to_garbage_takes_it_again(
    own_valkey: ValkeyServer, join: Callable[[str], ValkeyDirectory], words: tuple[str, ...]
) -> None:
    one = join("one")
    own_valkey.ask("DEL", f"{LEASE}0")
    own_valkey.ask(words[0], f"{LEASE}0", words[1])
    one.renew(NodeReport())
    assert ["one"] == names(one)
    own_valkey.ask("DEL", f"{LEASE}0")
    own_valkey.ask(words[0], f"{LEASE}0", words[1])
    assert ["one"] == names(join("one"))


@pytest.mark.parametrize("kind", ["entry", "marks"])
def test_a_key_of_another_type_is_passed_over_and_written_over(
    own_valkey: ValkeyServer, join: Callable[[str], ValkeyDirectory], kind: str
) -> None:
    one = join("one")
    one.announce([KEY])
    key = BUCKET if kind == "entry" else "{c:0}:marks"
    assert b":1\r\n" == own_valkey.ask("DEL", key)
    own_valkey.ask("SET", key, "x")
    assert [frozenset() if kind == "entry" else {0}] == list(one.holders([KEY]))
    one.announce([KEY])
    assert [{0}] == list(one.holders([KEY]))


def test_an_entry_of_odd_length_is_written_over(
    own_valkey: ValkeyServer, join: Callable[[str], ValkeyDirectory]
) -> None:
    one = join("one")
    own_valkey.ask("HSET", BUCKET, KEY[2:10].decode(), "abcd")
    one.announce([KEY])
    assert [{0}] == list(one.holders([KEY]))


@pytest.mark.parametrize("words", [("SET", "\xff\u1234"), ("SADD", "x")])
def test_a_claim_that_is_none_is_taken(
    own_valkey: ValkeyServer, join: Callable[[str], ValkeyDirectory], words: tuple[str, str]
) -> None:
    one = join("one")
    own_valkey.ask(words[0], f"c:claim:{KEY.decode()}", words[1])
    assert one.claimed(KEY) is None
    assert one.claim(KEY, 5.0) is not None


@pytest.mark.parametrize("kind", ["ends", "names", "owners", "joins"])
def test_a_shared_key_of_another_type_is_dropped_and_made_anew(
    own_valkey: ValkeyServer, join: Callable[[str], ValkeyDirectory], kind: str
) -> None:
    one, key = join("one"), f"{{c:nodes}}:{kind}"
    own_valkey.ask("DEL", key)
    own_valkey.ask("SADD", key, "x")
    one.renew(NodeReport())
    assert ["one"] == names(one)
    own_valkey.ask("DEL", key)
    own_valkey.ask("SET", key, "x")
    other = join("other")
    one.renew(NodeReport())
    assert {"one", "other"} == {*names(one), *names(other)}


@pytest.mark.parametrize("slot", ["seven", "70000", "-1", "1e3", ""])
def test_a_free_slot_that_is_none_is_given_to_nobody(
    own_valkey: ValkeyServer, join: Callable[[str], ValkeyDirectory], slot: str
) -> None:
    own_valkey.ask("ZADD", "{c:nodes}:ends", "1", slot)
    assert 0 == join("one").nodes()[0].slot
    assert b"$-1\r\n" == own_valkey.ask("ZSCORE", "{c:nodes}:ends", slot)


def test_an_owner_that_is_none_costs_nobody_the_slot(
    own_valkey: ValkeyServer, join: Callable[[str], ValkeyDirectory]
) -> None:
    own_valkey.ask("HSET", "{c:nodes}:owners", "0", "nonsense")
    assert 0 == join("one").nodes()[0].slot
