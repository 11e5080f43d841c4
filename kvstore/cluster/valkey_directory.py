"""The directory of a cluster in Valkey or Redis: a Membership that nodes share. valkey_scripts.py has the bytes."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.cluster import valkey_scripts as scripts
from kvstore.cluster.directory import ALL_GROUPS, DELETIONS_MAX, GROUPS, HOLDERS_MAX, SLOTS_MAX, Renewal, key_group
from kvstore.cluster.memory_directory import gone_node, is_same_node, name_taken, reported
from kvstore.cluster.valkey_lease import incarnation_text, lease_text, read_lease
from kvstore.cluster.valkey_link import script_command
from kvstore.errors import DirectoryUnavailableError
from kvstore.hashing import KEY_BYTES
from kvstore.nodes import Node

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvstore.clock import Clock
    from kvstore.cluster.directory import NodeProfile
    from kvstore.cluster.valkey_link import Command, ValkeyLink
    from kvstore.nodes import NodeReport

logger = logging.getLogger(__name__)
_SCRIPT_KEYS_MAX = 64  # boundaries in one script: at most some milliseconds of the server, sweeping included
_SCRIPTS_MAX = 16  # that are sent together
_FIELD = slice(2, 10)
_DELETIONS_MS = 30 * 24 * 3600 * 1000
_EPOCH_END = 1 << 53  # what Lua's numbers are exact to
_NEWS_SECONDS = 1.0  # a node that joins is known to the others after about this
_TURNS = 3  # renewals in which all groups are looked at once


@dataclass(frozen=True, slots=True)
class DirectoryTimes:
    """How long things last."""

    lease_seconds: float = 15.0
    entry_seconds: float = 3600.0  # an entry that is not repeated

    @property
    def lease_ms(self) -> int:
        """Of a node."""
        return round(self.lease_seconds * 1000)

    @property
    def period_ms(self) -> int:
        """In which each node says once all that it holds."""
        return round(self.entry_seconds * 500)

    @property
    def reissue_ms(self) -> int:
        """From the end of a lease until no entry of its slot can be left: see valkey_scripts."""
        return 6 * self.period_ms


class ValkeyDirectory:
    """A Membership of one node. Thread-safe; `_lock` guards what is known of other nodes, and no call is made under it.

    What it costs: `holders` one pipeline for 512 boundaries (some 40 us and 2 us each), `renew` three,
    and at every second one a look at all leases, some 250 bytes each. Once a second, while it is asked, it looks who
    has joined: some 10 us.
    """

    def __init__(self, link: ValkeyLink, name: str, times: DirectoryTimes, clock: Clock) -> None:
        """`name` is that of the cluster: what its keys begin with."""
        self._link = link
        self._name = name
        self._times = times
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[int, Node] = {}
        self._known_at: float | None = None
        self._news_at = clock.monotonic()
        self._last_join = b""
        self._foreign_told = False
        self._profile: NodeProfile | None = None
        self._node: Node | None = None
        # Of the groups that this node has written to: the last one that is sure to be there, and the last one that was
        # sent, which are the same unless a call had no answer. Only its own thread uses them.
        self._marks: dict[int, tuple[int, int]] = {}
        self._is_lost = False  # what it wrote to some group is not there
        self._turn = 0

    def join(self, profile: NodeProfile) -> Node:
        """Take a lease; see Membership."""
        self._profile = profile
        node = Node(
            profile.name,
            0,
            secrets.randbits(63),
            profile.addresses,
            profile.host_bytes,
            profile.disk_bytes,
            queue=0,
        )
        self._node = self._take(node, wanted=None, is_start=True)
        self._forget_marks()
        self._look()
        return self._node

    def renew(self, report: NodeReport) -> Renewal:
        """Renew the lease; see Membership."""
        node = reported(self._joined(), report)
        renewed = script_command(
            scripts.RENEW,
            [*self._node_keys(), self._lease_key(node.slot)],
            node.slot,
            incarnation_text(node.incarnation),
            self._lease_text(node),
            self._times.lease_ms,
            self._times.reissue_ms,
        )
        groups = self._next_groups()
        if not self._link.probe([renewed])[0]:
            node, groups = self._take(node, wanted=node.slot), ALL_GROUPS
        if node.slot == self._joined().slot:
            self._tell([(group, []) for group in sorted(groups)], announces=False)
            if self._is_lost:
                node = self._take(node, wanted=None)
        is_new = node.slot != self._joined().slot
        self._node = node
        if is_new:
            self._forget_marks()
            self._look()
        self._living()
        return Renewal(node, ALL_GROUPS if is_new else frozenset())

    def announce(self, keys: Sequence[bytes]) -> None:
        """Say what this node holds; see Membership."""
        self._tell(_batches(keys), announces=True)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Say what it holds no more; see Membership."""
        self._tell(_batches(keys), announces=False)

    def leave(self) -> None:
        """End the lease; see Membership."""
        node, self._node = self._node, None
        if node is not None:
            keys = [f"{{{self._name}:nodes}}:ends", self._lease_key(node.slot)]
            self._link.run(
                script_command(
                    scripts.LEAVE, keys, node.slot, incarnation_text(node.incarnation), self._times.reissue_ms
                )
            )

    def bury(self, epochs: Mapping[bytes, int]) -> Mapping[bytes, int]:
        """Tell of deleted namespaces; see Membership."""
        key = f"{{{self._name}:nodes}}:deletions"
        pairs = [word for entry in epochs.items() for word in entry]
        told = iter(self._link.run(script_command(scripts.BURY, [key], DELETIONS_MAX, _DELETIONS_MS, *pairs)))
        # What none of our nodes wrote is passed over.
        return {
            ns_id: int(epoch)
            for ns_id, epoch in zip(told, told, strict=True)
            if len(ns_id) == KEY_BYTES and epoch.isdigit() and int(epoch) < _EPOCH_END
        }

    def close(self) -> None:
        """Close connections; see Membership."""
        self._link.close()

    def nodes(self) -> Sequence[Node]:
        """The living nodes; see Directory."""
        living = self._living()
        with self._lock:
            known_at = self._known_at
        older = 0.0 if known_at is None else self._clock.monotonic() - known_at
        return tuple(replace(node, age_seconds=node.age_seconds + older) for _, node in sorted(living.items()))

    def departed(self) -> Sequence[Node]:
        """Nodes that are gone; see Directory. Asks the directory each time: it is for people."""
        living = self._look()
        told = self._link.run(("HGETALL", self._node_keys()[1]))
        named = [(_text(slot), name.decode("utf-8", "replace")) for name, slot in told.items()]
        slots = sorted((int(slot), name) for slot, name in named if slot.isdecimal() and int(slot) < SLOTS_MAX)
        return tuple(gone_node(name, slot) for slot, name in slots if slot not in living)

    def holders(self, keys: Sequence[bytes]) -> Sequence[frozenset[int]]:
        """Who holds boundaries; see Directory."""
        living = self._living()
        values = self._link.run_all([("HGET", self._bucket_key(key), key[_FIELD]) for key in keys])
        return tuple(frozenset(slot for slot in _slots(value) if slot in living) for value in values)

    def is_self(self, node: Node) -> bool:
        """Whether it is this node; see Directory."""
        return is_same_node(node, self._node, self._profile)

    def claim(self, key: bytes, seconds: float) -> ValkeyClaim | None:
        """Claim a key; see Directory."""
        me = f"{incarnation_text(self._joined().incarnation)} {secrets.token_hex(8)}"
        claim = ValkeyClaim(self._link, self._claim_key(key), me)
        dead = b""
        for _ in range(2):
            held = self._link.run(script_command(scripts.CLAIM, [claim.name], me, _ms(seconds), dead))
            if not held:
                return claim
            if self._is_alive(_text(held)):
                return None
            dead = held
        return None

    def claimed(self, key: bytes) -> float | None:
        """What a claim has left; see Directory."""
        name = self._claim_key(key)
        held, left_ms = self._link.run_all([("GET", name), ("PTTL", name)])
        return left_ms / 1000 if held and left_ms > 0 and self._is_alive(_text(held)) else None

    def _forget_marks(self) -> None:
        self._marks.clear()
        self._is_lost = False

    def _take(self, node: Node, *, wanted: int | None, is_start: bool = False) -> Node:
        """Take a lease, with the wanted slot if that is still there for this node."""
        assert self._profile is not None, "who has a node has a profile"
        command = script_command(
            scripts.JOIN,
            self._node_keys(),
            self._lease_key(""),
            node.name,
            self._profile.identity.hex(),
            incarnation_text(node.incarnation),
            self._lease_text(node),
            self._times.lease_ms,
            self._times.reissue_ms,
            "" if wanted is None else wanted,
            "1" if is_start else "0",
        )
        answer = self._link.probe([command])[0]
        if answer == b"taken":
            raise name_taken(node.name)
        if answer == b"full":
            raise DirectoryUnavailableError(f"all {SLOTS_MAX} slots of the directory are in use; try again in an hour")
        return replace(node, slot=int(answer))

    def _next_groups(self) -> frozenset[int]:
        """Those whose marks are due: each once in _TURNS renewals."""
        self._turn = (self._turn + 1) % _TURNS
        return frozenset(range(self._turn, GROUPS, _TURNS))

    def _tell(self, batches: Iterable[tuple[int, Sequence[bytes]]], *, announces: bool) -> None:
        """Write to groups, and note which of them are not as this node left them."""
        waiting = iter(batches)
        while some := list(islice(waiting, _SCRIPTS_MAX)):
            commands = [self._tell_command(group, keys, announces=announces) for group, keys in some]
            answers = self._link.run_all(commands)
            for (group, _), is_as_left in zip(some, answers, strict=True):
                sent = self._marks[group][1]
                self._marks[group] = sent, sent
                self._is_lost |= not is_as_left

    def _tell_command(self, group: int, keys: Sequence[bytes], *, announces: bool) -> Command:
        buckets: defaultdict[str, list[bytes]] = defaultdict(list)
        for key in keys:
            buckets[self._bucket_key(key)].append(key[_FIELD])
        sure, sent = self._marks.get(group, (0, 0))
        self._marks[group] = sure, sent + 1
        fields: list[str | bytes | int] = []
        for found in buckets.values():
            fields += [len(found), *found]
        return script_command(
            scripts.TELL,
            [f"{{{self._name}:{group}}}:marks", *buckets],
            "1" if announces else "0",
            self._joined().slot,
            sure,
            sent + 1,
            self._times.period_ms,
            HOLDERS_MAX,
            *fields,
        )

    def _living(self) -> dict[int, Node]:
        """Living nodes by slot, asked for again where what is known is too old."""
        with self._lock:
            known, at, news_at, last_join = self._known, self._known_at, self._news_at, self._last_join
        now = self._clock.monotonic()
        if at is None or now - at > self._times.lease_seconds / 2:
            return self._look()
        if now - news_at > min(_NEWS_SECONDS, self._times.lease_seconds / 16):
            return self._look_for_news(known, last_join)
        return known

    def _look(self) -> dict[int, Node]:
        """Ask which nodes live."""
        asked_at = self._clock.monotonic()
        known, last_join = self._ask_for_leases(b"")
        with self._lock:
            self._known, self._known_at, self._news_at, self._last_join = known, asked_at, asked_at, last_join
        return known

    def _look_for_news(self, known: dict[int, Node], last_join: bytes) -> dict[int, Node]:
        """Ask which nodes have joined since the last look; who has died shows at the next whole one."""
        asked_at = self._clock.monotonic()
        joined, last_join = self._ask_for_leases(last_join)
        known = {**known, **joined}
        with self._lock:
            self._known, self._news_at, self._last_join = known, asked_at, last_join
        return known

    def _ask_for_leases(self, last_join: bytes) -> tuple[dict[int, Node], bytes]:
        """Nodes that joined after some join, all the living after none; and which join was the last."""
        command = script_command(
            scripts.LOOK, self._node_keys(), self._lease_key(""), self._times.reissue_ms, last_join
        )
        last_join, *told = self._link.run(command)
        found = iter(told)
        leases = [read_lease(slot, text, left_ms) for slot, text, left_ms in zip(found, found, found, strict=True)]
        nodes = {node.slot: node for node in leases if node is not None}
        if len(nodes) < len(leases):
            self._warn_of(len(leases) - len(nodes))
        return nodes, last_join

    def _is_alive(self, claim: str) -> bool:
        owner = claim.partition(" ")[0]
        return any(incarnation_text(node.incarnation) == owner for node in self._living().values())

    def _joined(self) -> Node:
        if self._node is None:
            raise DirectoryUnavailableError("this node has not joined the directory yet, or left it")
        return self._node

    def _lease_text(self, node: Node) -> str:
        assert self._profile is not None, "who has a node has a profile"
        return lease_text(node, self._profile.identity, self._times.lease_ms)

    def _warn_of(self, foreign: int) -> None:
        """Say once that there is what no node of this cluster wrote."""
        with self._lock:
            was_told, self._foreign_told = self._foreign_told, True
        if not was_told:
            logger.warning(
                "leases in the directory that are none of kvstore's are passed over: leases=%d; let each cluster have "
                "a name (cluster.name) or a database of its own",
                foreign,
            )

    def _node_keys(self) -> list[str]:
        return [f"{{{self._name}:nodes}}:{kind}" for kind in ("ends", "names", "owners", "joins")]

    def _lease_key(self, slot: int | str) -> str:
        return f"{{{self._name}:nodes}}:lease:{slot}"

    def _bucket_key(self, key: bytes) -> str:
        bucket = (key[0] & 3) << 10 | key[1] << 2 | key[2] >> 6
        return f"{{{self._name}:{key_group(key)}}}:{bucket:x}"

    def _claim_key(self, key: bytes) -> bytes:
        return f"{self._name}:claim:".encode() + key


