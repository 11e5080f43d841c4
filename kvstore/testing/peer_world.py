"""Nodes that bring, claim and compute prompts in simulated time, on one thread, with faults as a seed has them.

What decides is the product's: kvstore.cluster.peer_bring with its plan, lookup, claims and places, and the announcer
with what it tells. Clock, network, directory, stores and engines are stubs: a store is a table of keys and the bytes
they stand for, with a log of events.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from kvstore import hashing
from kvstore.cluster.announcer import Announcer, AnnounceSettings
from kvstore.cluster.directory import NodeProfile
from kvstore.cluster.fetch import Fetched, FetchOutcome, WantedPrompt
from kvstore.cluster.peer_bring import Bringing, Surroundings
from kvstore.cluster.peer_claims import HeldClaims
from kvstore.cluster.peer_links import PeerLinks
from kvstore.cluster.peer_settings import PeerCredentials
from kvstore.cluster.peers import PeerCounters
from kvstore.cluster.plan import Path
from kvstore.events import EventKind, EventLog
from kvstore.testing.manual_clock import ManualClock
from kvstore.testing.world_directory import Road, WorldDirectory, WorldMembership
from kvstore.types import PLAIN_ROOT, KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from kvstore.cluster.fetch import Wish
    from kvstore.cluster.peer_settings import PeerSettings
    from kvstore.events import EventPage
    from kvstore.nodes import Node
    from kvstore.types import TokenArray

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=128)
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)
_KEY = b"k" * 16
_NS_ID = b"n" * 16
TURN_SECONDS = 0.25  # of an announcer
LEASE_SECONDS = 15.0
_LOG_BYTES = 1 << 16
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

    `severed` are pairs of names of which the first cannot send to the second; of transfers, `broken_ratio` end halfway.
    """

    seed: int
    settings: PeerSettings
    clock: ManualClock = field(default_factory=ManualClock)
    severed: set[tuple[str, str]] = field(default_factory=set)
    broken_ratio: float = 0.0
    requests: list[Request] = field(default_factory=list)
    nodes: dict[str, SimulatedNode] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)  # what did not hold on the way

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.directory = WorldDirectory(self.clock, LEASE_SECONDS)
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    @property
    def waiting(self) -> int:
        """Things that are still to be done."""
        return len(self._events)

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
        self.road = Road(world.random)
        self.answers_wrongly = False
        self.slowness = 1.0  # how many times longer it takes to send than its peers believe
        self.links = PeerLinks(PeerCredentials(), fetches_per_holder_max=world.settings.fetches_per_holder_max)
        self.fetches_most: Counter[str] = Counter()  # that were under way at once, by holder
        self.counters = PeerCounters()
        self._spent_seconds = 0.0
        self.start()

    def start(self) -> None:
        """Begin anew, with nothing."""
        self.is_up = True
        self.started_at = self.world.clock.monotonic()
        self.store = SimulatedStore(f"{self.name}@{self.started_at}", self.world.clock)
        self.membership = WorldMembership(self.world.directory, self.road)
        settings = AnnounceSettings(announce_tokens=self.world.settings.announce_tokens, lease_seconds=LEASE_SECONDS)
        self.announcer = Announcer(self.store, self.membership, settings=settings, clock=self.world.clock)
        self.announcer.enter(NodeProfile(self.name, self.name.encode().ljust(16), (f"sim:{self.name}",)))
        self._turn(self.announcer)
        self.claims = HeldClaims(self.world.clock)
        self.bringing = Bringing(
            Surroundings(
                directory=self.membership,
                local=self,
                peers=self,
                claims=self.claims,
                clock=self.world.clock,
                random=self.world.random,
            ),
            self.world.settings,
            self.counters,
        )

    def kill(self) -> None:
        """All is gone; its lease ends by itself."""
        self.is_up = False
        self.store.lose(list(self.store.held))

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
        """Blocks leave."""
        self.store.lose(self.keys(wanted)[from_block:])

    def present_blocks(self, wanted: WantedPrompt) -> int:
        """See kvstore.cluster.peer_bring.LocalBlocks."""
        present = 0
        for key in self.keys(wanted):
            if key not in self.store.held:
                break
            present += 1
        return present

    def keys(self, wanted: WantedPrompt) -> Sequence[bytes]:
        """See kvstore.cluster.peer_bring.LocalBlocks."""
        return keys_of(wanted.prompt)

    def fetch(self, node: Node, wanted: WantedPrompt, first: int, wish: Wish) -> Fetched:
        """See kvstore.cluster.peer_bring.PeerBlocks: takes simulated time, and what the network does to it."""
        settings = self.world.settings
        holder = self.world.nodes[node.name]
        is_cut = not self.world.severed.isdisjoint({(self.name, node.name), (node.name, self.name)})
        if not holder.is_up or is_cut or wish.left_seconds() <= 0:
            self._spent_seconds += min(settings.answer_seconds_max, wish.left_seconds())
            return Fetched(FetchOutcome.UNAVAILABLE, first)
        place = self.links.place(node)
        is_free = place.__enter__()
        before = self._spent_seconds
        fetched = self._bring(holder, wanted, first, wish) if is_free else Fetched(FetchOutcome.BUSY, first)
        self.world.after(self._spent_seconds - before, lambda: _end(place))
        self.fetches_most[node.name] = max(self.fetches_most[node.name], self.links.fetches(node.name))
        return fetched

    def _bring(self, holder: SimulatedNode, wanted: WantedPrompt, first: int, wish: Wish) -> Fetched:
        settings, dice = self.world.settings, self.world.random
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
        block_seconds = LAYOUT.block_bytes / settings.path.bytes_per_second * holder.slowness
        in_time = first + int(wish.left_seconds() / block_seconds) // _CHUNK_BLOCKS * _CHUNK_BLOCKS
        if in_time < depth:
            depth, outcome = in_time, FetchOutcome.CANCELLED
            self._spent_seconds += wish.left_seconds()
        else:
            self._spent_seconds += settings.path.latency_seconds + (depth - first) * block_seconds
        keys = self.keys(wanted)[:depth]
        self.store.keep(keys, [holder.store.held[key] for key in keys])
        moved_bytes = (depth - first) * LAYOUT.block_bytes
        return Fetched(outcome, depth, depth - first, moved_bytes)

    def path(self, node: Node) -> Path:
        """See kvstore.cluster.peer_bring.PeerBlocks."""
        return self.world.settings.path if node.addresses else Path(1.0, 1.0)

    def queue(self, node: Node) -> int:
        """See kvstore.cluster.peer_bring.PeerBlocks."""
        return max(node.queue, self.links.fetches(node.name))

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
            self.store.keep(keys, [value_of(key) for key in keys])
        self.claims.stage_ended(_Stored(self), b"", request.wanted.prompt)  # type: ignore[arg-type]

    def _turn(self, announcer: Announcer) -> None:
        """What the announcer's thread does, for as long as this start of the node lasts."""
        if self.is_up and announcer is self.announcer:
            announcer.turn()
            self.world.after(TURN_SECONDS, lambda: self._turn(announcer))


