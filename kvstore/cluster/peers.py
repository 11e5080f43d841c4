"""The peers of one node, as its store sees them: prefetches that ask other nodes, claims, and what that came to."""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.clock import SystemClock
from kvstore.cluster.fetch import Fetcher, WantedPrompt
from kvstore.cluster.peer_bring import Bringing, Surroundings
from kvstore.cluster.peer_claims import HeldClaims
from kvstore.cluster.peer_links import PeerLinks
from kvstore.cluster.peer_paths import PeerPaths
from kvstore.cluster.peer_prefetch import BringJob, BringJobs, PeerPrefetch
from kvstore.cluster.peer_settings import peer_credentials, peer_settings
from kvstore.cluster.prefill import PrefillFit
from kvstore.stats import PeerStats
from kvstore.store.movers import Movers
from kvstore.tokens import as_prompt
from kvstore.types import PLAIN_ROOT, Tier, TierRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.api import Prefetch
    from kvstore.clock import Clock
    from kvstore.cluster.deletions import Deletions
    from kvstore.cluster.directory import Directory
    from kvstore.cluster.fetch import Fetched, Wish
    from kvstore.cluster.peer_settings import PeerCredentials, PeerSettings
    from kvstore.cluster.plan import Path
    from kvstore.cluster.prefill import PrefillModel
    from kvstore.cluster_config import ClusterConfig
    from kvstore.nodes import Node
    from kvstore.store import Store
    from kvstore.store.space import Space
    from kvstore.tokens import Tokens
    from kvstore.transport.client import Client
    from kvstore.types import Namespace, PrefixMatch, Root, TokenArray

_FITS_MAX = 1024


class PeerCounters:
    """A kvstore.cluster.peer_bring.BringCounters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fetches: Counter[str] = Counter()  # guarded by _lock, as all below
        self._choices: Counter[str] = Counter()
        self._bytes = 0
        self._tokens = 0

    def count_fetch(self, fetched: Fetched, block_tokens: int) -> None:
        """A fetch has ended."""
        with self._lock:
            self._fetches[fetched.outcome.value] += 1
            self._bytes += fetched.received_bytes
            self._tokens += fetched.stored_blocks * block_tokens

    def count_choice(self, choice: str) -> None:
        """It was decided what to do about a prompt."""
        with self._lock:
            self._choices[choice] += 1

    def snapshot(self, *, claims: int, depth: int) -> PeerStats:
        """The counts as they are now."""
        with self._lock:
            return PeerStats(dict(self._fetches), dict(self._choices), self._bytes, self._tokens, claims, depth)


class ClusterPeers:
    """A kvstore.store.peers.Peers over a directory and connections to the nodes in it. Thread-safe.

    It is given to the store by `Store.share_with`, and closed before the store is. Its threads are those of one
    kvstore.store.movers.Movers, `fetches_max` of them from the first fetch on.
    """

    def __init__(
        self,
        store: Store,
        directory: Directory,
        *,
        settings: PeerSettings,
        credentials: PeerCredentials,
        clock: Clock,
        deletions: Deletions | None = None,
    ) -> None:
        """`deletions` are those of namespaces that this node knows of; None: none."""
        self._store = store
        self._settings = settings
        self._clock = clock
        self._counters = PeerCounters()
        self._claims = HeldClaims(clock)
        self._links = PeerLinks(credentials, fetches_per_holder_max=settings.fetches_per_holder_max)
        self._movers = Movers(
            threads=settings.fetches_max,
            jobs_max=settings.waiting_max,
            on_failure=lambda: self._counters.count_choice("failed"),
        )
        self._jobs = BringJobs(self._movers, waiting_max=settings.waiting_max)
        paths = PeerPaths(settings.path, clock)
        fetcher = Fetcher(store, self._links, paths, settings, clock, deletions=deletions)
        self._bringing = Bringing(
            Surroundings(
                directory=directory,
                local=LocalBlocks(store),
                peers=PeerBlocks(directory, fetcher, self._links, paths),
                claims=self._claims,
                clock=clock,
                random=random.Random(),
            ),
            settings,
            self._counters,
        )
        self._fits = PrefillFits(settings.prefill)
        self._is_draining = threading.Event()

    def drain(self) -> None:
        """Bring nothing more from others, until `undrain`. What is under way comes to its end. Idempotent."""
        self._is_draining.set()

    def undrain(self) -> None:
        """Bring what is missing again. Idempotent."""
        self._is_draining.clear()

    def prefetch(self, namespace: Namespace, root: Root, prompt: TokenArray, local: Prefetch) -> Prefetch:
        """Begin to bring what is missing here of a prompt; see kvstore.store.peers.Peers."""
        wanted = WantedPrompt(namespace, root, prompt)
        key = None if self._is_draining.is_set() else self._bringing.first_key(wanted)
        if key is None:
            return local
        prefill = self._fits.of(self._store.namespace_id(namespace)).model

        def steps(job: BringJob) -> Iterator[float]:
            return self._bringing.steps(wanted, job, prefill)

        job = BringJob(self._jobs, key, steps, self._clock, self._settings.fetch_seconds_max)
        if not self._jobs.start(job):
            self._counters.count_choice("queue_full")
            return local
        return PeerPrefetch(local, job, self._clock, lambda: self._match(wanted).host_blocks)

    def stage_ended(self, space: Space, root_key: bytes, prompt: TokenArray) -> None:
        """A store was committed or given up; see kvstore.store.peers.Peers."""
        self._claims.stage_ended(space, root_key, prompt)

    def match(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> PrefixMatch:
        """What this node has of a prompt, and behind it as tier PEER what the directory says that others have.

        Counts no lookup. The second part is a hint: prefetch it, and look again. Raises DirectoryUnavailableError.
        """
        wanted = WantedPrompt(namespace, PLAIN_ROOT if root is None else root, as_prompt(namespace, tokens))
        here = self._match(wanted)
        peer_blocks = self._bringing.deepest_blocks(wanted) - here.blocks
        if peer_blocks <= 0:
            return here
        return replace(here, blocks=here.blocks + peer_blocks, runs=(*here.runs, TierRun(Tier.PEER, peer_blocks)))

    def report_prefill(self, namespace: Namespace, *, cached_tokens: int, new_tokens: int, seconds: float) -> None:
        """An engine computed tokens: what fetches are weighed against. Raises InvalidArgumentError."""
        self._fits.of(self._store.namespace_id(namespace)).report(cached_tokens, new_tokens, seconds)

    def client(self, node: Node) -> Client:
        """A client of a node that has an address; it stays this one's. Raises ConfigError."""
        return self._links.client(node)

    def stats(self) -> PeerStats:
        """What was brought since the start."""
        return self._counters.snapshot(claims=len(self._claims), depth=self._jobs.depth)

    def close(self) -> None:
        """End fetches and connections, and let claims go; waits for a chunk under way. Idempotent."""
        self._links.close()
        self._jobs.close()
        self._movers.close()
        self._claims.release_all()

    def _match(self, wanted: WantedPrompt) -> PrefixMatch:
        return self._store.match(wanted.namespace, wanted.prompt, root=wanted.root, touch=False)


