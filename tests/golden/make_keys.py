"""Write keys.json anew: `python tests/golden/make_keys.py > tests/golden/keys.json`. Only for a new key format."""

from __future__ import annotations

import json
import sys

from kvstore import hashing
from kvstore.types import KvLayout, Namespace, Root

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4)
NAMESPACES = {
    "plain": Namespace(model="model", revision="revision", tenant="tenant", secret=b"secret", layout=LAYOUT),
    "other revision": Namespace(model="model", revision="other", tenant="tenant", secret=b"secret", layout=LAYOUT),
    "node secret": Namespace(model="model", revision="revision", layout=LAYOUT),
}
ROOTS = {
    "plain": Root(),
    "adapter x": Root(adapter="x"),
    "salt x": Root(salt="x"),
    "epoch x": Root(weights_epoch="x"),
    "all": Root(adapter="a", salt="s", weights_epoch="w"),
}
TOKENS = [0, 1, 2, 3, 2**32 - 1, 5, 6, 7, 8]
NODE_SECRET = bytes(range(32))


def golden() -> dict[str, dict[str, object]]:
    """All vectors: for each namespace its ids, and for each root its key and the keys of two blocks."""
    import numpy as np

    vectors: dict[str, dict[str, object]] = {}
    for name, namespace in NAMESPACES.items():
        ns_key = hashing.namespace_key(namespace, NODE_SECRET)
        roots: dict[str, object] = {}
        for root_name, root in ROOTS.items():
            parent = hashing.root_key(ns_key, root)
            keys = hashing.block_keys(ns_key, parent, np.array(TOKENS, dtype=np.uint32), LAYOUT.block_tokens)
            roots[root_name] = {"root_key": parent.hex(), "block_keys": [row.tobytes().hex() for row in keys]}
        vectors[name] = {
            "ns_id": hashing.namespace_id(namespace, NODE_SECRET).hex(),
            "ns_key": ns_key.hex(),
            "public_digest": hashing.namespace_digest(namespace).hex(),
            "proof": hashing.secret_proof(b"secret", b"challenge", namespace).hex(),
            "roots": roots,
        }
    return vectors


if __name__ == "__main__":
    json.dump(golden(), sys.stdout, indent=1)
