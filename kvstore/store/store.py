"""Store: match / lease / load and stage / write / commit over one index and the tiers of this process."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

from kvstore.api import SCRUB_BYTES
from kvstore.errors import ClosedError, InvalidArgumentError, NoSpaceError, StorageError
from kvstore.state_blobs import require_path, require_state_bytes
from kvstore.stats import NamespaceStats, StoreStats
from kvstore.store.accounting import by_tier, tier_stats
from kvstore.store.boundaries import boundaries
from kvstore.store.evictions import WriterEviction, evict_prefix
from kvstore.store.hot_prefixes import hot_prefixes
from kvstore.store.index import Index
from kvstore.store.interrupts import uninterrupted
from kvstore.store.lease import StoreLease
from kvstore.store.leased_parts import LeasedParts
from kvstore.store.movers import Movers
from kvstore.store.namespaces import clear_space, delete_namespace, namespace_stats
from kvstore.store.placement import DiskAdmission, StoreRequest, admit_host, leading
from kvstore.store.prefetch import Prefetcher, WriteThrough
from kvstore.store.refusal import RefusedStage
from kvstore.store.room import RoomMaker
from kvstore.store.scrub import drop_bad
from kvstore.store.shares import SharedStages, StageShare
from kvstore.store.stage import Points, StoreStage
from kvstore.store.state_calls import StateCalls, StateWriteThrough
from kvstore.store.state_prefetch import StatePrefetcher
from kvstore.store.verify import Verifier
from kvstore.store.what_if import what_if
from kvstore.tiers.persistent import CodingTier
from kvstore.tokens import as_prompt
from kvstore.types import (
    PLAIN_ROOT,
    PrefixMatch,
    ScrubPage,
    Tier,
    Verification,
    require_blocks,
    require_seconds,
    require_state,
    require_tiers,
    require_turn_ends,
    require_writer,
)
from kvstore.writers import chosen_writer, require_writer_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from types import TracebackType

    from kvstore.api import Prefetch
    from kvstore.clock import Clock
    from kvstore.events import EventPage
    from kvstore.state_blobs import BlobLease, BlobStage
    from kvstore.store.hot_prefixes import HotPrefix
    from kvstore.store.lookup_observer import LookupObserver
    from kvstore.store.peers import Peers
    from kvstore.store.settings import StoreSettings
    from kvstore.store.space import Space
    from kvstore.store.state_handles import StateRowsLease, StateRowsStage
    from kvstore.tiers.extent_stock import HostMemoryState
    from kvstore.tiers.host import HostTier
    from kvstore.tiers.persistent import PersistentTier
    from kvstore.tokens import Tokens
    from kvstore.types import BlockIds, Namespace, Pin, Root, TokenArray
    from kvstore.writers import WriterPage, WriterRun

logger = logging.getLogger(__name__)
_stores: WeakSet[Store] = WeakSet()
_MOVER_THREADS = 2


class Store:
    """A kvstore.api.KvStore in this process. Owns its tiers; thread-safe (lock order: see index.py)."""

    def __init__(
        self,
        host: HostTier,
        disk: PersistentTier | None,
        settings: StoreSettings,
        clock: Clock,
        writer: int | None = None,
    ) -> None:
        self.writer = chosen_writer(writer)
        self._settings = settings
        self._clock = clock
        self._host = host
        self._disk = disk
        self._index = Index(settings, host, disk, clock)
        self._room = RoomMaker(self._index)
        self._verifier = Verifier(self._index, self._room)
        self._pins = self._index.pins
        self._movers = Movers(
            threads=_MOVER_THREADS, jobs_max=settings.prefetches_max, on_failure=self._index.count_failed_move
        )
        self._prefetcher = Prefetcher(self._index, self._room, self._movers)
        self._state_prefetcher = StatePrefetcher(self._index, self._room, self._movers)
        self._states = StateCalls(self._index, self._room, self._pins)
        self._leases: set[StoreLease | StateRowsLease] = set()
        self._stages: set[StoreStage | StateRowsStage] = set()
        self._shared = SharedStages()
        self._peers: Peers | None = None
        self._open = True
        self._left_behind = False
        _stores.add(self)

    def share_with(self, peers: Peers | None) -> None:
        """From now on prefetches ask other nodes for what is missing here; None ends that."""
        self._peers = peers

    def observe_lookups(self, *observers: LookupObserver) -> None:
        """From now on tell these of each lookup that counts, in its own thread, without a lock; they must not wait."""
        self._index.accounting.observers = observers

    def namespace_id(self, namespace: Namespace) -> bytes:
        """The public name of a namespace; see kvstore.api.KvStore."""
        self._check_open()
        return self._index.namespace_id(namespace)

    def block_keys(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> list[bytes]:
        """The keys of a prompt's whole blocks, stored or not: what nodes call them among each other."""
        space, root_key, prompt = self._address(namespace, tokens, root)
        return space.prompt_keys(root_key, prompt)[1:]

    def match(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        root: Root | None = None,
        touch: bool = True,
        request_id: str | None = None,
    ) -> PrefixMatch:
        """The longest stored prefix; see kvstore.api.KvStore."""
        space, root_key, prompt = self._address(namespace, tokens, root)
        if space.states is not None:
            return self._states.match(namespace, root, prompt, touch=touch, request_id=request_id)
        found, layout = space.find(root_key, prompt), namespace.layout
        with self._index.lock:
            dense = space.confirm(found)
            ids = space.sparse.usable(dense)
            runs = space.tier_runs(ids)
            accounting = self._index.accounting
            counts = touch and accounting.first_lookup(request_id)
            if counts:
                space.tree.touch(ids, self._index.next_tick(), prompt.size // namespace.layout.block_symbols)
                space.sparse.touch(ids)
                accounting.shortened_tokens += int(dense.size - ids.size) * layout.block_tokens
                accounting.count_lookup(layout.prompt_tokens(prompt.size), runs, layout.block_tokens)
        match = PrefixMatch(namespace, PLAIN_ROOT if root is None else root, prompt, int(ids.size), runs)
        if counts:
            accounting.tell(match)
        return match

    def prefetch(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, wait_seconds: float | None = 0.0
    ) -> Prefetch:
        """Bring a stored prefix up into host memory; see kvstore.api.KvStore."""
        if wait_seconds is not None:
            wait_seconds = require_seconds(wait_seconds, "wait_seconds")
        space, root_key, prompt = self._address(namespace, tokens, root)
        if space.states is not None:
            prefetch: Prefetch = self._state_prefetcher.start(space, root_key, prompt)
        else:
            prefetch = self._prefetcher.start(space, space.find(root_key, prompt))
            if self._peers is not None:
                prefetch = self._peers.prefetch(namespace, PLAIN_ROOT if root is None else root, prompt, prefetch)
        try:
            prefetch.wait(wait_seconds)
        except BaseException:
            prefetch.cancel()
            raise
        return prefetch

    @uninterrupted
    def lease(self, match: PrefixMatch, *, tiers: Collection[Tier] | None = None) -> StoreLease:
        """Protect a match; see kvstore.api.KvStore."""
        self._check_open()
        require_blocks(match.namespace.layout)
        wanted = require_tiers(tiers)
        self._end_overdue()
        space = self._index.space(match.namespace)
        found = space.find(space.root_key(match.root), match.prompt)
        with self._index.lock:
            self._check_leases()
            ids = space.confirm(found)[: match.blocks]
            if wanted is not None and ids.size:
                ids = ids[: leading(space.lies_in(ids, wanted))]
            ids = space.sparse.usable(ids, wanted)
            space.tree.lease(ids)
            sparse = LeasedParts(self._room.sparse, space, space.sparse.hold(ids))
            lease = StoreLease(self._index, space, ids, self._forget_lease, sparse)
            self._leases.add(lease)
        return lease

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
    ) -> StoreStage | StageShare | RefusedStage:
        """Begin to store; see kvstore.api.KvStore."""
        space, root_key, prompt = self._address(namespace, tokens, root)
        require_blocks(namespace.layout)
        if rank is not None:
            require_writer(namespace.layout, rank)
        author = self.writer if writer is None else require_writer_id(writer)
        prompt_tokens = namespace.layout.prompt_tokens(prompt.size)
        points = Points(prompt_tokens, require_turn_ends(turn_ends, prompt_tokens))
        whole = prompt.size // namespace.layout.block_symbols
        if not 0 <= from_block <= whole:
            raise InvalidArgumentError(f"from_block is {from_block}, expected 0..{whole} (whole blocks of the prompt)")
        self._end_overdue()
        prompt = prompt[: whole * namespace.layout.block_symbols]
        if whole and not from_block and rank is None and self._is_spent(space, root_key, prompt):
            return RefusedStage(namespace.layout, from_block=0, refused_blocks=whole)
        stage = StoreStage(
            self._index,
            space,
            root_key=root_key,
            prompt=prompt,
            requested_from=from_block,
            points=points,
            mover=self._room.sparse,
            writer=author,
            forget=self._forget_stage,
        )
        begin = partial(self._begin_stage, stage, space)
        if rank is not None:
            return self._shared.join(stage, rank, begin)
        begin()
        return stage

    def lease_state(self, match: PrefixMatch, *, tiers: Collection[Tier] | None = None) -> BlobLease:
        """Protect the state behind a match; see kvstore.api.KvStore."""
        self._check_open()
        wanted = require_tiers(tiers)
        self._end_overdue()
        return self._states.lease(match, wanted, self._enter_lease, self._forget_lease)

    def stage_state(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        state_bytes: int,
        root: Root | None = None,
        writer: int | None = None,
    ) -> BlobStage:
        """Begin to store a state; see kvstore.api.KvStore."""
        size_bytes = require_state_bytes(state_bytes)
        author = self.writer if writer is None else require_writer_id(writer)
        space, root_key, prompt = self._address(namespace, tokens, root)
        require_state(namespace.layout)
        require_path(prompt.size)
        self._end_overdue()
        handlers = (self._enter_state_stage, self._forget_state_stage)
        return self._states.stage(space, root_key, prompt, size_bytes, handlers, writer=author)

    @uninterrupted
    def pin(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, ttl_seconds: float | None = None
    ) -> Pin:
        """Protect a stored prefix; see kvstore.api.KvStore."""
        if ttl_seconds is not None and require_seconds(ttl_seconds, "ttl_seconds") == 0:
            raise InvalidArgumentError(f"ttl_seconds is {ttl_seconds}, expected more than 0, or None for no limit")
        space, root_key, prompt = self._address(namespace, tokens, root)
        self._end_overdue()
        if space.states is not None:
            pin = self._states.pin(space, root_key, prompt, ttl_seconds)
        else:
            found = space.find(root_key, prompt)
            with self._index.lock:
                pin = self._pins.add(space, space.sparse.usable(space.confirm(found)), ttl_seconds)
        self._pins.save(space)
        return pin

    def unpin(self, pin_id: int) -> bool:
        """End a pin; see kvstore.api.KvStore."""
        self._check_open()
        return self._pins.end([pin_id]) > 0

    def hint_next_use(
        self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, seconds: float | None
    ) -> int:
        """Tell when a prompt will be used again; see kvstore.api.KvStore."""
        if seconds is not None:
            seconds = require_seconds(seconds, "seconds")
        space, root_key, prompt = self._address(namespace, tokens, root)
        if space.states is not None:
            return self._states.hint(space, root_key, prompt, seconds)
        found = space.find(root_key, prompt)
        with self._index.lock:
            ids = space.confirm(found)
            # Behind the end of a shorter match may lie the blocks of another prompt alone, which this says nothing of.
            if not ids.size or ids.size < prompt.size // namespace.layout.block_symbols:
                return 0
            return space.tree.hint_next_use(int(ids[-1]), self._index.next_tick(), seconds)

    def end_session(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> int:
        """Say that a conversation is over; see kvstore.api.KvStore."""
        return self.hint_next_use(namespace, tokens, root=root, seconds=None)

    def evict(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None, from_block: int = 0) -> int:
        """Drop a prefix from `from_block` on; see kvstore.api.KvStore. Waits for a batch on its way to disk."""
        if from_block < 0:
            raise InvalidArgumentError(f"from_block is {from_block}, expected at least 0")
        space, root_key, prompt = self._address(namespace, tokens, root)
        self._end_overdue()
        if space.states is not None:
            return self._states.evict(space, root_key, prompt, from_block)
        return evict_prefix(self._index, self._room, space, root_key, prompt, from_block=from_block)

    def evict_writer(self, writer: int) -> WriterPage:
        """Drop some of what a writer wrote; see kvstore.api.KvStore."""
        self._check_open()
        require_writer_id(writer)
        self._end_overdue()
        return WriterEviction(self._index, self._room, writer).step()

    def writers_of(self, namespace: Namespace, tokens: Tokens, *, root: Root | None = None) -> tuple[WriterRun, ...]:
        """Who wrote a stored prefix; see kvstore.api.KvStore."""
        space, root_key, prompt = self._address(namespace, tokens, root)
        if space.states is not None:
            return self._states.writers(space, root_key, prompt)
        found = space.find(root_key, prompt)
        with self._index.lock:
            return space.writers.runs(space.confirm(found))

    @uninterrupted
    def clear(self, namespace: Namespace) -> int:
        """Drop a namespace; see kvstore.api.KvStore. Waits for a copy to disk in progress."""
        self._check_open()
        return clear_space(self._index, self._room, self._index.space(namespace))

    @uninterrupted
    def delete_namespace(self, ns_id: bytes) -> int:
        """Drop all of a namespace, opened or not, for good: see namespaces.py. Raises StorageError if it cannot be."""
        self._check_open()
        return delete_namespace(self._index, self._room, ns_id)

    def namespaces(self) -> list[NamespaceStats]:
        """The namespaces that are here, by id."""
        self._check_open()
        return namespace_stats(self._index)

    def stats(self) -> StoreStats:
        """Occupancy and counters since the start."""
        self._check_open()
        self._end_overdue()
        spaces, counted = self._index.spaces(), self._index.accounting
        with self._index.lock:
            blocks = {tier: sum(space.tier_blocks(tier) for space in spaces) for tier in (Tier.HOST, Tier.DISK)}
            return StoreStats(
                tiers=tier_stats(self._host, self._disk, blocks),
                namespaces=len(spaces),
                lookups=counted.lookups,
                lookup_tokens=counted.lookup_tokens,
                hit_tokens=by_tier(counted.hit_tokens, self._disk),
                loaded_tokens=by_tier(counted.loaded_tokens, self._disk),
                stored_blocks=counted.stored_blocks,
                present_blocks=counted.present_blocks,
                rejected_blocks=dict(+counted.rejected_blocks),
                evicted_blocks=dict(+counted.evicted_blocks),
                corrupt_blocks=counted.corrupt_blocks,
                prefetches=dict(+counted.prefetches),
                prefetched_blocks=counted.prefetched_blocks,
                written_bytes=counted.written_bytes,
                moves=self._movers.depth,
                disk_faults={} if self._disk is None else self._disk.faults,
                leases=len(self._leases),
                stages=len(self._stages),
                pins=len(self._pins),
                index_bytes=sum(space.index_bytes for space in spaces),
                policy_bytes=sum(space.tree.policy_bytes for space in spaces),
                sparse_blocks=sum(space.sparse.block_count for space in spaces),
                shortened_tokens=counted.shortened_tokens,
                states=sum(len(space.states) for space in spaces if space.states is not None),
                what_if=what_if(spaces),
                quarantined_slots=0 if self._disk is None else self._disk.quarantined_slots,
                codecs=self._disk.codec_stats if isinstance(self._disk, CodingTier) else {},
            )

    def host_memory(self) -> HostMemoryState:
        """What host memory there is: pages, and how much is touched and locked."""
        self._check_open()
        return self._host.memory()

    def verify(self) -> Verification:
        """Check the index; see kvstore.api.KvStore."""
        self._check_open()
        return self._verifier.verify()

    def scrub(self, *, after: int = 0, limit_bytes: int = SCRUB_BYTES) -> ScrubPage:
        """Read some of what lies on disk; see kvstore.api.KvStore."""
        self._check_open()
        if after < 0 or limit_bytes < 1:
            raise InvalidArgumentError(f"after={after}, limit_bytes={limit_bytes}: expected at least 0 and 1")
        if self._disk is None:
            return ScrubPage(0, 0, 0, 0, 0, None)
        step = self._disk.scrub(after, limit_bytes)
        drop_bad(self._index, self._room, step)
        if bad := len(step.bad):
            logger.warning("blocks on disk were wrong and are dropped: blocks=%d", bad)
        return ScrubPage(step.blocks, step.read_bytes, bad, step.repaired_slots, step.remaining_blocks, step.next_after)

    def events(self, *, after: int = 0, limit: int = 1000, wait_seconds: float = 0.0) -> EventPage:
        """The log of what was stored and removed; see kvstore.api.KvStore."""
        self._check_open()
        return self._index.events.read(after, limit, wait_seconds)

    def tenant_events(self, tenant: str, *, after: int, limit: int, wait_seconds: float) -> EventPage:
        """The same of the namespaces of one tenant, with sequences of their own."""
        self._check_open()
        return self._index.events.read_own(tenant, after, limit, wait_seconds)

    def boundaries(self, every_tokens: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """Namespaces and keys of the blocks that end at a multiple of so many tokens; see boundaries.py."""
        return boundaries(self._index, every_tokens)

    def hot_prefixes(self, every_tokens: int, limit_bytes: int) -> list[HotPrefix]:
        """The prefixes worth most that have so many bytes together; see hot_prefixes.py."""
        return hot_prefixes(self._index, every_tokens, limit_bytes)

    def flush(self) -> None:
        """Return when everything committed and admitted to disk is there."""
        self._check_open()
        self._flush()

    def close(self) -> None:
        """End all leases and stages, flush, and release the tiers; idempotent."""
        if not self._open:
            return
        self._open = False
        self._prefetcher.cancel_all()
        self._movers.close()
        for lease in list(self._leases):
            lease.release()
        for stage in list(self._stages):
            stage.abort()
        try:
            self._flush()
        except StorageError as error:
            # What did not reach the disk is a miss after the next start; the rest must be released all the same.
            logger.warning("store closed without a complete flush: cause=%s", error)
        finally:
            self._host.close()
            if self._disk is not None:
                self._disk.close()

    def leave_to_parent(self) -> None:
        """In the child of a fork: the store with its memory, files and threads stays the parent's, and is over here."""
        self._open = False
        self._left_behind = True
        for lease in self._leases:
            lease.leave_to_parent()
        for stage in self._stages:
            stage.leave_to_parent()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush(self) -> None:
        self._room.flush()
        self._index.save_policies()

    def _check_open(self) -> None:
        if self._left_behind:
            raise ClosedError("the store is that of the parent of this fork; open one after the fork, or use a sidecar")
        if not self._open:
            raise ClosedError("the store is closed")

    def _address(self, namespace: Namespace, tokens: Tokens, root: Root | None) -> tuple[Space, bytes, TokenArray]:
        """Check the arguments that name blocks; nothing has changed yet when one of them is refused."""
        self._check_open()
        prompt = as_prompt(namespace, tokens)
        space = self._index.space(namespace)
        return space, space.root_key(root), prompt

    def _is_spent(self, space: Space, root_key: bytes, prompt: TokenArray) -> bool:
        """Whether the budget has nothing for a prompt that continues nothing; counts it, if so.

        Decided before anything is done for the prompt: a workload without reuse asks again and again.
        """
        with self._index.lock:
            request = StoreRequest(prompt.size // space.layout.block_symbols, space.layout.block_bytes, present=0)
            if admit_host(request, space.budget.left(self._clock.monotonic())):
                return False
            if space.tree.match(root_key, prompt[: space.layout.block_symbols]).size:
                return False
            self._index.accounting.rejected_blocks["budget"] += request.count
        return True

    @uninterrupted
    def _begin_stage(self, stage: StoreStage, space: Space) -> None:
        present, path = self._open_stage(stage, space)
        try:
            stage.begin(present, path, self._room)
        except BaseException:
            stage.abort()
            raise

    def _open_stage(self, stage: StoreStage, space: Space) -> tuple[int, BlockIds]:
        """Insert the placeholders of a stage: how many blocks are present, and the ids of all."""
        while True:
            with self._index.lock:
                if not space.tree.condemned:
                    return self._enter_stage(stage, space)
            # Blocks that are being dropped must be said to be gone before the same ones can be stored again.
            self._index.drain(space)

    def _enter_stage(self, stage: StoreStage, space: Space) -> tuple[int, BlockIds]:
        self._check_stages()
        if space.retired:
            raise NoSpaceError("the namespace had no blocks and made room for another one just now; try again")
        tick = self._index.next_tick()
        present, path = space.tree.stage(stage.root_key, stage.prompt, stage.requested_from, tick)
        space.writers.note(path[present:], stage.writer)
        self._stages.add(stage)
        return present, path

    def _end_overdue(self) -> None:
        """End leases, stages and pins whose time is over, so that a forgotten one cannot hold memory for ever."""
        now = self._clock.monotonic()
        for lease in [lease for lease in list(self._leases) if lease.expires_at <= now]:
            lease.release()
        for stage in [stage for stage in list(self._stages) if stage.expires_at <= now]:
            stage.abort()
        with self._index.lock:
            expired = self._pins.expired()
        self._pins.end(expired)

    def _check_leases(self) -> None:
        if len(self._leases) >= self._settings.leases_max:
            raise NoSpaceError(f"{len(self._leases)} leases are open, the limit (leases_max); release some first")

    def _check_stages(self) -> None:
        if len(self._stages) >= self._settings.stages_max:
            raise NoSpaceError(f"{len(self._stages)} stages are open, the limit (stages_max); commit some first")

    def _enter_lease(self, lease: StateRowsLease) -> None:
        self._check_leases()
        self._leases.add(lease)

    def _enter_state_stage(self, stage: StateRowsStage) -> None:
        self._check_stages()
        self._stages.add(stage)

    def _forget_state_stage(self, stage: StateRowsStage) -> None:
        with self._index.lock:
            self._stages.discard(stage)
        if stage.state.attached and self._settings.disk_admission == DiskAdmission.WRITE_THROUGH and self._open:
            self._movers.offer(StateWriteThrough(self._room, stage))  # else it is written when it leaves host memory

    def _forget_lease(self, lease: StoreLease | StateRowsLease) -> None:
        with self._index.lock:
            self._leases.discard(lease)

    def _forget_stage(self, stage: StoreStage) -> None:
        with self._index.lock:
            self._stages.discard(stage)
        self._shared.forget(stage)
        if self._peers is not None:
            self._peers.stage_ended(stage.space, stage.root_key, stage.prompt)
        if stage.space.disk is None or self._settings.disk_admission != DiskAdmission.WRITE_THROUGH or not self._open:
            return
        found = stage.space.find(stage.root_key, stage.prompt)
        job = WriteThrough(self._room, stage.space, found)
        if not self._movers.offer(job):
            # What is not written now is when it leaves host memory.
            with self._index.lock:
                self._index.accounting.rejected_blocks["write_queue"] += job.blocks


def _leave_all_to_parent() -> None:
    for store in _stores:
        store.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
