"""Ids and keys: what a namespace, a root and a block are called on disk, on the wire and in logs.

All of them are functions of the fields alone, the same in every process, on every machine, under every
PYTHONHASHSEED; tests/golden/keys.json holds vectors. Fields are written as (tag, length, bytes), so that no value
can move from one field to another. A hit is never decided here: the index compares the token ids themselves.

    ns_id     BLAKE2b-128(fields of the namespace, secret), person "kvstore.ns.id"    public: headers, wire, logs
    ns_key    BLAKE2b-128(fields of the namespace, secret), person "kvstore.ns.key"   never written, never sent
    root_key  BLAKE2b-128(fields of the root), keyed by ns_key                        parent of the first block
    key       SipHash-2-4-128(parent key, token ids as little-endian u32 or a digest), keyed by ns_key
    pool_id   BLAKE2b-128(number of a layer group), keyed by ns_id                    sparse parts in the tiers
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

import numpy as np

from kvstore._siphash import chain_keys
from kvstore.layer_groups import SlidingWindow
from kvstore.types import Symbols

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.layer_groups import LayerGroup
    from kvstore.types import KvLayout, Namespace, Root, TokenArray

KEY_BYTES = 16
_KEY = np.dtype(f"V{KEY_BYTES}")

# Tags of fields inside the hashed text. They decide keys on disk: never renumber, never reuse.
_TAG_TENANT, _TAG_SECRET, _TAG_MODEL, _TAG_REVISION = 1, 2, 3, 4
_LAYOUT_TAGS = {
    "layers": 16,
    "kv_heads": 17,
    "head_dim": 18,
    "dtype": 19,
    "block_tokens": 20,
    "kv_form": 21,
    "axis_order": 22,
    "rope": 23,
    "quantisation": 24,
    "tensor_parallel": 25,
    "pipeline_parallel": 26,
    "engine": 27,
    "engine_layout": 28,
}
# Written where a layout has them only, so that the ids of layouts without them stay what they were.
_TAG_SLIDING_WINDOW, _TAG_RECURRENT, _TAG_RANKS, _TAG_STATE, _TAG_SYMBOLS = 29, 30, 31, 32, 33
_SLIDING_WINDOW_TAGS = {"layers": 1, "window": 2, "kv_heads": 3, "head_dim": 4, "dtype": 5, "kv_form": 6}
_RECURRENT_TAGS = {"layers": 1, "state_bytes": 2, "heads": 3, "form": 4}
_STATE_TAGS = {"cut": 1, "form": 2, "piece_bytes": 3}
_ROOT_TAGS = {"adapter": 64, "salt": 65, "weights_epoch": 66}


def namespace_id(namespace: Namespace, fallback_secret: bytes) -> bytes:
    """The 16-byte public name of a namespace. `fallback_secret` stands in where the namespace has no secret."""
    return _digest(_namespace_text(namespace, fallback_secret), person=b"kvstore.ns.id")


def namespace_key(namespace: Namespace, fallback_secret: bytes) -> bytes:
    """The 16-byte key that block keys are made with. Never write, send or log it."""
    return _digest(_namespace_text(namespace, fallback_secret), person=b"kvstore.ns.key")


def namespace_digest(namespace: Namespace) -> bytes:
    """A 32-byte digest of the public fields alone (no secret), for proofs and messages."""
    text = _public_text(namespace)
    return hashlib.blake2b(text, digest_size=32, person=b"kvstore.ns.pub").digest()


def secret_proof(secret: bytes, challenge: bytes, namespace: Namespace) -> bytes:
    """HMAC-SHA256 by which a client shows that it knows the secret of `namespace` without sending it."""
    return hmac.new(secret, b"kvstore.v1.proof" + challenge + namespace_digest(namespace), "sha256").digest()


def root_key(ns_key: bytes, root: Root) -> bytes:
    """The 16-byte digest of a root: the parent key of its first blocks."""
    text = b"".join(
        _field(tag, value.encode()) for name, tag in _ROOT_TAGS.items() if (value := getattr(root, name)) is not None
    )
    return hashlib.blake2b(text, digest_size=KEY_BYTES, key=ns_key, person=b"kvstore.root").digest()


def group_pool_id(ns_id: bytes, group: int) -> bytes:
    """The 16-byte name under which tiers keep the sparse parts of one layer group of a namespace."""
    return hashlib.blake2b(
        group.to_bytes(4, "little"), digest_size=KEY_BYTES, key=ns_id, person=b"kvstore.group"
    ).digest()


def block_keys(ns_key: bytes, parent_key: bytes, tokens: TokenArray, block_symbols: int) -> NDArray[np.uint8]:
    """Chained keys of the whole blocks of `tokens`, shape [blocks, 16]. About 50 ns a block of 16 tokens."""
    keys = np.empty((len(tokens) // block_symbols, KEY_BYTES), dtype=np.uint8)
    chain_keys(ns_key, parent_key, tokens, block_symbols, keys)
    return keys


def split_keys(keys: NDArray[np.uint8]) -> list[bytes]:
    """The rows of an array of keys, shape [blocks, 16], each by itself; in a tenth of the time of a loop over them."""
    split: list[bytes] = keys.view(_KEY).ravel().tolist()
    return split


def _digest(text: bytes, *, person: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=KEY_BYTES, person=person).digest()


def _namespace_text(namespace: Namespace, fallback_secret: bytes) -> bytes:
    secret = fallback_secret if namespace.secret is None else namespace.secret
    return _public_text(namespace) + _field(_TAG_SECRET, secret)


def _public_text(namespace: Namespace) -> bytes:
    return (
        _field(_TAG_TENANT, namespace.tenant.encode())
        + _field(_TAG_MODEL, namespace.model.encode())
        + _field(_TAG_REVISION, namespace.revision.encode())
        + _layout_text(namespace.layout)
    )


def _layout_text(layout: KvLayout) -> bytes:
    ranks = b"".join(rank.to_bytes(8, "little") for rank in layout.ranks)
    return (
        _fields(layout, _LAYOUT_TAGS)
        + b"".join(_group_text(group) for group in layout.groups)
        + (_field(_TAG_RANKS, ranks) if ranks else b"")
        + (_field(_TAG_STATE, _fields(layout.state, _STATE_TAGS)) if layout.state is not None else b"")
        + (_field(_TAG_SYMBOLS, layout.symbols.encode()) if layout.symbols != Symbols.TOKENS else b"")
    )


def _group_text(group: LayerGroup) -> bytes:
    if isinstance(group, SlidingWindow):
        return _field(_TAG_SLIDING_WINDOW, _fields(group, _SLIDING_WINDOW_TAGS))
    return _field(_TAG_RECURRENT, _fields(group, _RECURRENT_TAGS))


def _fields(source: object, tags: dict[str, int]) -> bytes:
    pieces = []
    for name, tag in tags.items():
        value = getattr(source, name)
        pieces.append(_field(tag, value.encode() if isinstance(value, str) else value.to_bytes(8, "little")))
    return b"".join(pieces)


def _field(tag: int, value: bytes) -> bytes:
    return bytes((tag,)) + len(value).to_bytes(4, "little") + value
