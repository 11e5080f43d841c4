"""What the transformers connector asks of a store: loads of a prefix, stores of computed blocks, the self-check."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore.connectors.huggingface_cache import new_blocks
from kvstore.errors import NoSpaceError
from kvstore.types import Root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.api import KvStore
    from kvstore.connectors.huggingface_cache import LayerSet, Run
    from kvstore.types import CommitResult, Namespace, PrefixMatch


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """The first `blocks` blocks of a prompt: for each layer set those of them that it needs.

    `is_short` says that less came than was asked for.
    """

    blocks: int
    parts: tuple[torch.Tensor, ...]
    is_short: bool


@dataclass(frozen=True, slots=True)
class StoreJob:
    """What is to be stored of one row: the runs of computed blocks of each part, the dense one first."""

    namespace: Namespace
    root: Root
    tokens: torch.Tensor
    turn_ends: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(run.blocks.nbytes for part in self.runs for run in part)


def load_prefix(store: KvStore, match: PrefixMatch, sets: Sequence[LayerSet], blocks_max: int) -> LoadedPrefix:
    """What could be loaded and verified of a match: at most `blocks_max` blocks, or fewer.

    With sparse parts it is all of the match or nothing: a shorter prefix needs others.
    """
    size = match.namespace.layout.block_tokens
    with store.lease(match) as lease:
        if len(sets) == 1 and sets[0].window is None:
            rows = new_blocks(sets[0], size, min(lease.blocks, blocks_max))
            loaded = lease.load_into(rows).blocks if len(rows) else 0
            return LoadedPrefix(loaded, (rows[:loaded],), loaded < min(match.blocks, blocks_max))
        parts = []
        for layers in sets:
            needed = layers.needed_blocks(lease.blocks, size)
            rows = new_blocks(layers, size, len(needed))
            part = layers.part or None  # the dense layers are one part
            if len(rows) and lease.load_into(rows, from_block=needed.start, part=part).blocks < len(rows):
                return nothing_loaded(sets, size)
            parts.append(rows)
        return LoadedPrefix(lease.blocks, tuple(parts), lease.blocks < match.blocks)


def nothing_loaded(sets: Sequence[LayerSet], block_tokens: int) -> LoadedPrefix:
    """The prefix of no blocks."""
    return LoadedPrefix(0, tuple(new_blocks(layers, block_tokens, 0) for layers in sets), is_short=True)


def store_row(store: KvStore, job: StoreJob) -> CommitResult:
    """Store one row: its dense blocks, and of the others those that the store wants."""
    dense, *sparse = job.runs
    stage = store.stage(
        job.namespace, job.tokens, root=job.root, from_block=dense[0].first, turn_ends=job.turn_ends if sparse else ()
    )
    try:
        if stage.blocks:
            for run in dense:
                stage.write_from(run.blocks, from_block=run.first)
        for part, runs in enumerate(sparse, 1):
            for wanted in stage.wanted(part):
                for run in runs:
                    first, last = max(wanted.start, run.first), min(wanted.stop, run.first + len(run.blocks))
                    if first < last:
                        rows = run.blocks[first - run.first : last - run.first]
                        stage.write_from(rows, from_block=first, part=part)
        return stage.commit()
    finally:
        stage.abort()


def gives_back_what_it_takes(store: KvStore, namespace: Namespace) -> bool:
    """Whether a random block, under a root that nobody else has, comes back byte for byte in all of its parts.

    Raises NoSpaceError if the store has no room for it, which says nothing either way.
    """
    layout = namespace.layout
    root = Root(salt=f"kvstore self-check {secrets.token_hex(16)}")
    tokens = torch.arange(layout.block_tokens)
    sizes: dict[int | None, int] = {None: layout.block_bytes}
    sizes |= {part: layout.part_bytes(part) for part in range(layout.part_count, len(layout.parts))}
    written = {part: _random_row(size) for part, size in sizes.items()}
    with store.stage(namespace, tokens, root=root) as stage:
        if stage.blocks:
            for part, row in written.items():
                stage.write_from(row, part=part)
    try:
        read = _read_block(store, store.match(namespace, tokens, root=root, touch=False), sizes)
    finally:
        store.evict(namespace, tokens, root=root)
    if not read:
        raise NoSpaceError("the store took no block for the self-check")
    return all(torch.equal(read[part], row) for part, row in written.items())


def _random_row(size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(secrets.token_bytes(size)), dtype=torch.uint8)[None]


def _read_block(store: KvStore, match: PrefixMatch, sizes: dict[int | None, int]) -> dict[int | None, torch.Tensor]:
    """The parts of the first block of a match; none unless all of them came."""
    rows = {part: torch.empty((1, size), dtype=torch.uint8) for part, size in sizes.items()}
    with store.lease(match) as lease:
        if not lease.blocks:
            return {}
        loads = [lease.load_into(row, part=part).blocks for part, row in rows.items()]
    return rows if all(loads) else {}