class ValkeyClaim:
    """A Claim in Valkey."""

    def __init__(self, link: ValkeyLink, name: bytes, value: str) -> None:
        self._link = link
        self.name = name
        self._value = value

    def renew(self, seconds: float) -> bool:
        """Hold it for longer; see Claim."""
        return bool(self._link.run(script_command(scripts.RENEW_CLAIM, [self.name], self._value, _ms(seconds))))

    def release(self) -> None:
        """End it; see Claim."""
        self._link.run(script_command(scripts.RELEASE_CLAIM, [self.name], self._value))


def _batches(keys: Sequence[bytes]) -> Iterator[tuple[int, Sequence[bytes]]]:
    """Keys by group, in the order of groups, as many at a time as one script takes."""
    by_group: defaultdict[int, list[bytes]] = defaultdict(list)
    for key in keys:
        by_group[key_group(key)].append(key)
    for group, found in sorted(by_group.items()):
        for first in range(0, len(found), _SCRIPT_KEYS_MAX):
            yield group, found[first : first + _SCRIPT_KEYS_MAX]


def _slots(value: bytes | None) -> Iterator[int]:
    """The slots of an entry, which has three bytes for each holder; none where there is no entry."""
    holders = value or b""
    return (holders[at] << 8 | holders[at + 1] for at in range(0, len(holders) - 2, 3))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _text(answer: bytes) -> str:
    return answer.decode("ascii", "replace")
