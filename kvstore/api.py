"""The one interface of a store, whether it is embedded in this process or served by a sidecar.

`kvstore.open()` and `kvstore.connect()` both return a KvStore; tests/conformance runs one suite against both.
All methods may be called from any thread. Arguments are checked before anything changes.

    prefetch -> match -> lease -> load_into -> release          stage -> write_from -> commit | abort

A buffer is anything with the buffer protocol, DLPack, or a torch tensor on the CPU, C-contiguous, holding
[blocks, block_bytes] (or [blocks, part_bytes] where a part is named) bytes whatever its own shape and dtype.

A layout with groups (sliding windows, recurrent states) has *sparse* parts, numbered behind the dense ones. They are
written and loaded by `part` alone, and only where they are kept: `Stage.wanted` says of which blocks they are stored,
`KvLayout.needed_blocks` which of them a match of so many blocks needs. Row i of a sliding window's part holds the keys
and values of block `from_block` + i, row i of a recurrent one the state behind that block's last token:

    with store.lease(store.match(ns, tokens)) as lease:
        lease.load_into(kv)
        for part in range(layout.part_count, len(layout.parts)):
            needed = layout.needed_blocks(part, lease.blocks)
            lease.load_into(sparse[part], from_block=needed.start, part=part)  # [len(needed), part_bytes]

    with store.stage(ns, tokens, turn_ends=turn_ends) as stage:
        stage.write_from(kv)
        for part in range(layout.part_count, len(layout.parts)):
            for run in stage.wanted(part):
                stage.write_from(sparse_rows(part, run), from_block=run.start, part=part)  # [len(run), part_bytes]

Where `layout.symbols` is "digests" the engine knows its blocks by digests alone: `tokens` is a sequence of `bytes`, 32
for each block, and a block whose parent is not stored is refused.

A layout with a `state` keeps *sequence states* instead of blocks: one blob of any size for a prompt, which serves
whatever shares its beginning. Prompts are matched by single tokens; blobs are moved by pieces, in place:

    with store.stage_state(ns, tokens, state_bytes=len(blob)) as stage:
        if stage.wanted:
            stage.write_from(blob)

    with store.lease_state(store.match(ns, tokens)) as lease:
        if lease.tokens:
            blob = bytearray(lease.state_bytes)
            if lease.load_into(blob) == lease.state_bytes:
                ...  # restore it, then cut it down from lease.state_tokens to lease.tokens
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import TracebackType
    from typing import Self

    from kvstore.events import EventPage
    from kvstore.stats import StoreStats
    from kvstore.tokens import Tokens
    from kvstore.types import CommitResult, LoadResult, Namespace, Pin, PrefixMatch, Root, ScrubPage, Tier, Verification
    from kvstore.writers import WriterPage, WriterRun

BlockBuffer: TypeAlias = Any

SCRUB_BYTES = 16 << 20


class Lease(Protocol):
    """The right to read the first `blocks` blocks of a prompt; none of them is evicted or reused while it is held."""

    @property
    def blocks(self) -> int:
        """Number of blocks protected; less than the match had if some vanished in between."""
        ...

    def load_into(self, buffer: BlockBuffer, *, from_block: int = 0, part: int | None = None) -> LoadResult:
        """Copy blocks [from_block, blocks) into the rows of `buffer`, as many as it has rows for.

        Every block that comes from disk or a wire is verified. The result counts the leading rows that are right;
        fewer than asked means the rest is a miss. Of a layout with groups it is all or nothing, since a shorter prefix
        needs other sparse parts: 0 means that the whole lease is of no use, and a new match finds what is. A sparse
        `part` is held for the blocks that the match needs of it alone; InvalidArgumentError names them. Raises that,
        InvalidBufferError or ClosedError before any row is written.
        """
        ...

    def release(self) -> None:
        """End the lease; idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Stage(Protocol):
    """A store that has begun: invisible until commit. Leaving the `with` block commits, an exception aborts."""

    @property
    def from_block(self) -> int:
        """First block that wants bytes; blocks before it are stored, or being stored, already."""
        ...

    @property
    def blocks(self) -> int:
        """How many blocks, from `from_block` on, want bytes. 0 means that there is nothing to write."""
        ...

    def wanted(self, part: int) -> tuple[range, ...]:
        """The runs of blocks of which a part wants bytes, as positions in the prompt.

        Of a sparse part these are the blocks near likely match points (kvstore/store/match_rules.py) that lack it,
        stored ones among them. It may be written for any of them, or none: matches only get shorter.
        """
        ...

    def write_from(self, buffer: BlockBuffer, *, from_block: int | None = None, part: int | None = None) -> int:
        """Copy rows of `buffer` into the stage; row i is block `from_block` + i of the prompt.

        `from_block` defaults to the one given to `stage()`. Rows of blocks that want no bytes are skipped, and those
        of sparse parts for which there is no room. Without `part`, a row holds all dense parts one after the other.
        Returns the number of rows taken.
        """
        ...

    def commit(self) -> CommitResult:
        """Make the leading blocks whose every dense part was written visible, atomically; drop the others.

        Sparse parts come with them: those of all blocks that are stored then, where each part of the group was written.
        """
        ...

    def abort(self) -> None:
        """Drop everything written; idempotent, and a no-op after commit."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StateLease(Protocol):
    """The right to read one sequence state, or none; it is neither evicted nor changed while it is held."""

    @property
    def rows(self) -> Lease:
        """The same as a lease whose blocks are the pieces of the state: for who carries them elsewhere."""
        ...

    @property
    def tokens(self) -> int:
        """Leading tokens of the prompt that the state serves, once it is cut down to them; 0 where there is none."""
        ...

    @property
    def state_tokens(self) -> int:
        """Tokens that the state was stored for: it has `state_tokens` - `tokens` too many."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        ...

    def load_into(self, buffer: BlockBuffer, *, from_piece: int = 0) -> int:
        """Copy the state from a piece of `layout.state.piece_bytes` on into `buffer`, as far as that goes.

        A buffer that ends before the state holds whole pieces. Returns how many leading bytes are right, each verified
        where it came from disk: fewer than asked for mean that the state is damaged, and dropped. What is behind them
        is undefined. Raises InvalidBufferError, InvalidArgumentError or ClosedError before any byte is written.
        """
        ...

    def release(self) -> None:
        """End the lease; idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StateStage(Protocol):
    """A store of a state that has begun: invisible until commit. Leaving the `with` block commits or aborts it."""

    @property
    def rows(self) -> Stage:
        """The same as a stage whose blocks are the pieces of the state: for who carries them elsewhere."""
        ...

    @property
    def wanted(self) -> bool:
        """Whether the state is to be written: it is not stored or being stored already, and there is room for it."""
        ...

    def write_from(self, buffer: BlockBuffer, *, from_piece: int = 0) -> int:
        """Copy `buffer` into the state from a piece on; a buffer that ends before the state holds whole pieces.

        Returns the bytes taken: 0 where the state is not wanted.
        """
        ...

    def commit(self) -> CommitResult:
        """Make the state visible, atomically, if every piece was written; else drop it. Counts are in pieces."""
        ...

    def abort(self) -> None:
        """Drop everything written; idempotent, and a no-op after commit."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Prefetch(Protocol):
    """Blocks of a prompt on their way into host memory. Leaving the `with` block cancels what has not come yet."""

    @property
    def host_blocks(self) -> int:
        """Leading blocks of the prompt in host memory, as of the last look."""
        ...

    @property
    def done(self) -> bool:
        """Whether it has ended, however."""
        ...

    def wait(self, seconds: float | None = None) -> int:
        """Wait until it has ended, at most `seconds`; returns `host_blocks`."""
        ...

    def cancel(self) -> None:
        """Stop it: its request was aborted. Idempotent. What has come stays; others who asked for the same get it."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class KvStore(Protocol):
    """Prefix-addressed storage of KV blocks."""

    def namespace_id(self, namespace: Namespace) -> bytes:
        """The 16-byte public name under which this store keeps a namespace, as it appears in events."""
        ...

    def match(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        root: Root | None = None,
        touch: bool = True,
        request_id: str | None = None,
    ) -> PrefixMatch:
        """The longest stored prefix of `tokens`, in whole blocks, at whose end all parts that it needs are there.

        A touching lookup renews recency and is counted, once for each `request_id`; `touch=False` does neither.
        Where the layout has sequence states it is what the best of them serves, in single tokens.
        """
        ...

    def prefetch(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, wait_seconds: float | None = 0.0
    ) -> Prefetch:
        """Bring what is stored of a prompt from disk up into host memory, while its request waits for its turn.

        With `wait_seconds` 0 it returns at once (best effort), with None when all is up that can be (wait), else after
        that time at the latest (timeout); what is not up by then comes in the background, until the prefetch is
        cancelled. It takes room only from what is worth less, and brings no more at a time than its reserve, the head
        of the prefix first. Where too much is under way it is refused at once: the answer is done, with what was in
        host memory anyway. It protects nothing: match and lease what is there. Counts no lookup.

        A sidecar that is a node of a cluster also fetches what its peers have behind that, where that is cheaper than
        prefill, or waits for whoever computes it: name the whole prompt, and match it again.
        """
        ...

    def lease(self, match: PrefixMatch, *, tiers: Collection[Tier] | None = None) -> Lease:
        """Protect a match. What vanished since then is left out; raises NoSpaceError at the limit of leases.

        With `tiers` it ends before the first block that has no copy in one of them: with `{Tier.HOST}` all that it
        holds lies in host memory, verified, and a load of it waits for no disk.
        """
        ...

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
    ) -> Stage:
        """Begin to store the blocks [from_block, whole blocks of tokens).

        `turn_ends`, in tokens, say where the turns of a conversation end: sparse parts are kept there.

        With `rank`, the caller is one of several writers (`KvLayout.writers`), most often each in a process of its own,
        that all stage the same prompt: the first opens a stage and the others join it. Each writes its own parts, by
        `part`, and commits. The last commit makes the blocks visible; those before it answer 0 blocks. If one of them
        aborts, or its session ends before it has committed, the stage is aborted for all, and a rank that stays away
        for longer than `stage_seconds_max` aborts it too. Raises InvalidArgumentError for a rank that writes nothing.

        `writer` is who writes these blocks, the store's or client's own id if it is not given; see evict_writer(). What
        ranks store together counts as of the one whose stage was opened.

        Blocks present, or staged by someone else, are left out (single-flight). The stage is shortened to what the
        host tier and the namespace's quota have room for, and is empty if block `from_block` - 1 is missing.
        """
        ...

    def lease_state(self, match: PrefixMatch, *, tiers: Collection[Tier] | None = None) -> StateLease:
        """Protect the sequence state that serves most of a match, now that it is asked for.

        With `tiers`, of those that lie in one of them: with `{Tier.HOST}` a load waits for no disk. Raises
        NoSpaceError at the limit of leases, InvalidArgumentError for a layout without states.
        """
        ...

    def stage_state(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        state_bytes: int,
        root: Root | None = None,
        writer: int | None = None,
    ) -> StateStage:
        """Begin to store the sequence state of `tokens`, all of them, which has `state_bytes` bytes.

        It is wanted unless a stored state serves all of `tokens`, the same one is being stored by someone else, or
        there is no room. Once it is stored, states that it serves as well may be dropped. Raises InvalidArgumentError
        for no tokens, no bytes, or a layout without states.
        """
        ...

    def pin(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, ttl_seconds: float | None = None
    ) -> Pin:
        """Protect the stored prefix of `tokens` from eviction; pinning 0 blocks is allowed and protects nothing.

        It ends after `ttl_seconds`, more than 0 and below 1e9; None is for no limit. What of the prefix is on disk
        after a restart is pinned again, under the same id, at the first use of the namespace.
        """
        ...

    def unpin(self, pin_id: int) -> bool:
        """End a pin; false if there is none of that id (any more)."""
        ...

    def hint_next_use(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, seconds: float | None
    ) -> int:
        """Tell the eviction policy when a prompt will be used again, in `seconds` from now; None says never.

        It is told of what this prompt, and what was appended to it, do not share with others: no block where not all
        whole blocks of `tokens` are stored. Returns how many blocks these are. A hint protects nothing, and a policy
        may ignore it; pin what must stay. Raises InvalidArgumentError for negative, huge or undefined seconds.
        """
        ...

    def end_session(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> int:
        """Say that a conversation is over: `hint_next_use` with None."""
        ...

    def evict(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, from_block: int = 0) -> int:
        """Drop the blocks of this prefix from `from_block` on, with all that was stored below them, from every tier.

        Leased and pinned blocks, and their ancestors, stay. Returns the number of blocks dropped, when no restart
        brings one back; raises StorageError if a power cut may, as the disk cannot be synced.
        """
        ...

    def evict_writer(self, writer: int) -> WriterPage:
        """Drop blocks that a writer wrote, with all that was stored below them, of every namespace and from every tier.
        States go likewise, and count as their pieces.

        One call drops some 16,384 blocks of the writer and says how many are left: repeat it until there are none. None
        of a writer that is not known. They go whoever leased or pinned them, since bytes of a bad engine are worse than
        a miss; who holds one keeps it until the hold ends. Returns when no restart brings one back, but for those held;
        raises StorageError if a power cut may. Stop the writer first: what it stores meanwhile may stay.
        """
        ...

    def writers_of(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> tuple[WriterRun, ...]:
        """Who wrote each block of a prompt's stored prefix, of the dense parts; touches nothing."""
        ...

    def clear(self, namespace: Namespace) -> int:
        """Drop all blocks of a namespace, pinned ones too; answered only when no restart can bring one back.

        Readers that hold a lease finish with their bytes intact. Returns the number of blocks dropped.
        """
        ...

    def stats(self) -> StoreStats:
        """Occupancy and counters since the start."""
        ...

    def verify(self) -> Verification:
        """Check every invariant of the index of each namespace that was used since the start; changes nothing.

        Lookups and stores go on beside it, and wait for a slice of 4,096 blocks at most; what is damaged while it runs
        may be found only the next time. A million blocks take about half a second.
        """
        ...

    def scrub(self, *, after: int = 0, limit_bytes: int = SCRUB_BYTES) -> ScrubPage:
        """Read some of the blocks that lie on disk, and drop what is not as it was written.

        At most `limit_bytes`, but at least one block, behind position `after`: 0 at first, then `next_after` of the
        page before. The last page also tries whether slots in quarantine can be used again. Blocks that somebody
        holds stay, and are found out when they are read. Raises InvalidArgumentError for a negative position or limit.
        """
        ...

    def events(self, *, after: int = 0, limit: int = 1000, wait_seconds: float = 0.0) -> EventPage:
        """The log of what was stored and removed, after a sequence number."""
        ...

    def flush(self) -> None:
        """Return when everything committed and admitted to disk is there, to be found again after a restart."""
        ...

    def close(self) -> None:
        """Release everything; idempotent. An embedded store flushes first."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
