"""The server of a simulated directory: what Valkey answers to a node, in simulated time and without a socket.

It counts what goes over the wire, in the bytes of the protocol (RESP2, https://valkey.io/topics/protocol/). Only what
nodes send while nothing fails is understood, and the marks are always as they were left.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.cluster import valkey_scripts as scripts
from kvstore.cluster.valkey_link import PIPELINE_COMMANDS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.clock import Clock
    from kvstore.cluster.valkey_link import Answer, Command

_LEFT_SECONDS_MAX = 14.0  # of a lease that lasts
_TELL_VALUES = 6  # of a script that tells, before its buckets


@dataclass
class Traffic:
    """What some nodes sent and got: by kind, in commands, boundaries and bytes; and how often they waited for it."""

    commands: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    keys: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    got_bytes: Counter[str] = field(default_factory=Counter)
    round_trips: int = 0

    def clear(self) -> None:
        """Begin to count anew."""
        for counter in (self.commands, self.keys, self.sent_bytes, self.got_bytes):
            counter.clear()
        self.round_trips = 0

    def add(self, shares: dict[str, int], sent: int, got: int) -> None:
        """Count a command that is of several kinds by how many of its keys are of each."""
        whole = sum(shares.values())
        for kind, keys in shares.items():
            self.commands[kind] += keys / whole
            self.keys[kind] += keys
            self.sent_bytes[kind] += sent * keys // whole
            self.got_bytes[kind] += got * keys // whole


class InstantServer:
    """Leases, entries and claims, each until its time is over."""

    def __init__(self, clock: Clock, deletions: int) -> None:
        self._clock = clock
        self._leases: dict[str, tuple[bytes, float]] = {}  # text and end, by slot
        self._entries: dict[tuple[str, bytes], dict[int, None]] = {}  # slots by bucket and field, oldest first
        self._claims: dict[str | bytes, tuple[bytes, float]] = {}
        self._buried = [word for n in range(deletions) for word in (n.to_bytes(16, "big"), b"1787000000000000")]
        self._scripts: dict[str, Callable[[Sequence[Any], Sequence[Any]], tuple[dict[str, int], Answer]]] = {
            hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest(): call
            for script, call in (
                (scripts.JOIN, self._join),
                (scripts.RENEW, self._renew),
                (scripts.LOOK, self._look),
                (scripts.TELL, self._tell),
                (scripts.BURY, lambda _keys, _values: ({"deletions": 1}, self._buried)),
                (scripts.CLAIM, self._claim),
                (scripts.RELEASE_CLAIM, self._release),
            )
        }

    def add_leases(self, texts: Sequence[str]) -> None:
        """Nodes that are there, and say no more."""
        for text in texts:
            self._leases[str(len(self._leases))] = text.encode(), math.inf

    def answer(self, command: Command) -> tuple[dict[str, int], Answer]:
        """What is answered, and of what kind the command was: its keys by kind."""
        word, *rest = command
        if word == "EVALSHA":
            count = int(rest[1])
            return self._scripts[str(rest[0])](rest[2 : 2 + count], rest[2 + count :])
        if word == "HGET":
            holders = self._entries.get((str(rest[0]), rest[1]))  # type: ignore[arg-type]
            packed = b"".join(slot.to_bytes(2, "big") + b"\0" for slot in holders or ())
            return {"holders": 1}, packed or None
        held = self._claims.get(rest[0])  # type: ignore[arg-type]
        left_ms = 0 if held is None else round((held[1] - self._now()) * 1000)
        if word == "GET":
            return {"claimed": 1}, held[0] if held is not None and left_ms > 0 else None
        assert word == "PTTL", word
        return {"claimed": 1}, left_ms if left_ms > 0 else -2

    def _now(self) -> float:
        return self._clock.monotonic()

    def _join(self, _keys: Sequence[Any], values: Sequence[Any]) -> tuple[dict[str, int], Answer]:
        slot = len(self._leases)
        self._leases[str(slot)] = values[4].encode(), self._now() + values[5] / 1000
        return {"join": 1}, slot

    def _renew(self, _keys: Sequence[Any], values: Sequence[Any]) -> tuple[dict[str, int], Answer]:
        self._leases[str(values[0])] = values[2].encode(), self._now() + values[3] / 1000
        return {"renew": 1}, 1

    def _look(self, _keys: Sequence[Any], values: Sequence[Any]) -> tuple[dict[str, int], Answer]:
        """Slots are the order of joins here."""
        last, now = len(self._leases), self._now()
        first = int(values[2]) if values[2] else 0
        told: list[Any] = [str(last).encode()]
        for slot in range(first, last):
            text, until = self._leases[str(slot)]
            if until > now:
                told += [str(slot).encode(), text, round(min(until - now, _LEFT_SECONDS_MAX) * 1000)]
        return {"news" if values[2] else "look": 1}, told

    def _tell(self, keys: Sequence[Any], values: Sequence[Any]) -> tuple[dict[str, int], Answer]:
        shares, slot, at = Counter[str](), int(values[1]), _TELL_VALUES
        for bucket in keys[1:]:
            for name in values[at + 1 : at + 1 + values[at]]:
                holders = self._entries.setdefault((bucket, name), {})
                was_there = holders.pop(slot, slot) is None
                if values[0] == "1":
                    shares["repeat" if was_there else "announce"] += 1
                    holders[slot] = None
                    if len(holders) > values[5]:
                        del holders[next(iter(holders))]
                else:
                    shares["withdraw"] += 1
                if not holders:
                    del self._entries[bucket, name]
            at += 1 + values[at]
        return shares or {"marks": 1}, 1

    def _claim(self, keys: Sequence[Any], values: Sequence[Any]) -> tuple[dict[str, int], Answer]:
        held = self._claims.get(keys[0])
        if held is not None and held[1] > self._now():
            return {"claim": 1}, held[0]
        self._claims[keys[0]] = values[0].encode(), self._now() + values[1] / 1000
        return {"claim": 1}, b""

    def _release(self, keys: Sequence[Any], _values: Sequence[Any]) -> tuple[dict[str, int], Answer]:
        return {"release": 1}, int(self._claims.pop(keys[0], None) is not None)


class CountedLink:
    """What a ValkeyDirectory asks of its ValkeyLink, with no way between."""

    def __init__(self, server: InstantServer, traffic: Traffic) -> None:
        self._server = server
        self._traffic = traffic

    def run(self, command: Command) -> Answer:
        """See ValkeyLink."""
        return self.run_all([command])[0]

    def run_all(self, commands: Sequence[Command]) -> list[Answer]:
        """See ValkeyLink."""
        answers = []
        for command in commands:
            shares, answer = self._server.answer(command)
            self._traffic.add(shares, wire_bytes(list(command), is_sent=True), wire_bytes(answer, is_sent=False))
            answers.append(answer)
        self._traffic.round_trips += -(-len(commands) // PIPELINE_COMMANDS_MAX)
        return answers

    probe = run_all

    def close(self) -> None:
        """Nothing to close."""


def wire_bytes(value: Answer, *, is_sent: bool) -> int:
    """The bytes of a command or an answer in RESP2. Numbers are sent as text."""
    if value is None:
        return len("$-1\r\n")
    if isinstance(value, int) and not is_sent:
        return len(f":{value}\r\n")
    if isinstance(value, list):
        return len(f"*{len(value)}\r\n") + sum(wire_bytes(each, is_sent=is_sent) for each in value)
    size = len(value) if isinstance(value, bytes) else len(str(value).encode())
    return len(f"${size}\r\n") + size + 2
