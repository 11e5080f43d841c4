from __future__ import annotations

import random
import tracemalloc

import msgspec
import pytest

from kvstore.engine_event_config import EngineEventConfig
from kvstore.engine_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, read_batch
from kvstore.engine_events.overlay import DeviceOverlay
from kvstore.engine_events.residency import BLOCK_BYTES_MAX, Outcome
from kvstore.errors import EngineEventsError
from kvstore.types import KvLayout, Namespace, Root

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=16)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
TOKENS = list(range(40))


def overlay_of(**values):
    return DeviceOverlay({"engine": EngineEventConfig(endpoint="tcp://engine:1", **{"model": "model"} | values)})


def stored(hashes, tokens, parent=None, **values):
    return BlockStored(hashes, parent, tokens, **{"block_size": 8, "medium": "GPU"} | values)


def held(overlay, root=None, namespace=NAMESPACE):
    return overlay.device_tokens(namespace, TOKENS, root).get("engine", 0)


@pytest.mark.parametrize("block_tokens", [1, 8, 16, 32, 5])
def test_a_prompt_is_found_in_steps_of_the_engines_blocks_whatever_the_stores_are(block_tokens):
    overlay = overlay_of()
    count = len(TOKENS) // block_tokens
    event = stored(list(range(count)), TOKENS[: count * block_tokens], block_size=block_tokens)
    assert Outcome.APPLIED == overlay.engines[0].residency.apply(event)
    assert count * block_tokens == held(overlay)


def test_blocks_of_other_salts_adapters_models_and_tenants_are_not_found():
    overlay = overlay_of(adapters=("sql=digest",))
    residency = overlay.engines[0].residency
    plain = stored([1], TOKENS[:8])
    salted = stored([2, 3], TOKENS[:16], extra_keys=[["salt"], None])
    adapted = stored([4, 5, 6], TOKENS[:24], lora_name="sql", extra_keys=[["sql"]] * 3)
    both = stored([7, 8, 9, 10], TOKENS[:32], lora_name="sql", extra_keys=[["sql", "salt"], ["sql"], ["sql"], ["sql"]])
    assert [Outcome.APPLIED] * 4 == [residency.apply(event) for event in (plain, salted, adapted, both)]
    roots = (None, Root(salt="salt"), Root(adapter="digest"), Root(adapter="digest", salt="salt"), Root(salt="sql"))
    assert [8, 16, 24, 32, 0] == [held(overlay, root) for root in roots]
    others = [
        Namespace(model="other", revision="revision", layout=LAYOUT),
        Namespace(model="model", revision="revision", tenant="other", layout=LAYOUT),
    ]
    assert [0, 0] == [held(overlay, namespace=namespace) for namespace in others]


@pytest.mark.parametrize(
    ("outcome", "event"),
    [
        (Outcome.OTHER_MEDIUM, stored([1], TOKENS[:8], medium="CPU")),
        (Outcome.UNKNOWN_PARENT, stored([1], TOKENS[:8], parent=99)),
        (Outcome.UNSUPPORTED, stored([1], TOKENS[:9])),
        (Outcome.UNSUPPORTED, stored([1], TOKENS[:8], lora_name="unnamed")),
        (Outcome.UNSUPPORTED, stored([1], TOKENS[:8], extra_keys=[[["image", 3]]])),
        (Outcome.UNSUPPORTED, stored([1], TOKENS[:8], extra_keys=[["salt", "embedding"]])),
        (Outcome.UNKNOWN_BLOCK, BlockRemoved([1], "GPU")),
        (Outcome.OTHER_MEDIUM, BlockRemoved([1], "STORAGE")),
    ],
)
def test_what_cannot_be_placed_changes_nothing(outcome, event):
    overlay = overlay_of()
    assert outcome == overlay.engines[0].residency.apply(event)
    assert (0, 0) == (overlay.engines[0].residency.blocks, held(overlay))


def test_a_prompt_ends_where_an_image_begins():
    overlay = overlay_of()
    event = stored([1, 2, 3], TOKENS[:24], extra_keys=[None, [["image", 0]], None])
    assert Outcome.UNSUPPORTED == overlay.engines[0].residency.apply(event)
    assert 8 == held(overlay)


def test_of_several_layer_groups_the_first_one_seen_counts():
    overlay = overlay_of()
    residency = overlay.engines[0].residency
    residency.apply(stored([1, 2], TOKENS[:16], group_idx=0))
    outcomes = [residency.apply(event) for event in (stored([1], TOKENS[:8], group_idx=1), BlockRemoved([1], "GPU", 1))]
    assert [Outcome.OTHER_GROUP] * 2 == outcomes
    assert 16 == held(overlay)


