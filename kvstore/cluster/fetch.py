"""One fetch: blocks of a prompt from a peer into reserved slots of host memory, a chunk at a time.

    lease on the holder -> { stage a chunk here -> load it into its slots -> compare digests -> commit } -> release

The holder's tree decides what there is: it matches the tokens. A chunk is invisible until all of it came and is what
the holder sent, so a transfer that breaks leaves what came before as a whole prefix. A peer that sends something else,
less or nothing costs its chunk and its time.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvstore.errors import (
    ClosedError,
    ConfigError,
    InvalidArgumentError,
    KvstoreError,
    LayoutMismatchError,
    NoSpaceError,
    PermissionDeniedError,
    StorageError,
    UnauthenticatedError,
    UnavailableError,
)
from kvstore.store.stage import StoreStage
from kvstore.tokens import packed_tokens, unpacked_tokens
from kvstore.types import PrefixMatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.cluster.deletions import Deletions
    from kvstore.cluster.peer_links import PeerLinks
    from kvstore.cluster.peer_paths import PeerPaths
    from kvstore.cluster.peer_settings import PeerSettings
    from kvstore.nodes import Node
    from kvstore.store import Store
    from kvstore.store.refusal import RefusedStage
    from kvstore.store.shares import StageShare
    from kvstore.transport.client import Client
    from kvstore.transport.remote import RemoteLease
    from kvstore.types import Namespace, Root, TokenArray

logger = logging.getLogger(__name__)
# Rows with digests in one answer.
_ROWS_MAX = 4096
# Slots that lie in more pieces than this are filled by way of one buffer: a call for each would cost more than a copy.
_PIECES_MAX = 4
_WARNINGS_MAX = 1000


class FetchOutcome(enum.Enum):
    """How a fetch ended. The values are what counters call it."""

    FETCHED = "fetched"
    STALE = "stale"  # the holder has no more than is here: its entry is out of date
    BUSY = "busy"  # it serves as many as it may
    REFUSED = "refused"  # it does not let us in, or holds the namespace under another secret
    UNAVAILABLE = "unavailable"  # it does not answer, or broke off
    CORRUPT = "corrupt"  # what came is not what it sent
    NO_ROOM = "no_room"  # nothing here may leave for it
    CANCELLED = "cancelled"  # nobody waits for it any more, or its time is over


@dataclass(frozen=True, slots=True)
class WantedPrompt:
    """What is to be brought: the whole blocks of a prompt."""

    namespace: Namespace
    root: Root
    prompt: TokenArray

    @property
    def blocks(self) -> int:
        """Whole blocks."""
        return int(self.prompt.size) // self.namespace.layout.block_symbols

    def head(self, blocks: int) -> TokenArray:
        """The tokens of the first blocks, as stores take them."""
        return unpacked_tokens(packed_tokens(self.prompt[: blocks * self.namespace.layout.block_symbols]))


@dataclass(frozen=True, slots=True)
class Fetched:
    """How a fetch ended, how many leading blocks of the prompt are here since, and what it brought of them."""

    outcome: FetchOutcome
    blocks: int
    stored_blocks: int = 0
    received_bytes: int = 0


class Wish(Protocol):
    """Whoever waits for a fetch."""

    def left_seconds(self) -> float:
        """How much longer it is of use; 0 when it is of none any more."""
        ...


class Fetcher:
    """Fetches for one store. Thread-safe: it keeps nothing of a fetch, but for whom it warned of."""

    def __init__(
        self,
        store: Store,
        links: PeerLinks,
        paths: PeerPaths,
        settings: PeerSettings,
        clock: Clock,
        *,
        deletions: Deletions | None = None,
    ) -> None:
        self._store = store
        self._links = links
        self._paths = paths
        self._settings = settings
        self._clock = clock
        self._deletions = deletions
        self._warned: set[str] = set()

    def fetch(self, node: Node, wanted: WantedPrompt, first: int, wish: Wish) -> Fetched:
        """Bring blocks of a prompt from `first` on, as many as the node has. Raises nothing of its."""
        with self._links.place(node) as is_free:
            if not is_free:
                return Fetched(FetchOutcome.BUSY, first)
            transfer = _Transfer(self._store, wanted, first, wish, partial(self._known_deletion, wanted.namespace))
            try:
                outcome = self._run(node, transfer)
            except (PermissionDeniedError, UnauthenticatedError, LayoutMismatchError, ConfigError) as error:
                self._warn(node, error)
                outcome = FetchOutcome.REFUSED
            except NoSpaceError:
                outcome = FetchOutcome.BUSY
            except (UnavailableError, ClosedError, StorageError, InvalidArgumentError) as error:
                logger.info("a fetch broke off: peer=%s cause=%s", node.name, error)
                outcome = FetchOutcome.UNAVAILABLE
        return Fetched(outcome, transfer.next_block, transfer.stored_blocks, transfer.received_bytes)

    def _run(self, node: Node, transfer: _Transfer) -> FetchOutcome:
        wanted = transfer.wanted
        left_seconds = transfer.wish.left_seconds()
        if left_seconds <= 0:
            return FetchOutcome.CANCELLED
        client = self._links.client(node).within(min(left_seconds, self._settings.answer_seconds_max))
        if not self._is_same_namespace(client, wanted.namespace):
            return FetchOutcome.REFUSED
        began = self._clock.monotonic()
        # What it has of it, it alone knows: it matches the tokens, and shortens the lease to that.
        claimed = PrefixMatch(wanted.namespace, wanted.root, wanted.prompt, wanted.blocks, runs=())
        with client.lease(claimed) as lease:
            self._paths.count_answer(node.name, self._clock.monotonic() - began)
            if lease.blocks <= transfer.next_block or lease.deletions < transfer.deletion:
                return FetchOutcome.STALE
            began = self._clock.monotonic()
            outcome = transfer.run(lease, self._chunk_blocks(wanted.namespace))
            self._paths.count_transfer(node.name, transfer.received_bytes, self._clock.monotonic() - began)
            return outcome

    def _warn(self, node: Node, error: KvstoreError) -> None:
        """Say once for each peer that it does not let this node in; all refusals are counted."""
        if node.name not in self._warned and len(self._warned) < _WARNINGS_MAX:
            self._warned.add(node.name)
            logger.warning(
                "a peer does not let this node in: peer=%s cause=%s; see cluster.tls_*, cluster.token_file and the "
                "peer's access file",
                node.name,
                error,
            )

    def _is_same_namespace(self, client: Client, namespace: Namespace) -> bool:
        """Whether the peer keeps it under the same secret: by name alone, two of one tenant could be two."""
        return client.namespace_id(namespace) == self._store.namespace_id(namespace)

    def _known_deletion(self, namespace: Namespace) -> int:
        """The epoch in which the namespace was deleted last, as far as this node knows; 0: never."""
        return 0 if self._deletions is None else self._deletions.known(self._store.namespace_id(namespace))

    def _chunk_blocks(self, namespace: Namespace) -> int:
        return max(1, min(_ROWS_MAX, self._settings.chunk_bytes // namespace.layout.block_bytes))


class _Transfer:
    """The bytes of one fetch. `next_block`, `stored_blocks` and `received_bytes` say how far it came."""

    def __init__(
        self, store: Store, wanted: WantedPrompt, first: int, wish: Wish, known_deletion: Callable[[], int]
    ) -> None:
        self.deletion = known_deletion()  # the namespace's, as of the begin
        self._known_deletion = known_deletion
        self.wanted = wanted
        self.wish = wish
        self.next_block = first
        self.stored_blocks = 0
        self.received_bytes = 0
        self._store = store
        self._scratch = np.empty(0, dtype=np.uint8)

    def run(self, lease: RemoteLease, chunk_blocks: int) -> FetchOutcome:
        """Bring all that the lease holds."""
        while self.next_block < lease.blocks:
            if self.wish.left_seconds() <= 0:
                return FetchOutcome.CANCELLED
            outcome = self._bring(lease, min(lease.blocks, self.next_block + chunk_blocks))
            if outcome is not FetchOutcome.FETCHED:
                return outcome
        return self._bring_sparse(lease)

    def _bring(self, lease: RemoteLease, end: int) -> FetchOutcome:
        """Bring the blocks up to `end`; those that others store or bring just now are left to them."""
        with self._stage(end) as stage:
            if self._is_deleted():
                stage.abort()
                return FetchOutcome.STALE
            if not isinstance(stage, StoreStage) or (stage.refused_blocks and not stage.blocks):
                return FetchOutcome.NO_ROOM
            if not stage.blocks:
                self.next_block = end
                return FetchOutcome.FETCHED
            blocks = range(stage.from_block, stage.from_block + stage.blocks)
            if not self._fill(lease, stage, blocks):
                stage.abort()
                return FetchOutcome.CORRUPT
            stored_blocks = stage.commit().blocks
        self.stored_blocks += stored_blocks
        self.next_block = blocks.start + stored_blocks
        return FetchOutcome.FETCHED if self.next_block == end else FetchOutcome.NO_ROOM

    def _stage(self, end: int) -> StoreStage | StageShare | RefusedStage:
        wanted = self.wanted
        return self._store.stage(wanted.namespace, wanted.head(end), root=wanted.root, from_block=self.next_block)

    def _is_deleted(self) -> bool:
        """Whether the namespace was deleted since the begin. A stage that was open then commits nothing; one that is
        opened later asks this first, so nothing that the holder leased before comes back."""
        return self._known_deletion() != self.deletion

    def _fill(self, lease: RemoteLease, stage: StoreStage, blocks: range) -> bool:
        """Load all dense parts of some blocks; false if one is not what was sent."""
        try:
            for part in range(stage.layout.part_count):
                self._fill_part(lease, stage, blocks, part)
        except _WrongRowsError:
            return False
        return True

    def _fill_part(self, lease: RemoteLease, stage: StoreStage, blocks: range, part: int) -> None:
        """Load one part straight to where it belongs, or by way of a buffer where that is in many places."""
        row_bytes = stage.layout.part_bytes(part)
        with stage.lend(from_block=blocks.start, blocks=len(blocks), part=part) as pieces:
            is_direct = len(pieces) <= _PIECES_MAX
            first = blocks.start
            for piece in pieces if is_direct else ():
                rows = piece.reshape(-1, row_bytes)
                self._load(lease, rows, first, part)
                first += len(rows)
            if not is_direct:
                self._load_scattered(lease, pieces, blocks, part)

    def _load_scattered(self, lease: RemoteLease, pieces: list[NDArray[np.uint8]], blocks: range, part: int) -> None:
        received = self._rows(len(blocks), sum(piece.size for piece in pieces) // len(blocks))
        self._load(lease, received, blocks.start, part)
        flat, begin = received.reshape(-1), 0
        for piece in pieces:
            piece[:] = flat[begin : begin + piece.size]
            begin += piece.size

    def _bring_sparse(self, lease: RemoteLease) -> FetchOutcome:
        """Bring what the match needs of sparse parts; without them it is shorter here."""
        layout = self.wanted.namespace.layout
        if not layout.groups:
            return FetchOutcome.FETCHED
        with self._stage(lease.blocks) as stage:
            if self._is_deleted():
                stage.abort()
                return FetchOutcome.STALE
            for part in range(layout.part_count, len(layout.parts)):
                needed = layout.needed_blocks(part, lease.blocks)
                for run in stage.wanted(part):
                    blocks = range(max(run.start, needed.start), min(run.stop, needed.stop))
                    if not blocks:
                        continue
                    rows = self._rows(len(blocks), layout.part_bytes(part))
                    try:
                        self._load(lease, rows, blocks.start, part)
                    except _WrongRowsError:
                        stage.abort()
                        return FetchOutcome.CORRUPT
                    stage.write_from(rows, from_block=blocks.start, part=part)
            stage.commit()
        return FetchOutcome.FETCHED

    def _load(self, lease: RemoteLease, rows: NDArray[np.uint8], first: int, part: int) -> None:
        loaded = lease.load_verified(rows, from_block=first, part=part)
        self.received_bytes += loaded.bytes
        if loaded.blocks < len(rows):
            raise _WrongRowsError

    def _rows(self, count: int, row_bytes: int) -> NDArray[np.uint8]:
        """Memory for rows, used again by the next chunk."""
        if self._scratch.size < count * row_bytes:
            self._scratch = np.empty(count * row_bytes, dtype=np.uint8)
        return self._scratch[: count * row_bytes].reshape(count, row_bytes)


class _WrongRowsError(Exception):
    """Fewer rows came than were asked for, or one that is not what its digest says."""
