"""Write group_keys.json anew: `python tests/golden/make_group_keys.py > tests/golden/group_keys.json`."""

from __future__ import annotations

import dataclasses
import json
import sys

from kvstore import hashing
from kvstore.layer_groups import Recurrent, SequenceState, SlidingWindow
from kvstore.types import KvLayout, Namespace

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4, tensor_parallel=2)
WINDOW = SlidingWindow(layers=3, window=10, kv_heads=2, head_dim=8, dtype="bfloat16")
STATE = Recurrent(layers=4, state_bytes=4096, heads=2, form="conv bf16, ssm f32")
LAYOUTS = {
    "dense": LAYOUT,
    "sliding window": dataclasses.replace(LAYOUT, groups=(WINDOW,)),
    "recurrent": dataclasses.replace(LAYOUT, groups=(STATE,)),
    "both": dataclasses.replace(LAYOUT, groups=(WINDOW, STATE)),
    "both, in the other order": dataclasses.replace(LAYOUT, groups=(STATE, WINDOW)),
    "first rank": dataclasses.replace(LAYOUT, ranks=(0,)),
    "no full attention": dataclasses.replace(LAYOUT, layers=0, groups=(WINDOW, STATE)),
    "sequence state": dataclasses.replace(
        LAYOUT, block_tokens=1, tensor_parallel=1, state=SequenceState(cut="end", form="test", piece_bytes=8192)
    ),
    "digests": dataclasses.replace(LAYOUT, symbols="digests"),
    "second rank, both": dataclasses.replace(LAYOUT, groups=(WINDOW, STATE), ranks=(1,)),
}


def golden() -> dict[str, dict[str, object]]:
    """For each layout the names of a namespace that has it, and of the pools of its groups."""
    vectors: dict[str, dict[str, object]] = {}
    for name, layout in LAYOUTS.items():
        namespace = Namespace(model="model", revision="revision", tenant="tenant", secret=b"secret", layout=layout)
        ns_id = hashing.namespace_id(namespace, b"")
        vectors[name] = {
            "ns_id": ns_id.hex(),
            "ns_key": hashing.namespace_key(namespace, b"").hex(),
            "public_digest": hashing.namespace_digest(namespace).hex(),
            "pool_ids": [hashing.group_pool_id(ns_id, group).hex() for group in range(len(layout.groups))],
        }
    return vectors


if __name__ == "__main__":
    json.dump(golden(), sys.stdout, indent=1)
