from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import hashing
from kvstore._siphash import siphash128
from kvstore.layer_groups import LayerGroup, Recurrent, SequenceState, SlidingWindow
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.types import KvLayout, Namespace, Root

GOLDEN = Path(__file__).parents[2] / "golden"
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", tenant="tenant", secret=b"secret", layout=LAYOUT)

WINDOW = SlidingWindow(layers=1, window=8, kv_heads=1, head_dim=4, dtype="int8")
STATE = Recurrent(layers=1, state_bytes=8, heads=1)
GROUP_CHANGES: list[tuple[LayerGroup, dict[str, object]]] = [
    *((WINDOW, {name: 2}) for name in ("layers", "window", "kv_heads", "head_dim")),
    (WINDOW, {"dtype": "uint8"}),
    (WINDOW, {"kv_form": "latent"}),
    (STATE, {}),
    *((STATE, {name: 2}) for name in ("layers", "state_bytes", "heads")),
    (STATE, {"form": "x"}),
]


@pytest.mark.parametrize("maker", ["make_keys.py", "make_group_keys.py"])
@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_equal_the_golden_vectors_in_every_process(seed: str, maker: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    made = subprocess.run(
        [sys.executable, str(GOLDEN / maker)], env=environment, capture_output=True, check=True, timeout=ANSWER_SECONDS
    )
    golden = GOLDEN / maker.removeprefix("make_").replace(".py", ".json")
    assert json.loads(made.stdout) == json.loads(golden.read_text())


def test_siphash_equals_the_published_vectors() -> None:
    key = bytes(range(16))
    assert siphash128(key, b"").hex() == "a3817f04ba25a8e66df67214c7550293"
    assert siphash128(key, bytes(range(15))).hex() == "5493e99933b0a8117e08ec0f97cfc3d9"


def test_no_two_golden_names_are_equal() -> None:
    vectors = json.loads((GOLDEN / "keys.json").read_text())
    names = []
    for namespace in vectors.values():
        names += [namespace["ns_id"], namespace["ns_key"]]
        for root in namespace["roots"].values():
            names += [root["root_key"], *root["block_keys"]]
    assert len(set(names)) == len(names)


def _variants() -> dict[str, Namespace]:
    changed = {
        "layers": 3, "kv_heads": 4, "head_dim": 16, "dtype": "float16", "block_tokens": 8, "axis_order": "x",
        "rope": "x", "quantisation": "x", "tensor_parallel": 2, "pipeline_parallel": 2, "engine": "x",
        "engine_layout": 2, "groups": (WINDOW,), "symbols": "digests",
    }  # fmt: skip
    variants = {
        name: dataclasses.replace(NAMESPACE, layout=dataclasses.replace(LAYOUT, **{name: value}))
        for name, value in changed.items()
    }
    for group, change in GROUP_CHANGES:
        other = dataclasses.replace(LAYOUT, groups=(dataclasses.replace(group, **change),))
        variants[f"{type(group).__name__} {change}"] = dataclasses.replace(NAMESPACE, layout=other)
    for order in ((WINDOW, STATE), (STATE, WINDOW), (WINDOW, WINDOW)):
        variants[f"groups {order}"] = dataclasses.replace(NAMESPACE, layout=dataclasses.replace(LAYOUT, groups=order))
    whole = dataclasses.replace(LAYOUT, block_tokens=1)
    variants["block_tokens 1"] = dataclasses.replace(NAMESPACE, layout=whole)
    states = {"": {}, " cut": {"cut": "end"}, " form": {"form": "x"}, " piece_bytes": {"piece_bytes": 4096}}
    for name, change in states.items():
        layout = dataclasses.replace(whole, state=SequenceState(**change))
        variants[f"state{name}"] = dataclasses.replace(NAMESPACE, layout=layout)
    ranks = dataclasses.replace(LAYOUT, tensor_parallel=2, ranks=(1,))
    variants["ranks"] = dataclasses.replace(NAMESPACE, layout=ranks)
    latent = dataclasses.replace(LAYOUT, kv_heads=1, kv_form="latent")
    variants["kv_form"] = dataclasses.replace(NAMESPACE, layout=latent)
    variants |= {name: dataclasses.replace(NAMESPACE, **{name: "x"}) for name in ("model", "revision", "tenant")}
    variants["secret"] = dataclasses.replace(NAMESPACE, secret=b"x")
    variants["no secret"] = dataclasses.replace(NAMESPACE, secret=None)
    return variants


def test_every_field_of_a_namespace_changes_its_id_and_key() -> None:
    variants = {"same": NAMESPACE, **_variants()}
    layout_fields = {field.name for field in dataclasses.fields(KvLayout)}
    assert layout_fields <= variants.keys()
    for (_, first), (name, second) in combinations(variants.items(), 2):
        assert hashing.namespace_id(first, b"node") != hashing.namespace_id(second, b"node"), name
        assert hashing.namespace_key(first, b"node") != hashing.namespace_key(second, b"node"), name


@given(first=st.tuples(*[st.text(max_size=4)] * 3), second=st.tuples(*[st.text(max_size=4)] * 3))
def test_a_value_moved_between_root_fields_never_collides(first: tuple[str, ...], second: tuple[str, ...]) -> None:
    key = bytes(16)
    names = ("adapter", "salt", "weights_epoch")
    first_key, second_key = (
        hashing.root_key(key, Root(**dict(zip(names, values, strict=True)))) for values in (first, second)
    )
    assert (first == second) == (first_key == second_key)


def test_an_absent_field_is_not_an_empty_one() -> None:
    roots = [Root(), Root(adapter=""), Root(salt=""), Root(weights_epoch="")]
    assert len({hashing.root_key(bytes(16), root) for root in roots}) == len(roots)


def test_block_keys_chain_over_whole_blocks_alone() -> None:
    tokens = np.arange(11, dtype=np.uint32)
    keys = hashing.block_keys(bytes(16), bytes(16), tokens, 4)
    assert keys.shape == (2, 16)
    again = hashing.block_keys(bytes(16), keys[0].tobytes(), tokens[4:8], 4)
    assert again.tobytes() == keys[1].tobytes()


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9), parent=st.binary(min_size=16, max_size=16))
def test_a_block_key_is_siphash_over_parent_and_tokens(tokens: list[int], parent: bytes) -> None:
    flat = np.array(tokens, dtype=np.uint32)
    key = hashing.block_keys(bytes(range(16)), parent, flat, len(tokens))
    assert key.tobytes() == siphash128(bytes(range(16)), parent + flat.tobytes())


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=5))
def test_keys_are_split_as_they_lie(keys: list[bytes]) -> None:
    rows = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 16)
    pairs = np.stack([rows, rows[::-1]], axis=1)  # (keys, 2, 16): every other row of the memory
    assert keys == hashing.split_keys(rows) == hashing.split_keys(pairs[:, 0])
    assert keys[::-1] == hashing.split_keys(pairs[:, 1])
