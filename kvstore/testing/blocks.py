"""Payloads that say what they are: the bytes of a test block are a function of its namespace, root and whole prefix.

A test that reads a block can so tell whether it is right without keeping a copy of what was written.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from kvstore.hashing import namespace_digest
from kvstore.tokens import as_prompt
from kvstore.types import PLAIN_ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.api import KvStore, Stage
    from kvstore.types import CommitResult, Namespace, Root

    Prompt = Sequence[int] | Sequence[bytes]


def expected_rows(namespace: Namespace, tokens: Prompt, root: Root | None = None) -> NDArray[np.uint8]:
    """The right bytes of all dense parts of every whole block of a prompt, shape [blocks, block_bytes]."""
    return _expected(namespace, tokens, root, namespace.layout.block_bytes)


def expected_part_rows(namespace: Namespace, tokens: Prompt, part: int, root: Root | None = None) -> NDArray[np.uint8]:
    """The right bytes of one part of every whole block of a prompt, shape [blocks, part_bytes]."""
    layout = namespace.layout
    if part < layout.part_count:
        begin = sum(layout.part_sizes[:part])
        rows = expected_rows(namespace, tokens, root)
        return np.ascontiguousarray(rows[:, begin : begin + layout.part_bytes(part)])
    return _expected(namespace, tokens, root, layout.part_bytes(part), part)


def store_prompt(
    store: KvStore,
    namespace: Namespace,
    tokens: Prompt,
    *,
    root: Root | None = None,
    from_block: int = 0,
    turn_ends: Sequence[int] = (),
    writer: int | None = None,
) -> CommitResult:
    """Store the right bytes for every block of a prompt from `from_block` on, and for the sparse parts wanted of it."""
    rows = expected_rows(namespace, tokens, root)
    stage = store.stage(namespace, tokens, root=root, from_block=from_block, turn_ends=turn_ends, writer=writer)
    try:
        stage.write_from(rows[from_block:])
        for part in sparse_parts(namespace):
            write_sparse(stage, part, expected_part_rows(namespace, tokens, part, root))
    except BaseException:
        stage.abort()
        raise
    return stage.commit()


def write_sparse(stage: Stage, part: int, rows: NDArray[np.uint8]) -> int:
    """Write what a stage wants of a sparse part, of which `rows` has every block; returns how many rows it took."""
    return sum(
        stage.write_from(rows[run.start : run.stop], from_block=run.start, part=part) for run in stage.wanted(part)
    )


def verified_blocks(store: KvStore, namespace: Namespace, tokens: Prompt, *, root: Root | None = None) -> int:
    """How many blocks of a prompt the store gives back with all that a match of them needs, each asserted right."""
    layout = namespace.layout
    right = expected_rows(namespace, tokens, root)
    with store.lease(store.match(namespace, tokens, root=root)) as lease:
        rows = np.zeros((lease.blocks, layout.block_bytes), dtype=np.uint8)
        done = lease.load_into(rows)
        usable = done.blocks
        for part in sparse_parts(namespace):
            needed = layout.needed_blocks(part, lease.blocks)
            right_part = expected_part_rows(namespace, tokens, part, root)[needed.start : needed.stop]
            part_rows = np.zeros_like(right_part)
            loaded = lease.load_into(part_rows, from_block=needed.start, part=part).blocks
            assert np.array_equal(part_rows[:loaded], right_part[:loaded]), f"part {part} holds other bytes"
            usable = usable if loaded == len(needed) else 0
    wrong = [index for index in range(done.blocks) if not np.array_equal(rows[index], right[index])]
    assert not wrong, f"blocks {wrong} of {done.blocks} hold other bytes than were stored for this prefix"
    return usable


def sparse_parts(namespace: Namespace) -> range:
    """The numbers of a layout's sparse parts."""
    return range(namespace.layout.part_count, len(namespace.layout.parts))


def _expected(
    namespace: Namespace,
    tokens: Prompt,
    root: Root | None,
    row_bytes: int,
    part: int | None = None,
) -> NDArray[np.uint8]:
    symbols = namespace.layout.block_symbols
    flat = as_prompt(namespace, tokens)
    chain = hashlib.blake2b(namespace_digest(namespace), key=namespace.secret or b"", digest_size=16)
    chain.update(repr(_root_fields(root)).encode())
    chain.update(b"" if part is None else str(part).encode())
    rows = np.empty((flat.size // symbols, row_bytes), dtype=np.uint8)
    for index in range(len(rows)):
        chain.update(flat[index * symbols : (index + 1) * symbols].tobytes())
        seed = int.from_bytes(chain.digest(), "little")
        rows[index] = np.frombuffer(np.random.default_rng(seed).bytes(row_bytes), dtype=np.uint8)
    return rows


def _root_fields(root: Root | None) -> tuple[str | None, str | None, str | None]:
    root = PLAIN_ROOT if root is None else root
    return root.adapter, root.salt, root.weights_epoch
