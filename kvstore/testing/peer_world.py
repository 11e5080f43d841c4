"""Nodes that bring, claim and compute prompts in simulated time, on one thread, with faults as a seed has them.

What decides is the product's: kvstore.cluster.peer_bring with its plan, lookup and claims, over a directory in memory.
Clock, network, stores and engines are stubs: a store is a table of keys and the bytes they stand for.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from kvstore import hashing
from kvstore.cluster.directory import NodeProfile
from kvstore.cluster.fetch import Fetched, FetchOutcome, WantedPrompt
from kvstore.cluster.memory_directory import MemoryDirectory, SharedDirectory
from kvstore.cluster.peer_bring import Bringing, Surroundings
from kvstore.cluster.peer_claims import HeldClaims
from kvstore.cluster.peers import PeerCounters
from kvstore.cluster.plan import Path
from kvstore.errors import DirectoryUnavailableError
from kvstore.testing.manual_clock import ManualClock
from kvstore.types import PLAIN_ROOT, KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.cluster.fetch import Wish
    from kvstore.cluster.memory_directory import MemoryClaim
    from kvstore.cluster.peer_settings import PeerSettings
    from kvstore.nodes import Node
    from kvstore.types import TokenArray

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=128)
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)
_KEY = b"k" * 16
_ANNOUNCE_SECONDS = 2.0
_RENEW_SECONDS = 5.0
_CHUNK_BLOCKS = 4


def value_of(key: bytes) -> bytes:
    """The right bytes of a block."""
    return key[::-1]


@dataclass
class Request:
    """A prompt that an engine of a node asked for, and what became of it."""

    node: SimulatedNode
    wanted: WantedPrompt
    began: float
    ends_at: float
    clock: ManualClock
    computes_from: float | None = None  # when its engine was told to go on
    computed_tokens: int = 0

    def left_seconds(self) -> float:
        """See kvstore.cluster.fetch.Wish."""
        return max(0.0, self.ends_at - self.clock.monotonic()) if self.node.is_up else 0.0


@dataclass
class World:
    """Time, the network and all nodes.

    `severed` are pairs of names that cannot reach each other; of transfers, `broken_ratio` end halfway.
    """

    seed: int
    settings: PeerSettings
    clock: ManualClock = field(default_factory=ManualClock)
    severed: set[frozenset[str]] = field(default_factory=set)
    broken_ratio: float = 0.0
    requests: list[Request] = field(default_factory=list)
    nodes: dict[str, SimulatedNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.shared = SharedDirectory(self.clock)
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.clock.monotonic() + seconds, next(self._order), act))

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        end = self.clock.monotonic() + seconds
        while self._events and self._events[0][0] <= end:
            at, _, act = heapq.heappop(self._events)
            self.clock.advance(max(0.0, at - self.clock.monotonic()))
            act()
        self.clock.advance(max(0.0, end - self.clock.monotonic()))

    def add(self, name: str) -> SimulatedNode:
        """A node that starts now."""
        self.nodes[name] = node = SimulatedNode(self, name)
        return node


class SimulatedNode:
    """A node: LocalBlocks, PeerBlocks, and the engine in front of it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_up = True
        self.sees_directory = True
        self.answers_wrongly = False
        self.held: dict[bytes, bytes] = {}
        self.counters = PeerCounters()
        self._spent_seconds = 0.0
        self.start()

    def start(self) -> None:
        """Begin anew, with nothing."""
        self.is_up = True
        self.started_at = self.world.clock.monotonic()
        self.held = {}
        self.membership = MemoryDirectory(self.world.shared)
        self.membership.join(NodeProfile(self.name, self.name.encode().ljust(16), (f"sim:{self.name}",)))
        self.claims = HeldClaims(self.world.clock)
        self.bringing = Bringing(
            Surroundings(
                directory=_Seen(self),
                local=self,
                peers=self,
                claims=self.claims,
                clock=self.world.clock,
                random=self.world.random,
            ),
            self.world.settings,
            self.counters,
        )
        self.world.after(_RENEW_SECONDS, self._renewer(self.membership))

    def kill(self) -> None:
        """All is gone; its lease ends by itself."""
        self.is_up = False
        self.held = {}

    def ask(self, prompt: Sequence[int]) -> Request:
        """An engine asks for a prompt, and computes what it does not get."""
        world = self.world
        now = world.clock.monotonic()
        wanted = WantedPrompt(NAMESPACE, PLAIN_ROOT, np.asarray(prompt, dtype=np.uint32))
        request = Request(self, wanted, now, now + world.settings.fetch_seconds_max, world.clock)
        world.requests.append(request)
        self._step(request, self.bringing.steps(wanted, request, world.settings.prefill))
        return request

    def lose(self, wanted: WantedPrompt, from_block: int) -> None:
        """Blocks leave, and the directory is not told."""
        for key in self.keys(wanted)[from_block:]:
            self.held.pop(key, None)

    def present_blocks(self, wanted: WantedPrompt) -> int:
        """See kvstore.cluster.peer_bring.LocalBlocks."""
        present = 0
        for key in self.keys(wanted):
            if key not in self.held:
                break
            present += 1
        return present

    def keys(self, wanted: WantedPrompt) -> Sequence[bytes]:
        """See kvstore.cluster.peer_bring.LocalBlocks."""
        return keys_of(wanted.prompt)

    def fetch(self, node: Node, wanted: WantedPrompt, first: int, wish: Wish) -> Fetched:
        """See kvstore.cluster.peer_bring.PeerBlocks: takes simulated time, and what the network does to it."""
        settings, dice = self.world.settings, self.world.random
        holder = self.world.nodes[node.name]
        is_cut = frozenset((self.name, node.name)) in self.world.severed
        if not holder.is_up or is_cut or wish.left_seconds() <= 0:
            self._spent_seconds += min(settings.answer_seconds_max, wish.left_seconds())
            return Fetched(FetchOutcome.UNAVAILABLE, first)
        depth = holder.present_blocks(wanted)
        if depth <= first:
            return Fetched(FetchOutcome.STALE, first)
        if dice.random() < self.world.broken_ratio:
            depth = first + (depth - first) // 2 // _CHUNK_BLOCKS * _CHUNK_BLOCKS
            outcome = FetchOutcome.UNAVAILABLE
        elif holder.answers_wrongly:
            depth, outcome = first, FetchOutcome.CORRUPT
        else:
            outcome = FetchOutcome.FETCHED
        keys = self.keys(wanted)[:depth]
        self._keep(keys, [holder.held[key] for key in keys])
        moved_bytes = (depth - first) * LAYOUT.block_bytes
        self._spent_seconds += settings.path.latency_seconds + moved_bytes / settings.path.bytes_per_second
        return Fetched(outcome, depth, depth - first, moved_bytes)

    def path(self, node: Node) -> Path:
        """See kvstore.cluster.peer_bring.PeerBlocks."""
        return self.world.settings.path if node.addresses else Path(1.0, 1.0)

    def queue(self, node: Node) -> int:
        """See kvstore.cluster.peer_bring.PeerBlocks."""
        return node.queue

    def _step(self, request: Request, steps: Iterator[float]) -> None:
        if not self.is_up:
            return
        self._spent_seconds = 0.0
        pause_seconds = next(steps, None) if request.left_seconds() else None
        spent_seconds = self._spent_seconds
        if pause_seconds is None:
            self.world.after(spent_seconds, lambda: self._compute(request))
        else:
            self.world.after(spent_seconds + pause_seconds, lambda: self._step(request, steps))

    def _compute(self, request: Request) -> None:
        if not self.is_up:
            return
        request.computes_from = self.world.clock.monotonic()
        present = self.present_blocks(request.wanted) * LAYOUT.block_tokens
        missing = request.wanted.blocks * LAYOUT.block_tokens - present
        request.computed_tokens = missing
        seconds = self.world.settings.prefill.seconds(present, missing)
        gives_up = self.world.random.random() < 0.1 and self.world.severed
        self.world.after(seconds, lambda: self._store(request, gives_up=bool(gives_up)))

    def _store(self, request: Request, *, gives_up: bool) -> None:
        """The engine has computed it, or its request was aborted."""
        if not self.is_up:
            return
        keys = self.keys(request.wanted)
        if not gives_up:
            self._keep(keys, [value_of(key) for key in keys])
        self.claims.stage_ended(_Stored(self), b"", request.wanted.prompt)  # type: ignore[arg-type]

    def _keep(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        self.held.update(zip(keys, values, strict=True))
        membership = self.membership

        def announce() -> None:
            if self.is_up and self.sees_directory and membership is self.membership:
                step = self.world.settings.announce_tokens // LAYOUT.block_tokens
                membership.announce([key for key in keys[step - 1 :: step] if key in self.held])

        self.world.after(_ANNOUNCE_SECONDS, announce)

    def _renewer(self, membership: MemoryDirectory) -> Callable[[], None]:
        def renew() -> None:
            if not self.is_up or membership is not self.membership:
                return
            if self.sees_directory:
                membership.renew(0)
            self.world.after(_RENEW_SECONDS, renew)

        return renew


class _Stored:
    """What claims ask of a kvstore.store.space.Space."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node
        self.ids = np.empty(0)

    def prompt_keys(self, root_key: bytes, prompt: TokenArray) -> list[bytes]:
        return [root_key, *keys_of(prompt)]

    def find(self, _root_key: bytes, prompt: TokenArray) -> _Stored:
        self.ids = np.empty(self._node.present_blocks(WantedPrompt(NAMESPACE, PLAIN_ROOT, prompt)))
        return self


class _Seen:
    """The directory as one node sees it, or does not."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node

    def nodes(self) -> Sequence[Node]:
        return self._membership().nodes()

    def holders(self, keys: Sequence[bytes]) -> Sequence[frozenset[int]]:
        return self._membership().holders(keys)

    def is_self(self, node: Node) -> bool:
        return self._node.membership.is_self(node)

    def claim(self, key: bytes, seconds: float) -> MemoryClaim | None:
        return self._membership().claim(key, seconds)

    def claimed(self, key: bytes) -> float | None:
        return self._membership().claimed(key)

    def _membership(self) -> MemoryDirectory:
        if not self._node.sees_directory or not self._node.is_up:
            raise DirectoryUnavailableError("the directory cannot be reached")
        return self._node.membership


def keys_of(prompt: TokenArray) -> list[bytes]:
    """The keys of a prompt's blocks."""
    return _keys_of(prompt.tobytes())


@lru_cache(maxsize=64)
def _keys_of(packed: bytes) -> list[bytes]:
    prompt = np.frombuffer(packed, dtype=np.uint32)
    return hashing.split_keys(hashing.block_keys(_KEY, _KEY, prompt, LAYOUT.block_tokens))
