"""What a store knows of whole namespaces, and how one of them is emptied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import InvalidArgumentError
from kvstore.events import EventKind
from kvstore.hashing import KEY_BYTES, group_pool_id
from kvstore.stats import NamespaceStats
from kvstore.tiers.persistent import KeepingTier
from kvstore.types import GROUPS_MAX, Tier

if TYPE_CHECKING:
    from kvstore.store.index import Index
    from kvstore.store.room import RoomMaker
    from kvstore.store.space import Space
    from kvstore.tiers.persistent import PersistentTier


def clear_space(index: Index, room: RoomMaker, space: Space) -> int:
    """Drop all of a namespace for good, its pins too; how many blocks that were.

    Raises StorageError if a restart may bring some back, and changes nothing then. Waits for a copy to disk in
    progress. Stages that were open commit nothing any more.
    """
    with room.lock:
        if index.disk is not None:
            # The dense blocks last: without them no restart finds a place for sparse parts.
            for pool_id in reversed(space.pool_ids):
                index.disk.clear(pool_id)
        with space.removing:
            with index.lock:
                blocks = space.block_count
                cleared = [space.clear()]
                index.accounting.evicted_blocks["clear"] += blocks
                pin_ids = index.pins.ids_of(space)
            cleared[0].settle_host()
            cleared += index.reap_all(space)
        for freed in cleared:
            freed.settle_disk()
    index.pins.end(pin_ids)
    return blocks


def delete_namespace(index: Index, room: RoomMaker, ns_id: bytes) -> int:
    """The same by its public id, also where nobody has used it since the start; blocks of it then count 0.

    Raises InvalidArgumentError for what cannot be an id.
    """
    if len(ns_id) != KEY_BYTES:
        raise InvalidArgumentError(f"ns_id has {len(ns_id)} bytes, expected {KEY_BYTES}")
    space = _open_space(index, ns_id)
    if space is None and index.disk is not None:
        for pool_id in (*reversed(_untaken_parts(index.disk, ns_id)), ns_id):  # the dense blocks last, as above
            index.disk.clear(pool_id)
        index.events.append(EventKind.CLEARED, ns_id)
        space = _open_space(index, ns_id)  # opened meanwhile
    return 0 if space is None else clear_space(index, room, space)


def namespace_stats(index: Index) -> list[NamespaceStats]:
    """Those that are open, and those of which only the disk has blocks so far, by id."""
    found = []
    opened = index.spaces()
    with index.lock:
        for space in opened:
            named = space.namespace
            blocks = {tier: space.tier_blocks(tier) for tier in (Tier.HOST, Tier.DISK)}
            found.append(
                NamespaceStats(
                    space.ns_id,
                    named.tenant,
                    named.model,
                    named.revision,
                    host_blocks=blocks[Tier.HOST],
                    disk_blocks=blocks[Tier.DISK],
                    block_bytes=named.layout.block_bytes,
                    pins=len(index.pins.ids_of(space)),
                )
            )
    if isinstance(index.disk, KeepingTier):
        pool_ids = {pool_id for space in opened for pool_id in space.pool_ids}
        untaken = [kept for kept in index.disk.recovered_namespaces() if kept.ns_id not in pool_ids]
        parts = {pool_id for kept in untaken for pool_id in _untaken_parts(index.disk, kept.ns_id)}
        found += [
            NamespaceStats(kept.ns_id, disk_blocks=kept.blocks, block_bytes=sum(kept.part_sizes))
            for kept in untaken
            if kept.ns_id not in parts
        ]
    return sorted(found, key=lambda stats: stats.ns_id)


def _untaken_parts(disk: PersistentTier, ns_id: bytes) -> list[bytes]:
    """Under which names the disk has sparse parts of a namespace that nobody has used since the start."""
    if not isinstance(disk, KeepingTier):
        return []
    kept_ids = {kept.ns_id for kept in disk.recovered_namespaces()}
    return [
        pool_id for pool_id in (group_pool_id(ns_id, number) for number in range(GROUPS_MAX)) if pool_id in kept_ids
    ]


def _open_space(index: Index, ns_id: bytes) -> Space | None:
    """The open namespace of that id; waits for one that is being opened."""
    return next((space for space in index.settled_spaces() if space.ns_id == ns_id), None)