class SimulatedStore:
    """A kvstore.cluster.announcer.AnnouncedStore: keys and bytes, and the log of what came and went."""

    def __init__(self, epoch: str, clock: ManualClock) -> None:
        self._clock = clock
        self.stored_at: dict[bytes, float] = {}  # of what is held
        self._log = EventLog(epoch, _LOG_BYTES)
        self.held: dict[bytes, bytes] = {}
        self._places: dict[bytes, int] = {}  # of each block in its prompt

    def keep(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Blocks of a prompt from its beginning, of which some may be here."""
        known = next((place for place, key in enumerate(keys) if key not in self.held), len(keys))
        self.stored_at.update((key, self._clock.monotonic()) for key in keys if key not in self.held)
        self.held.update(zip(keys, values, strict=True))
        self._places.update((key, place) for place, key in enumerate(keys))
        if keys[known:]:
            tokens = LAYOUT.block_tokens
            self._log.append(EventKind.STORED, _NS_ID, keys=tuple(keys[known:]), first_block=known, block_tokens=tokens)

    def lose(self, keys: Sequence[bytes]) -> None:
        """Blocks leave, if they are here."""
        gone = tuple(key for key in keys if self.held.pop(key, None) is not None)
        for key in gone:
            del self.stored_at[key]
        if gone:
            self._log.append(EventKind.REMOVED, _NS_ID, keys=gone, last_copy=True)

    def events(self, *, after: int = 0, limit: int = 1000, wait_seconds: float = 0.0) -> EventPage:
        """See AnnouncedStore."""
        return self._log.read(after=after, limit=limit, wait_seconds=wait_seconds)

    def boundaries(self, every_tokens: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """See AnnouncedStore."""
        step = every_tokens // LAYOUT.block_tokens
        yield _NS_ID, [key for key in self.held if (self._places[key] + 1) % step == 0]


def _end(place: AbstractContextManager[bool]) -> None:
    place.__exit__(None, None, None)


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


def keys_of(prompt: TokenArray) -> list[bytes]:
    """The keys of a prompt's blocks."""
    return _keys_of(prompt.tobytes())


@lru_cache(maxsize=64)
def _keys_of(packed: bytes) -> list[bytes]:
    prompt = np.frombuffer(packed, dtype=np.uint32)
    return hashing.split_keys(hashing.block_keys(_KEY, _KEY, prompt, LAYOUT.block_tokens))
