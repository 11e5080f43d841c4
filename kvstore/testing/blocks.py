"""Payloads that say what they are: the bytes of a test block are a function of its namespace, root and whole prefix.

A test that reads a block can so tell whether it is right without keeping a copy of what was written.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from kvstore.hashing import namespace_digest
from kvstore.types import PLAIN_ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.api import KvStore
    from kvstore.types import CommitResult, Namespace, Root


def expected_rows(namespace: Namespace, tokens: Sequence[int], root: Root | None = None) -> NDArray[np.uint8]:
    """The right bytes of every whole block of a prompt, shape [blocks, block_bytes]."""
    layout = namespace.layout
    block_tokens = layout.block_tokens
    flat = np.asarray(tokens, dtype=np.uint32)
    chain = hashlib.blake2b(namespace_digest(namespace), key=namespace.secret or b"", digest_size=16)
    chain.update(repr(_root_fields(root)).encode())
    rows = np.empty((flat.size // block_tokens, layout.block_bytes), dtype=np.uint8)
    for index in range(len(rows)):
        chain.update(flat[index * block_tokens : (index + 1) * block_tokens].tobytes())
        seed = int.from_bytes(chain.digest(), "little")
        rows[index] = np.frombuffer(np.random.default_rng(seed).bytes(layout.block_bytes), dtype=np.uint8)
    return rows


def store_prompt(
    store: KvStore, namespace: Namespace, tokens: Sequence[int], *, root: Root | None = None, from_block: int = 0
) -> CommitResult:
    """Store the right bytes for every block of a prompt from `from_block` on."""
    rows = expected_rows(namespace, tokens, root)
    stage = store.stage(namespace, tokens, root=root, from_block=from_block)
    try:
        stage.write_from(rows[from_block:])
    except BaseException:
        stage.abort()
        raise
    return stage.commit()


def verified_blocks(store: KvStore, namespace: Namespace, tokens: Sequence[int], *, root: Root | None = None) -> int:
    """How many blocks of a prompt the store gives back, after asserting that each of them is right."""
    right = expected_rows(namespace, tokens, root)
    with store.lease(store.match(namespace, tokens, root=root)) as lease:
        rows = np.zeros((lease.blocks, namespace.layout.block_bytes), dtype=np.uint8)
        done = lease.load_into(rows)
    wrong = [index for index in range(done.blocks) if not np.array_equal(rows[index], right[index])]
    assert not wrong, f"blocks {wrong} of {done.blocks} hold other bytes than were stored for this prefix"
    return done.blocks


def _root_fields(root: Root | None) -> tuple[str | None, str | None, str | None]:
    root = PLAIN_ROOT if root is None else root
    return root.adapter, root.salt, root.weights_epoch
