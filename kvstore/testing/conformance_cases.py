"""What the conformance suite stores: namespaces, roots and prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from kvstore.api import KvStore
from kvstore.types import KvLayout, Namespace, Root

OpenStore: TypeAlias = Callable[..., KvStore]

SECRETS = (b"first secret of the tests", b"second secret of the tests")
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4)
BASE = Namespace(model="model", revision="revision", tenant="tenant", secret=SECRETS[0], layout=LAYOUT)
PROMPT = list(range(100, 140))
BLOCKS = len(PROMPT) // LAYOUT.block_tokens
MIB = 1 << 20

OTHER_NAMESPACES = {
    "tenant": dataclasses.replace(BASE, tenant="other"),
    "secret": dataclasses.replace(BASE, secret=SECRETS[1]),
    "no secret": dataclasses.replace(BASE, secret=None),
    "model": dataclasses.replace(BASE, model="other"),
    "revision": dataclasses.replace(BASE, revision="other"),
    "model and revision swapped": dataclasses.replace(BASE, model="revision", revision="model"),
    "dtype of the same size": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, dtype="bfloat16")),
    "axis order": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, axis_order="LKTHD")),
    "rope": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, rope="theta=1e6")),
    "quantisation": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, quantisation="theta=1e6")),
    "world size": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, tensor_parallel=2)),
    "pipeline size": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, pipeline_parallel=2)),
    "engine": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, engine="other")),
    "engine layout": dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, engine_layout=2)),
}
OTHER_ROOTS = {
    "adapter": Root(adapter="x"),
    "salt": Root(salt="x"),
    "weights epoch": Root(weights_epoch="x"),
    "empty adapter": Root(adapter=""),
}

# Two blocks of 16 whose XXH3-128 over (any parent, tokens) are equal: a store that trusts such a key mixes them up.
COLLIDING_HEADS = ((29625, 95822, 101446, 35249), (18902, 118794, 112169, 12277))
