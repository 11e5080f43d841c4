"""Many nodes before one directory, in simulated time: the product's announcer, directory and look-ups.

ACTING of them have engines and a million blocks each, and what these send is counted. IDLE more keep a lease as all do;
what they send is counted apart. Of the others there are leases that last: whoever looks at all leases gets them, too.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING

from bench_directory import BLOCKS_PER_BOUNDARY, BLOCKS_PER_NODE
from instant_server import CountedLink, InstantServer, Traffic

from kvstore.cluster.announcer import Announcer, AnnounceSettings
from kvstore.cluster.deletions import Deletions
from kvstore.cluster.directory import NodeProfile
from kvstore.cluster.memory_directory import reported
from kvstore.cluster.peer_bring import Bringing, Surroundings
from kvstore.cluster.peer_claims import HeldClaims
from kvstore.cluster.peer_settings import PeerSettings
from kvstore.cluster.plan import Path
from kvstore.cluster.valkey_directory import DirectoryTimes, ValkeyDirectory
from kvstore.cluster.valkey_lease import lease_text
from kvstore.nodes import Node, NodeReport
from kvstore.testing.peer_world import LAYOUT, SimulatedNode, SimulatedStore, World

if TYPE_CHECKING:
    from collections.abc import Sequence

BOUNDARIES = BLOCKS_PER_NODE // BLOCKS_PER_BOUNDARY  # of a node
ACTING = 10  # nodes with engines and blocks
IDLE = 90  # nodes without, at most
WINDOW_SECONDS = 30.0  # that are counted; in it each boundary is repeated once, as in entry_seconds / 2 otherwise
TIMES = DirectoryTimes()
LOOKUPS_PER_SECOND = 2.0  # of a node
SYSTEM_PROMPTS = 8
SYSTEM_TOKENS = 4096
TAIL_TOKENS = 4096
FOLLOW_UP_RATIO = 0.3  # of prompts: one from before, on any node
DELETIONS = 16  # that the directory remembers
REPORT = NodeReport(3, version="0.1.0", host_used_bytes=10**11, disk_used_bytes=10**12, leases=7, deletions=10**15)
# 131 kB a token at 25 Gb/s, in the simulated layout's bytes.
SETTINGS = PeerSettings(path=Path(latency_seconds=0.002, bytes_per_second=3e6))


class FullStore(SimulatedStore):
    """A store that is full: for each boundary that comes the oldest one leaves."""

    def __init__(self, epoch: str, world: ScaleWorld, boundaries: int) -> None:
        super().__init__(epoch, world.clock)
        step = SETTINGS.announce_tokens // LAYOUT.block_tokens
        old = [world.random.randbytes(16) for _ in range(boundaries)]
        self._old = deque(old)
        self._step = step
        for key in old:
            self.held[key] = b""
            self.stored_at[key] = 0.0
            self._places[key] = step - 1

    def keep(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """See SimulatedStore."""
        come = sum(key not in self.held for key in keys[self._step - 1 :: self._step])
        super().keep(keys, values)
        self.lose([self._old.popleft() for _ in range(min(come, len(self._old)))])


class ScaleWorld(World):
    """Many nodes before one directory; those with engines are counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.server = InstantServer(self.clock, DELETIONS)
        self.traffic = Traffic()
        self.others = Traffic()
        self.acting: list[ScaleNode] = []
        self.prompts: deque[list[int]] = deque(maxlen=256)
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.lookups = 0

    def begin(self, nodes: int) -> None:
        """Nodes start one after the other, within half a lease."""
        names = [f"node-{number:04d}" for number in range(nodes)]
        self.server.add_leases([lease_of(name) for name in names[ACTING + IDLE :]])
        for number, name in enumerate(names[: ACTING + IDLE]):
            start = self._start_acting if number < ACTING else self._start_idle
            self.after(self.random.random() * TIMES.lease_seconds / 2, partial(start, name))

    def _start_idle(self, name: str) -> None:
        self.nodes[name] = ScaleNode(self, name, 0)

    def _start_acting(self, name: str) -> None:
        self.nodes[name] = node = ScaleNode(self, name, BOUNDARIES)
        self.acting.append(node)
        self._ask_later(node)

    def _ask_later(self, node: ScaleNode) -> None:
        self.after(self.random.expovariate(LOOKUPS_PER_SECOND), lambda: self._ask(node))

    def _ask(self, node: ScaleNode) -> None:
        if self.prompts and self.random.random() < FOLLOW_UP_RATIO:
            prompt = self.random.choice(self.prompts)
        else:
            begin = self.random.randrange(SYSTEM_PROMPTS) << 16
            tail = self.random.randrange(1 << 20, 1 << 31)
            prompt = [*range(begin, begin + SYSTEM_TOKENS), *range(tail, tail + TAIL_TOKENS)]
            self.prompts.append(prompt)
        self.lookups += 1
        self.asked[prompt[0], prompt[-1]] += 1
        node.ask(prompt)
        self._ask_later(node)


class ScaleNode(SimulatedNode):
    """A node whose membership is the one for Valkey."""

    def __init__(self, world: ScaleWorld, name: str, boundaries: int) -> None:
        self._scale_world = world
        self._boundaries = boundaries
        super().__init__(world, name)

    def start(self) -> None:
        """See SimulatedNode."""
        world, settings = self._scale_world, self._scale_world.settings
        self.is_up, self.started_at = True, world.clock.monotonic()
        self.store = FullStore(self.name, world, self._boundaries)
        times = DirectoryTimes(TIMES.lease_seconds, 2 * WINDOW_SECONDS)
        self.membership = directory_of(world, times, is_counted=bool(self._boundaries))  # type: ignore[assignment]
        self.announcer = Announcer(
            self.store,
            self.membership,
            settings=AnnounceSettings(lease_seconds=times.lease_seconds, entry_seconds=times.entry_seconds),
            clock=world.clock,
            report=lambda: REPORT,
            upkeep=Deletions(Undeleted(), self.membership, None, world.clock).sync,
        )
        self.announcer.enter(profile_of(self.name))
        self._turn(self.announcer)
        self.claims = HeldClaims(world.clock)
        around = Surroundings(self.membership, self, self, self.claims, world.clock, world.random)
        self.bringing = Bringing(around, settings, self.counters)


class Undeleted:
    """A store with no namespace that was deleted."""

    def delete_namespace(self, ns_id: bytes) -> int:
        """See kvstore.cluster.deletions.DeletingStore."""
        del ns_id
        return 0


def directory_of(world: ScaleWorld, times: DirectoryTimes, *, is_counted: bool) -> ValkeyDirectory:
    link = CountedLink(world.server, world.traffic if is_counted else world.others)
    return ValkeyDirectory(link, "kvstore", times, world.clock)  # type: ignore[arg-type]


def profile_of(name: str) -> NodeProfile:
    return NodeProfile(name, name.encode().ljust(16), (f"tls://{name}.example:7070",), 10**12, 10**13)


def lease_of(name: str) -> str:
    """What a node says of itself with its lease."""
    profile = profile_of(name)
    node = Node(name, 0, 1 << 62, profile.addresses, profile.host_bytes, profile.disk_bytes, queue=0)
    return lease_text(reported(node, REPORT), profile.identity, TIMES.lease_ms)