class LocalBlocks:
    """A kvstore.cluster.peer_bring.LocalBlocks over a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def present_blocks(self, wanted: WantedPrompt) -> int:
        """Leading blocks that are here."""
        return self._store.match(wanted.namespace, wanted.prompt, root=wanted.root, touch=False).blocks

    def keys(self, wanted: WantedPrompt) -> Sequence[bytes]:
        """The keys of all whole blocks."""
        return self._store.block_keys(wanted.namespace, wanted.prompt, root=wanted.root)


class PeerBlocks:
    """A kvstore.cluster.peer_bring.PeerBlocks over connections."""

    def __init__(self, directory: Directory, fetcher: Fetcher, links: PeerLinks, paths: PeerPaths) -> None:
        self._directory = directory
        self._fetcher = fetcher
        self._links = links
        self._paths = paths

    def fetch(self, node: Node, wanted: WantedPrompt, first: int, wish: Wish) -> Fetched:
        """Bring blocks of a prompt from a peer."""
        self._links.retain(self._directory.nodes())
        return self._fetcher.fetch(node, wanted, first, wish)

    def path(self, node: Node) -> Path:
        """How fast a peer answers and sends."""
        return self._paths.path(node.name)

    def queue(self, node: Node) -> int:
        """What waits there, as it told, and what this node has under way there since."""
        return max(node.queue, self._links.fetches(node.name))


class PrefillFits:
    """The prefill model of each namespace; those used last are remembered. Thread-safe."""

    def __init__(self, assumed: PrefillModel) -> None:
        self._assumed = assumed
        self._lock = threading.Lock()
        self._fits: OrderedDict[bytes, PrefillFit] = OrderedDict()  # guarded by _lock

    def of(self, ns_id: bytes) -> PrefillFit:
        """The one of a namespace."""
        with self._lock:
            fit = self._fits.setdefault(ns_id, PrefillFit(self._assumed))
            self._fits.move_to_end(ns_id)
            if len(self._fits) > _FITS_MAX:
                self._fits.popitem(last=False)
            return fit


def open_peers(config: ClusterConfig, store: Store, directory: Directory, deletions: Deletions) -> ClusterPeers | None:
    """The peers of a node, as the settings say; None where it is alone. Raises ConfigError."""
    if not config.directory:
        return None
    return ClusterPeers(
        store,
        directory,
        settings=peer_settings(config, announce_tokens=config.announce_tokens),
        credentials=peer_credentials(config),
        clock=SystemClock(),
        deletions=deletions,
    )
