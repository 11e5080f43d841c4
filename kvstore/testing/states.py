"""Sequence states for tests: layouts, blobs that say what they are of, and storing and loading them."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from kvstore.layer_groups import SequenceState
from kvstore.testing.conformance_cases import BASE, LAYOUT

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from kvstore.api import KvStore
    from kvstore.types import Namespace, Root, Tier

PIECE_BYTES = 4096
CUT_ANY = SequenceState(form="test", piece_bytes=PIECE_BYTES)
CUT_END = dataclasses.replace(CUT_ANY, cut="end")
STATE_LAYOUT = dataclasses.replace(LAYOUT, block_tokens=1, state=CUT_ANY)
STATES = dataclasses.replace(BASE, layout=STATE_LAYOUT)
END_STATES = dataclasses.replace(BASE, layout=dataclasses.replace(STATE_LAYOUT, state=CUT_END))
STATE_BYTES = 5 * PIECE_BYTES + 123


def blob_of(namespace: Namespace, path: Sequence[int], size_bytes: int, root: Root | None = None) -> NDArray[np.uint8]:
    """The bytes of a state: other ones for whatever differs."""
    text = repr((namespace.model, namespace.layout, list(path), size_bytes, root)).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def store_state(
    store: KvStore,
    namespace: Namespace,
    path: Sequence[int],
    size_bytes: int = STATE_BYTES,
    root: Root | None = None,
    *,
    writer: int | None = None,
) -> bool:
    """Store the right bytes for a path; whether that was wanted and done."""
    with store.stage_state(namespace, path, state_bytes=size_bytes, root=root, writer=writer) as stage:
        if not stage.wanted:
            return False
        stage.write_from(blob_of(namespace, path, size_bytes, root))
        return stage.commit().blocks > 0


def loaded_state(
    store: KvStore,
    namespace: Namespace,
    prompt: Sequence[int],
    root: Root | None = None,
    tiers: Collection[Tier] | None = None,
) -> tuple[int, int, NDArray[np.uint8]]:
    """What is found of a prompt: its tokens, those that its state was stored for, and the bytes that are right."""
    match = store.match(namespace, prompt, root=root, touch=False)
    with store.lease_state(match, tiers=tiers) as lease:
        blob = np.zeros(lease.state_bytes, dtype=np.uint8)
        return lease.tokens, lease.state_tokens, blob[: lease.load_into(blob)]