def test_a_block_that_the_engine_holds_twice_is_there_until_both_are_gone():
    overlay = overlay_of()
    residency = overlay.engines[0].residency
    for _ in range(3):
        residency.apply(stored([1, 2], TOKENS[:16]))
    seen = []
    for _ in range(3):
        residency.apply(BlockRemoved([1], "GPU"))
        seen.append(held(overlay))
    assert [16, 16, 0] == seen
    residency.apply(AllBlocksCleared())
    assert 0 == residency.blocks


def test_blocks_beyond_the_limit_are_left_out():
    overlay = overlay_of(blocks_max=3)
    assert Outcome.FULL == overlay.engines[0].residency.apply(stored([1, 2, 3, 4, 5], TOKENS))
    assert (3, 24) == (overlay.engines[0].residency.blocks, held(overlay))


@pytest.mark.parametrize("blocks", [22_000, 44_000])  # just behind and just before a dict grows
def test_a_block_takes_no_more_memory_than_stated(blocks):
    overlay = overlay_of()
    tokens = [0] * (8 * 1000)
    hashes = [random.randbytes(32) for _ in range(blocks)]
    tracemalloc.start()
    parent = None
    for first in range(0, blocks, 1000):
        copies = [bytes(bytearray(value)) for value in hashes[first : first + 1000]]
        overlay.engines[0].residency.apply(stored(copies, tokens, parent))
        parent = hashes[first + 999]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert blocks == overlay.engines[0].residency.blocks
    assert taken / blocks <= BLOCK_BYTES_MAX


def test_events_as_older_engines_wrote_them_are_read():
    events = [["BlockStored", [1], None, TOKENS[:8], 8, None], ["BlockRemoved", [1]], ["AllBlocksCleared"], ["New", 1]]
    batch = read_batch(msgspec.msgpack.encode([1.5, events]))
    assert ((BlockStored([1], None, TOKENS[:8], 8), BlockRemoved([1]), AllBlocksCleared()), 1) == (
        batch.events,
        batch.foreign,
    )


BAD_EVENTS = [
    {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [-1], "block_size": 1},
    {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [2**32], "block_size": 1},
    {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 0},
    {"type": "BlockStored", "block_hashes": ["x"], "parent_block_hash": None, "token_ids": [1], "block_size": 1},
    {"type": "BlockStored", "block_hashes": [b"x" * 65], "parent_block_hash": None, "token_ids": [], "block_size": 1},
    {"type": "BlockRemoved"},
    {"block_hashes": []},
    ["BlockStored", [1]],
    [],
    7,
    None,
]


@pytest.mark.parametrize("bad", BAD_EVENTS)
def test_a_batch_with_one_malformed_event_counts_not_at_all(bad):
    overlay = overlay_of()
    good = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": TOKENS[:8]}
    payload = msgspec.msgpack.encode([1.0, [good | {"block_size": 8}, bad], 0])
    if bad == []:
        assert 1 == read_batch(payload).foreign
        return
    with pytest.raises(EngineEventsError, match="no batch of KV events"):
        read_batch(payload)
    overlay.engines[0].follower.live(0, payload)
    assert {"malformed": 1} == overlay.stats()[0].events
    assert 0 == held(overlay)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x91\x91", msgspec.msgpack.encode({}), b"\x91" * 5000, b"\xdd\xff\xff\xff\xff"]
)
def test_what_is_no_batch_is_refused(payload):
    with pytest.raises(EngineEventsError, match="no batch of KV events"):
        read_batch(payload)


def test_without_replays_a_gap_forgets_what_was_held():
    overlay = overlay_of()
    follower = overlay.engines[0].follower
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": TOKENS[:8]}
    follower.connected()
    follower.live(5, msgspec.msgpack.encode([1.0, [event | {"block_size": 8}], 0]))
    assert 8 == held(overlay)
    follower.live(7, msgspec.msgpack.encode([2.0, [], 0]))
    assert ({"applied": 1, "lost": 1}, 0) == (overlay.stats()[0].events, held(overlay))


def test_events_as_sglang_writes_them_are_read_with_their_salt():
    event = {
        "type": "BlockStored",
        "block_hashes": [-(2**63)],
        "parent_block_hash": None,
        "token_ids": TOKENS[:8],
        "block_size": 8,
        "lora_id": None,
        "medium": "GPU",
        "cache_salt": "salt",
    }
    pinned = event | {"block_hashes": [7], "medium": "CPU_PINNED"}
    overlay = overlay_of()
    overlay.engines[0].follower.live(0, msgspec.msgpack.encode([1.0, [event, pinned], None]))
    assert {"applied": 1, "other_medium": 1} == overlay.stats()[0].events
    assert (8, 0) == (held(overlay, Root(salt="salt")), held(overlay))
