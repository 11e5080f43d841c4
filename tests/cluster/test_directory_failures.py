"""A node and its directory when either fails: real stores and a real Valkey that is killed, stopped, emptied, set back.

Nodes are driven turn by turn on a clock of the test's own; what is right again within two lease times is so after six
renewals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.clock import SystemClock
from kvstore.cluster.announcer import LOOK_SECONDS_MIN, Announcer, AnnounceSettings
from kvstore.cluster.directory import NodeProfile
from kvstore.cluster.valkey_address import parse_valkey_address
from kvstore.cluster.valkey_directory import DirectoryTimes, ValkeyDirectory
from kvstore.cluster.valkey_link import LinkOptions, ValkeyLink
from kvstore.errors import DirectoryUnavailableError, NodeNameTakenError
from kvstore.nodes import NodeReport
from kvstore.store import StoreSettings
from kvstore.testing.blocks import store_prompt
from kvstore.testing.manual_clock import ManualClock
from kvstore.testing.patience import SLACK_SECONDS, Stopwatch
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore.testing.valkey_server import ValkeyServer

pytestmark = pytest.mark.kill
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT, secret=b"a secret that nobody tells")
ANNOUNCE_TOKENS = 8
TIMES = DirectoryTimes(lease_seconds=30.0)


@dataclass
class TestNode:
    __test__ = False
    store: kvstore.Store
    directory: ValkeyDirectory
    announcer: Announcer
    clock: ManualClock

    def pass_leases(self, count: int) -> None:
        """Let so many lease times go by, with the renewals and everything else that falls into them."""
        for _ in range(count * 3):
            self.clock.advance(TIMES.lease_seconds / 3)
            self.announcer.turn()

    def boundaries(self, tokens: list[int]) -> list[bytes]:
        return self.store.block_keys(NAMESPACE, tokens)[1::2]

    def store_and_tell(self, tokens: list[int]) -> None:
        store_prompt(self.store, NAMESPACE, tokens)
        self.announcer.turn()
        self.clock.advance(2.0)
        self.announcer.turn()


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., TestNode]]:
    """Makes nodes of one cluster. `data` names a folder, `identity` stands for it where there is none."""
    made: list[TestNode] = []

    def make(
        url: str,
        name: str,
        *,
        data: str = "",
        identity: bytes = b"",
        events_bytes: int = 1 << 20,
        timeout_seconds: float = 30.0,
    ) -> TestNode:
        clock = ManualClock()
        options = LinkOptions(timeout_seconds=timeout_seconds, retry_seconds=0.0)
        link = ValkeyLink(parse_valkey_address(url), options, SystemClock())
        directory = ValkeyDirectory(link, "c", TIMES, clock)
        store = kvstore.open(
            tmp_path / data if data else None,
            host_bytes=1 << 20,
            disk_bytes=32 << 20 if data else None,
            settings=StoreSettings(events_bytes=events_bytes),
        )
        settings = AnnounceSettings(announce_tokens=ANNOUNCE_TOKENS, lease_seconds=TIMES.lease_seconds)
        announcer = Announcer(store, directory, settings=settings, clock=clock)
        announcer.enter(NodeProfile(name, identity or name.encode()))
        announcer.turn()
        made.append(TestNode(store, directory, announcer, clock))
        return made[-1]

    yield make
    for node in made:
        node.directory.close()
        node.store.close()


def prompt(number: int, blocks: int = 6) -> list[int]:
    return [1000 * number + token for token in range(blocks * LAYOUT.block_tokens)]


def test_what_is_stored_is_told_after_a_while_and_taken_back_when_it_leaves(valkey: ValkeyServer, make_node) -> None:
    valkey.ask("FLUSHALL")
    one, other = make_node(valkey.url, "one"), make_node(valkey.url, "other")
    slot = one.directory.nodes()[0].slot
    keys = one.boundaries(prompt(1))
    assert 3 == len(keys)
    store_prompt(one.store, NAMESPACE, prompt(1))
    one.announcer.turn()
    assert [frozenset()] * 3 == list(other.directory.holders(keys))
    one.clock.advance(2.0)
    one.announcer.turn()
    other.pass_leases(1)
    assert [{slot}] * 3 == list(other.directory.holders(keys))
    one.store.evict(NAMESPACE, prompt(1), from_block=4)
    one.announcer.turn()
    assert [{slot}, {slot}, frozenset()] == list(other.directory.holders(keys))
    one.store.clear(NAMESPACE)
    one.announcer.turn()
    assert [frozenset()] * 3 == list(other.directory.holders(keys))


def test_a_node_that_joins_is_known_to_all_after_a_second(valkey: ValkeyServer, make_node) -> None:
    valkey.ask("FLUSHALL")
    one = make_node(valkey.url, "one")
    assert ["one"] == [node.name for node in one.directory.nodes()]
    other = make_node(valkey.url, "other")
    other.store_and_tell(prompt(1))
    one.clock.advance(1.5)
    assert ["one", "other"] == [node.name for node in one.directory.nodes()]
    assert [{1}] * 3 == list(one.directory.holders(other.boundaries(prompt(1))))
    claim = other.directory.claim(b"k" * 16, 5.0)
    assert claim is not None
    assert one.directory.claimed(b"k" * 16) is not None


def test_a_killed_directory_is_right_again_within_two_leases(own_valkey: ValkeyServer, make_node) -> None:
    one, other = make_node(own_valkey.url, "one"), make_node(own_valkey.url, "other")
    one.store_and_tell(prompt(1))
    own_valkey.kill()
    one.store_and_tell(prompt(2))
    one.store.evict(NAMESPACE, prompt(1))
    one.pass_leases(1)
    other.pass_leases(1)
    assert not one.announcer.stats().is_member
    assert 6 == one.store.match(NAMESPACE, prompt(2)).blocks
    with pytest.raises(DirectoryUnavailableError, match="directory"):
        other.directory.holders(one.boundaries(prompt(2)))
    own_valkey.start()
    one.pass_leases(2)
    other.pass_leases(2)
    slot = {node.name: node.slot for node in other.directory.nodes()}["one"]
    assert [{slot}] * 3 == list(other.directory.holders(one.boundaries(prompt(2))))
    assert [frozenset()] * 3 == list(other.directory.holders(one.boundaries(prompt(1))))


def test_an_emptied_directory_is_right_again_within_two_leases(own_valkey: ValkeyServer, make_node) -> None:
    nodes = [make_node(own_valkey.url, name) for name in ("one", "other")]
    for number, node in enumerate(nodes):
        node.store_and_tell(prompt(number))
    own_valkey.ask("FLUSHALL")
    for node in (*nodes, *nodes):
        node.pass_leases(1)
    slots = {node.name: node.slot for node in nodes[0].directory.nodes()}
    assert ["one", "other"] == sorted(slots)
    for number, name in enumerate(("one", "other")):
        assert [{slots[name]}] * 3 == list(nodes[0].directory.holders(nodes[0].boundaries(prompt(number))))


@pytest.mark.parametrize("has_lease", [True, False])
def test_a_directory_set_back_is_right_again_within_two_leases(
    own_valkey: ValkeyServer, make_node, has_lease: bool
) -> None:
    one, other = make_node(own_valkey.url, "one"), make_node(own_valkey.url, "other")
    one.store_and_tell(prompt(1))
    one.store_and_tell(prompt(2))
    one.pass_leases(1)
    own_valkey.ask("SAVE")
    one.store.evict(NAMESPACE, prompt(1))
    one.store_and_tell(prompt(3))
    one.pass_leases(1)
    own_valkey.kill()
    own_valkey.start()
    if not has_lease:  # as if the dump were older than a lease
        for node in ("0", "1"):
            own_valkey.ask("DEL", f"{{c:nodes}}:lease:{node}")
    other.pass_leases(2)
    one.pass_leases(2)
    other.pass_leases(1)
    slot = {node.name: node.slot for node in other.directory.nodes()}["one"]
    found = [list(other.directory.holders(one.boundaries(prompt(number)))) for number in (1, 2, 3)]
    assert [[frozenset()] * 3, [{slot}] * 3, [{slot}] * 3] == found


def test_a_stopped_directory_holds_nobody_up_and_is_right_again(own_valkey: ValkeyServer, make_node) -> None:
    one = make_node(own_valkey.url, "one", timeout_seconds=1.0)
    one.store_and_tell(prompt(1))
    own_valkey.pause()
    try:
        watch = Stopwatch()
        one.pass_leases(1)
        seconds = watch.seconds
        store_prompt(one.store, NAMESPACE, prompt(2))
        assert 6 == one.store.match(NAMESPACE, prompt(2)).blocks
        assert not one.announcer.stats().is_member
        assert seconds < 3 * 3 * 1.0 + SLACK_SECONDS, "three renewals, each of one call with a limit of a second"
    finally:
        own_valkey.resume()
    one.pass_leases(2)
    assert [{node.slot for node in one.directory.nodes()}] * 3 == list(one.directory.holders(one.boundaries(prompt(2))))


def test_while_the_directory_is_down_calls_fail_at_once(own_valkey: ValkeyServer) -> None:
    clock = ManualClock()
    options = LinkOptions(timeout_seconds=0.5, retry_seconds=10.0)
    link = ValkeyLink(parse_valkey_address(own_valkey.url), options, clock)
    assert link.run(("PING",))
    own_valkey.kill()
    with pytest.raises(DirectoryUnavailableError, match="failed"):
        link.run(("PING",))
    with pytest.raises(DirectoryUnavailableError, match="a moment ago"):
        link.run(("PING",))
    own_valkey.start()
    assert link.probe([("PING",)])
    assert link.run(("PING",))
    link.close()


def test_a_node_that_was_away_keeps_its_slot_and_its_entries(own_valkey: ValkeyServer, make_node) -> None:
    one, other = make_node(own_valkey.url, "one"), make_node(own_valkey.url, "other")
    one.store_and_tell(prompt(1))
    one.pass_leases(1)
    slot = one.directory.nodes()[0].slot
    told = one.announcer.stats().announcements
    own_valkey.ask("DEL", f"{{c:nodes}}:lease:{slot}")  # what its end is, too
    other.pass_leases(1)
    assert ["other"] == [node.name for node in other.directory.nodes()]
    assert [frozenset()] * 3 == list(other.directory.holders(one.boundaries(prompt(1))))
    one.pass_leases(1)
    other.pass_leases(1)
    assert [{slot}] * 3 == list(other.directory.holders(one.boundaries(prompt(1))))
    assert told == one.announcer.stats().announcements


def test_the_second_of_one_name_stays_out_while_the_first_lives(own_valkey: ValkeyServer, make_node) -> None:
    first = make_node(own_valkey.url, "one", identity=b"1")
    second = make_node(own_valkey.url, "one", identity=b"2")
    assert (True, False) == (first.announcer.stats().is_member, second.announcer.stats().is_member)
    with pytest.raises(NodeNameTakenError, match="'one' already"):
        second.directory.join(NodeProfile("one", b"2"))
    store_prompt(second.store, NAMESPACE, prompt(1))
    assert 6 == second.store.match(NAMESPACE, prompt(1)).blocks
    first.announcer.stop()
    second.pass_leases(1)
    assert second.announcer.stats().is_member


def test_a_node_gives_way_to_its_own_next_start_for_good(own_valkey: ValkeyServer, make_node) -> None:
    before = make_node(own_valkey.url, "one")
    after = make_node(own_valkey.url, "one")
    before.pass_leases(2)
    assert (False, True) == (before.announcer.stats().is_member, after.announcer.stats().is_member)
    assert 1 == len(after.directory.nodes())


def test_what_a_disk_kept_is_told_after_a_restart(own_valkey: ValkeyServer, make_node) -> None:
    before = make_node(own_valkey.url, "one", data="data")
    before.store_and_tell(prompt(1))
    keys = before.boundaries(prompt(1))
    before.store.flush()
    before.store.close()
    after = make_node(own_valkey.url, "one", data="data")
    slot = after.directory.nodes()[0].slot
    assert [{slot}] * 3 == list(after.directory.holders(keys))
    assert keys == after.boundaries(prompt(1))
    after.clock.advance(TIMES.entry_seconds)
    after.announcer.turn()
    assert [{slot}] * 3 == list(after.directory.holders(keys))


def test_events_that_were_lost_are_made_up_for_by_a_look_at_the_store(valkey: ValkeyServer, make_node) -> None:
    valkey.ask("FLUSHALL")
    node = make_node(valkey.url, "one", events_bytes=1 << 10)
    for number in range(30):
        store_prompt(node.store, NAMESPACE, prompt(number))
    for number in range(10):
        node.store.evict(NAMESPACE, prompt(number))
    node.announcer.turn()
    assert 1 == node.announcer.stats().snapshots, "not again at once, however often events are lost"
    node.clock.advance(LOOK_SECONDS_MIN)
    node.announcer.turn()
    slot = node.directory.nodes()[0].slot
    assert 2 == node.announcer.stats().snapshots
    found = [list(node.directory.holders(node.boundaries(prompt(number)))) for number in range(30)]
    assert [[frozenset()] * 3] * 10 + [[{slot}] * 3] * 20 == found


def test_who_leaves_in_order_takes_everything_back(valkey: ValkeyServer, make_node) -> None:
    valkey.ask("FLUSHALL")
    node = make_node(valkey.url, "one")
    node.store_and_tell(prompt(1))
    node.announcer.stop()
    node.announcer.stop()
    kept = valkey.ask("KEYS", "{c:[0-9]*}:[0-9a-f]*")
    assert b"*0\r\n" == kept


def test_nothing_of_a_cluster_stays_for_ever_and_nothing_of_a_prompt_is_told(valkey: ValkeyServer, make_node) -> None:
    valkey.ask("FLUSHALL")
    node = make_node(valkey.url, "one")
    node.store_and_tell([0x6A6B6C6D] * 24)
    assert node.directory.claim(b"k" * 16, 5.0) is not None
    lasting = (
        "local found = {} for _, key in ipairs(redis.call('KEYS', '*')) do "
        "if redis.call('PTTL', key) < 0 then found[#found + 1] = key end end return found"
    )
    assert b"*0\r\n" == valkey.ask("EVAL", lasting, "0")
    valkey.ask("SAVE")
    kept = valkey.dump_path.read_bytes()
    assert b"lease" in kept
    assert (False, False) == (b"a secret that" in kept, b"mlkj" in kept)


def test_a_directory_set_back_after_a_call_without_an_answer_is_found_out(
    own_valkey: ValkeyServer, make_node, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, withdrawn, other = make_node(own_valkey.url, "one").directory, bytes(16), bytes([1] * 16)
    slot = directory.nodes()[0].slot
    directory.announce([withdrawn])
    own_valkey.ask("SAVE")
    directory.withdraw([withdrawn])
    with monkeypatch.context() as patched:
        patched.setattr(ValkeyLink, "run_all", answered_by_nobody)
        with pytest.raises(DirectoryUnavailableError, match="lost"):
            directory.announce([other])
    own_valkey.kill()
    own_valkey.start()
    directory.announce([other])
    assert slot != directory.renew(NodeReport()).node.slot
    assert [frozenset()] == list(directory.holders([withdrawn]))


def answered_by_nobody(link: ValkeyLink, commands: Sequence[tuple[str | bytes | int, ...]]) -> None:
    link.probe(commands)
    raise DirectoryUnavailableError("the answer was lost")
