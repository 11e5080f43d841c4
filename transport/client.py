"""Client: a kvstore.api.KvStore served by a sidecar, over the fast lane where it is there, else over gRPC."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeVar

from kvstore.api import SCRUB_BYTES
from kvstore.state_blobs import BlobLease, BlobStage
from kvstore.tokens import as_prompt
from kvstore.transport import convert, plans
from kvstore.transport.address import parse_address, with_arena
from kvstore.transport.bulk_choice import engine_client
from kvstore.transport.credentials import credentials_of, with_credentials
from kvstore.transport.keeper import LinkKeeper
from kvstore.transport.link import Deadlines, Lookup, flat_deadlines
from kvstore.transport.remote import Held, RemoteLease, RemotePrefetch, RemoteStage
from kvstore.types import PLAIN_ROOT, PrefixMatch, require_blocks, require_seconds, require_state, require_tiers
from kvstore.writers import chosen_writer, require_writer_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType

    from google.protobuf.message import Message

    from kvstore.doctor import Report
    from kvstore.events import EventPage
    from kvstore.nodes import Deletion, DrainOrder, DrainProgress, Node, NodeMatch
    from kvstore.stats import NamespaceStats, StoreStats
    from kvstore.tokens import Tokens
    from kvstore.transport.breaker import BreakerStatus
    from kvstore.transport.bulk_client import BulkStatus
    from kvstore.transport.link import ArenaStatus, Link
    from kvstore.transport.plans import Plan
    from kvstore.types import Namespace, Pin, Root, ScrubPage, Tier, TokenArray, Verification
    from kvstore.v1 import cache_service_pb2 as pb
    from kvstore.writers import WriterPage, WriterRun

R = TypeVar("R", bound="Message")
T = TypeVar("T")
DEFAULT_DEADLINES = Deadlines()
_EVENT_WAIT_SECONDS_MAX = 10.0
_PREFETCH_STEP_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What a server says of itself."""

    serving: bool
    version: str
    lane: str


class Client:
    """A store behind a server; see kvstore.api.KvStore for the methods. Thread-safe.

    Connects at the first call, and again after the server was restarted or, on the fast lane, in the child of a fork:
    lookups and stores then go on, while leases and stages of the old session raise UnavailableError. Every call has a
    deadline that includes connecting; see Deadlines. After some failures in a row calls fail at once, until a probe in
    the background finds the server well again: `breaker` says so.
    """

    def __init__(self, keeper: LinkKeeper, deadlines: Deadlines, writer: int | None = None) -> None:
        self._keeper = keeper
        self._deadlines = deadlines
        self.writer = chosen_writer(writer)

    @property
    def breaker(self) -> BreakerStatus:
        """Whether the server is asked at all, and why not."""
        return self._keeper.breaker

    @property
    def arena(self) -> ArenaStatus:
        """Whether blocks are read where they lie in the memory of a server on the same host, and why not."""
        return self._keeper.arena

    @property
    def bulk(self) -> BulkStatus | None:
        """What the engine for bytes has done; None where it was not asked for."""
        return self._keeper.bulk

    def within(self, seconds: float) -> Client:
        """This client with another deadline for all its calls, and those of leases and stages that it opens.

        It shares the connection: to close it closes both.
        """
        return Client(self._keeper, flat_deadlines(seconds), self.writer)

    def namespace_id(self, namespace: Namespace) -> bytes:
        """The public name of a namespace on this server."""

        def attempt(link: Link, ends_at: float) -> bytes:
            return link.ns_id(namespace, ends_at)

        return self._keeper.run(attempt, self._deadlines.lookup_seconds, attempt)

    def match(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        root: Root | None = None,
        touch: bool = True,
        request_id: str | None = None,
    ) -> PrefixMatch:
        """The longest stored prefix of `tokens`.

        Where a lost connection makes it ask again, the lookup is counted once if it has a request id, else at most
        once.
        """
        prompt = as_prompt(namespace, tokens)
        lookup = Lookup(namespace, root, prompt, not touch, plans.unicode_text(request_id or "", "request_id"))
        found = self._keeper.run(
            lambda link, ends_at: link.match(lookup, ends_at),
            self._deadlines.lookup_seconds,
            lambda link, ends_at: link.match(lookup.repeated(), ends_at),
        )
        return PrefixMatch(namespace, PLAIN_ROOT if root is None else root, prompt, found.blocks, found.runs)

    def prefetch(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, wait_seconds: float | None = 0.0
    ) -> RemotePrefetch:
        """Bring a stored prefix up into host memory; waits in steps, so that no single call is long."""
        if wait_seconds is not None:
            wait_seconds = require_seconds(wait_seconds, "wait_seconds")
        prompt = as_prompt(namespace, tokens)
        step_seconds = prefetch_step_seconds(self._deadlines)

        def attempt(link: Link, ends_at: float) -> RemotePrefetch:
            packed = convert.prompt_to_proto(link.ns_id(namespace, ends_at), root, prompt)
            return RemotePrefetch(Held(self._keeper, link, self._deadlines), packed, step_seconds, ends_at)

        prefetch = self._keeper.run(attempt, self._deadlines.lookup_seconds, attempt)
        try:
            prefetch.wait(wait_seconds)
        except BaseException:
            prefetch.cancel()
            raise
        return prefetch

    def lease(self, match: PrefixMatch, *, tiers: Collection[Tier] | None = None) -> RemoteLease:
        """Protect a match."""
        require_blocks(match.namespace.layout)
        return self._lease(match, require_tiers(tiers))

    def stage(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        root: Root | None = None,
        from_block: int = 0,
        turn_ends: Sequence[int] = (),
        rank: int | None = None,
        writer: int | None = None,
    ) -> RemoteStage:
        """Begin to store."""
        prompt = as_prompt(namespace, tokens)
        request = plans.stage_request(namespace, prompt, from_block, turn_ends, rank)
        request.writer = self._author(writer)
        return self._stage(namespace, prompt, root, request)

    def lease_state(self, match: PrefixMatch, *, tiers: Collection[Tier] | None = None) -> BlobLease:
        """Protect the state behind a match."""
        form = require_state(match.namespace.layout)
        lease = self._lease(match, require_tiers(tiers))
        return BlobLease(lease, lease.size, form.piece_bytes)

    def stage_state(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        state_bytes: int,
        root: Root | None = None,
        writer: int | None = None,
    ) -> BlobStage:
        """Begin to store a state."""
        prompt = as_prompt(namespace, tokens)
        request = plans.stage_state_request(namespace, prompt, state_bytes)
        request.writer = self._author(writer)
        stage = self._stage(namespace, prompt, root, request)
        return BlobStage(stage, state_bytes, namespace.layout.block_bytes)

    def pin(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, ttl_seconds: float | None = None
    ) -> Pin:
        """Protect a stored prefix from eviction. Not tried again when the connection breaks: it may be set twice."""
        return self._run(plans.pin(namespace, tokens, root, ttl_seconds))

    def unpin(self, pin_id: int) -> bool:
        """End a pin. Not tried again when the connection breaks."""
        return self._run(plans.unpin(pin_id))

    def hint_next_use(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, seconds: float | None
    ) -> int:
        """Tell when a prompt will be used again; None says never."""
        return self._run(plans.hint(namespace, tokens, root, seconds))

    def end_session(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> int:
        """Say that a conversation is over."""
        return self.hint_next_use(namespace, tokens, root=root, seconds=None)

    def evict(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, from_block: int = 0) -> int:
        """Drop a prefix from `from_block` on."""
        return self._run(plans.evict(namespace, tokens, root, from_block))

    def evict_writer(self, writer: int) -> WriterPage:
        """Drop some of what a writer wrote; again until none of it is left."""
        return self._run(plans.evict_writer(writer))

    def writers_of(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> tuple[WriterRun, ...]:
        """Who wrote a stored prefix."""
        return self._run(plans.find_writers(namespace, tokens, root))

    def clear(self, namespace: Namespace) -> int:
        """Drop all blocks of a namespace."""
        return self._run(plans.clear(namespace))

    def stats(self) -> StoreStats:
        """Occupancy and counters of the server's store."""
        return self._run(plans.stats())

    def events(self, *, after: int = 0, limit: int = 1000, wait_seconds: float = 0.0) -> EventPage:
        """A page of the server's event log; waits in steps, so that no single call is long."""
        plans.check_events(after, limit, wait_seconds)
        step_seconds = event_step_seconds(self._deadlines)
        ends_at = time.monotonic() + wait_seconds
        while True:
            rest_seconds = max(0.0, ends_at - time.monotonic())
            page = self._run(plans.read_events(after, limit, min(rest_seconds, step_seconds)))
            if page.events or page.gap or time.monotonic() >= ends_at:
                return page

    def flush(self) -> None:
        """Return when everything committed and admitted to disk is there."""
        self._run(plans.flush())

    def verify(self) -> Verification:
        """Check the server's index."""
        return self._run(plans.verify())

    def scrub(self, *, after: int = 0, limit_bytes: int = SCRUB_BYTES) -> ScrubPage:
        """Have the server read some of what lies on its disk: at most 64 MiB at a time, whatever the limit."""
        return self._run(plans.scrub(after, limit_bytes))

    def nodes(self) -> tuple[str, tuple[Node, ...]]:
        """What the server's node is called, the living nodes of its cluster, and those in the state GONE."""
        return self._run(plans.list_nodes())

    def drain(self, order: DrainOrder | None, *, wait_seconds: float = 0.0) -> DrainProgress:
        """Have the server's node drain, or with None only ask how far it is; waits for the end, a step at most."""
        return self._run(plans.drain(order, min(wait_seconds, prefetch_step_seconds(self._deadlines))))

    def undrain(self) -> bool:
        """Have it take part again; false where it did not drain."""
        return self._run(plans.undrain())

    def namespaces(self) -> tuple[NamespaceStats, ...]:
        """The namespaces of the server's node, by id."""
        return self._run(plans.list_namespaces())

    def diagnosis(self) -> Report:
        """Why prompts were not found, and what would change that; to a tenant of its own."""
        return self._run(plans.get_diagnosis())

    def reset_diagnosis(self) -> None:
        """Have that count anew."""
        self._run(plans.reset_diagnosis())

    def delete_namespace(self, ns_id: bytes) -> Deletion:
        """Drop all of a namespace for good, on all nodes. Not tried again when the connection breaks."""
        return self._run(plans.delete_namespace(ns_id))

    def locate(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> tuple[NodeMatch, ...]:
        """How much of a prompt each living node holds, the most first; see kvstore.cluster.routing."""
        return self._run(plans.locate(namespace, tokens, root))

    def status(self) -> ServerStatus:
        """Whether the server takes calls, and its version."""
        plan = plans.check()

        def attempt(link: Link, ends_at: float) -> ServerStatus:
            serving = plan.read(link.call(plan.rpc, plan.request(b"", b""), ends_at))
            return ServerStatus(serving, link.session.server_version, link.lane)

        return self._keeper.run(attempt, self._deadlines.of(plan.wait), attempt)

    def close(self) -> None:
        """End the session, with all leases and stages; idempotent. The server's store stays as it is."""
        self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lease(self, match: PrefixMatch, tiers: Collection[Tier] | None) -> RemoteLease:
        def attempt(link: Link, ends_at: float) -> RemoteLease:
            return RemoteLease(Held(self._keeper, link, self._deadlines), match, tiers, ends_at)

        return self._keeper.run(attempt, self._deadlines.lookup_seconds, attempt)

    def _author(self, writer: int | None) -> int:
        return self.writer if writer is None else require_writer_id(writer)

    def _stage(
        self, namespace: Namespace, prompt: TokenArray, root: Root | None, request: pb.StageRequest
    ) -> RemoteStage:
        def attempt(link: Link, ends_at: float) -> RemoteStage:
            request.prompt.CopyFrom(convert.prompt_to_proto(link.ns_id(namespace, ends_at), root, prompt))
            return RemoteStage(Held(self._keeper, link, self._deadlines), namespace.layout, request, ends_at)

        return self._keeper.run(attempt, self._deadlines.bulk_seconds, attempt)

    def _run(self, plan: Plan[R, T]) -> T:
        def attempt(link: Link, ends_at: float) -> T:
            ns_id = b"" if plan.namespace is None else link.ns_id(plan.namespace, ends_at)
            return plan.read(link.call(plan.rpc, plan.request(link.session.session_id, ns_id), ends_at))

        return self._keeper.run(attempt, self._deadlines.of(plan.wait), attempt if plan.repeatable else None)


def connect(
    address: str,
    *,
    lookup_seconds: float | None = None,
    control_seconds: float | None = None,
    bulk_seconds: float | None = None,
    long_seconds: float | None = None,
    on_breaker_change: Callable[[BreakerStatus], None] | None = None,
    tls_ca: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    token_file: str | None = None,
    bulk: str = "socket",
    arena: str = "map",
    writer: int | None = None,
) -> Client:
    """A client of the server at `address`: unix:///path, tls://host:port, host:port, or with gRPC alone
    grpc+unix:///path, grpc+tls://host:port, grpc://host:port.

    With TLS the server's certificate must be of the CA in the PEM file `tls_ca`, or of one that the system trusts, and
    name the host; `tls_cert` and `tls_key` are the client's own. `token_file` has the token that says who calls. All
    are read again for each new connection.

    `bulk="nixl"` moves the bytes of loads and stores by remote memory access where the server offers it, and over
    sockets where it does not (extra `nixl`; kvstore/transport/README.md says what that asks of the network).

    `arena="off"` lets blocks travel also where they could be read in the memory of a server on this host.

    `writer` is kept with what this client stores, so that it can be dropped by `kvstore evict --writer`: a number, a
    random one for each client if it is not given.

    Connects at the first call only, which raises UnavailableError if the server cannot be reached. The seconds bound
    calls of each kind, see kvstore.transport.link.Deadlines; None leaves the default: 0.1 for lookups, 5 for stats and
    the like, 1 and the time of the bytes for loads and stores, 60 for flush, evict, clear, verify and
    scrub. `on_breaker_change` is told when the server is given up for a while and when it is asked again, from
    whichever thread saw it; it must not wait. Raises ConfigError for an address, a time or a file that cannot be.
    """
    deadlines = chosen_deadlines(
        lookup_seconds=lookup_seconds,
        control_seconds=control_seconds,
        bulk_seconds=bulk_seconds,
        long_seconds=long_seconds,
    )
    credentials = credentials_of(tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, token_file=token_file)
    target = with_credentials(with_arena(parse_address(address), arena), credentials)
    return Client(LinkKeeper(target, on_breaker_change, engine_client(bulk)), deadlines, writer)


def chosen_deadlines(**seconds: float | None) -> Deadlines:
    """The defaults, but for what is not None."""
    return replace(DEFAULT_DEADLINES, **{name: value for name, value in seconds.items() if value is not None})


def event_step_seconds(deadlines: Deadlines) -> float:
    """How long one call waits for events, so that its answer comes within its deadline."""
    return min(_EVENT_WAIT_SECONDS_MAX, deadlines.control_seconds / 2)


def prefetch_step_seconds(deadlines: Deadlines) -> float:
    """How long one call waits for a prefetch, so that its answer comes within its deadline."""
    return min(_PREFETCH_STEP_SECONDS_MAX, deadlines.control_seconds / 2)
