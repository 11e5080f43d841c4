from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError, InvalidLayoutError, InvalidNamespaceError, InvalidTokensError
from kvstore.events import Event, EventKind, EventPage
from kvstore.layer_groups import Recurrent, SequenceState, SlidingWindow
from kvstore.stats import CodecStats, StoreStats, TierStats, WhatIf
from kvstore.transport import convert
from kvstore.types import CommitResult, KvLayout, Namespace, Pin, Root, StateSize, Tier, TierRun
from kvstore.v1 import block_pb2

LAYOUT = KvLayout(
    layers=3,
    kv_heads=4,
    head_dim=5,
    dtype="int8",
    block_tokens=7,
    axis_order="LTHD",
    rope="r",
    quantisation="q",
    tensor_parallel=2,
    pipeline_parallel=3,
    engine="e",
    engine_layout=9,
    groups=(
        SlidingWindow(layers=3, window=9, kv_heads=1, head_dim=4, dtype="int8", kv_form="latent"),
        Recurrent(layers=4, state_bytes=12, heads=2, form="f"),
    ),
    ranks=(0, 1, 4),
)
NAMESPACE = Namespace(model="m", revision="r", tenant="t", secret=b"secret-bytes", layout=LAYOUT)
texts = st.none() | st.text(max_size=20)
counts = st.integers(0, 2**63)
by_name = st.dictionaries(st.text(max_size=8), counts, max_size=3)
keys = st.binary(min_size=16, max_size=16)


def test_a_namespace_crosses_whole_but_for_its_secret():
    message = convert.namespace_to_proto(NAMESPACE)
    assert b"secret-bytes" not in message.SerializeToString()
    parsed = block_pb2.Namespace.FromString(message.SerializeToString())
    assert dataclasses.replace(NAMESPACE, secret=None) == convert.namespace_from_proto(parsed, None)
    assert NAMESPACE == convert.namespace_from_proto(parsed, b"secret-bytes")


def test_a_layout_of_sequence_states_crosses_whole():
    layout = KvLayout(
        layers=2,
        kv_heads=1,
        head_dim=5,
        dtype="int8",
        block_tokens=1,
        state=SequenceState(cut="end", form="f", piece_bytes=8192),
    )
    namespace = Namespace(model="m", revision="r", layout=layout)
    parsed = block_pb2.Namespace.FromString(convert.namespace_to_proto(namespace).SerializeToString())
    assert namespace == convert.namespace_from_proto(parsed, None)
    size = StateSize(3, 7, 2**40)
    assert size == convert.state_from_proto(convert.state_to_proto(size))


def test_every_field_of_a_layout_has_a_field_in_the_message():
    assert {item.name for item in dataclasses.fields(KvLayout)} == set(block_pb2.KvLayout.DESCRIPTOR.fields_by_name)
    assert {item.name for item in dataclasses.fields(Root)} == set(block_pb2.Root.DESCRIPTOR.fields_by_name)
    told = {item.name for item in dataclasses.fields(StoreStats)}
    assert told == set(block_pb2.StoreStats.DESCRIPTOR.fields_by_name)


def test_every_field_of_a_layer_group_has_a_field_in_its_message():
    for group in (SlidingWindow, Recurrent, SequenceState):
        message = getattr(block_pb2, group.__name__)
        assert {item.name for item in dataclasses.fields(group)} == set(message.DESCRIPTOR.fields_by_name)


def test_a_group_of_an_unknown_kind_is_refused():
    message = convert.namespace_to_proto(NAMESPACE)
    message.layout.groups.add()
    with pytest.raises(InvalidLayoutError, match="no kind that this version knows"):
        convert.namespace_from_proto(message, None)


def test_enums_have_the_same_numbers_on_the_wire():
    assert {f"TIER_{tier.name}": tier.value for tier in Tier} | {"TIER_UNSPECIFIED": 0} == dict(block_pb2.Tier.items())
    expected = {f"EVENT_KIND_{kind.name}": kind.value for kind in EventKind} | {"EVENT_KIND_UNSPECIFIED": 0}
    assert expected == dict(block_pb2.EventKind.items())


@given(texts, texts, texts)
def test_roots_cross_with_absent_and_empty_fields_apart(adapter: str | None, salt: str | None, epoch: str | None):
    root = Root(adapter=adapter, salt=salt, weights_epoch=epoch)
    message = block_pb2.Root.FromString(convert.root_to_proto(root).SerializeToString())
    assert root == convert.root_from_proto(message)


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(InvalidNamespaceError):
        convert.root_to_proto(Root(salt="\ud800"))


def test_a_namespace_without_a_layout_or_with_an_empty_one_is_refused():
    with pytest.raises(InvalidLayoutError):
        convert.namespace_from_proto(block_pb2.Namespace(tenant="t", model="m", revision="r"), None)
    with pytest.raises(InvalidLayoutError):
        convert.namespace_from_proto(
            block_pb2.Namespace(tenant="t", model="m", revision="r", layout=block_pb2.KvLayout()), None
        )


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_token_ids_cross_as_little_endian_u32(tokens: list[int]):
    prompt = convert.prompt_to_proto(b"i" * 16, None, np.array(tokens, dtype=np.uint32))
    assert prompt.tokens == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert tokens == convert.tokens_from_proto(prompt.tokens).tolist()
    assert not prompt.HasField("root")


def test_half_a_token_is_refused():
    with pytest.raises(InvalidTokensError):
        convert.tokens_from_proto(b"12345")


def test_results_cross_unchanged():
    runs = (TierRun(Tier.HOST, 3), TierRun(Tier.DISK, 1))
    assert runs == convert.runs_from_proto(convert.runs_to_proto(runs))
    assert CommitResult(1, 2, 3) == convert.commit_from_proto(convert.commit_to_proto(CommitResult(1, 2, 3)))
    for pin in (Pin(7, 2, None), Pin(8, 0, 1.8e9 + 0.25)):
        assert pin == convert.pin_from_proto(convert.pin_to_proto(pin))


def test_tiers_cross_unchanged_and_what_is_no_tier_is_refused():
    for tiers in ({Tier.HOST}, {Tier.HOST, Tier.DISK}, set(Tier)):
        assert tiers == convert.tiers_from_proto(convert.tiers_to_proto(tiers))
    assert convert.tiers_from_proto([]) is None
    for number in (0, 5, -1):
        with pytest.raises(InvalidArgumentError, match="tiers are"):
            convert.tiers_from_proto([2, number])


@given(st.dictionaries(st.text(max_size=8), st.builds(TierStats, counts, counts, counts), max_size=3), by_name, counts)
def test_statistics_cross_unchanged(tiers: dict[str, TierStats], named: dict[str, int], count: int):
    numbers = {item.name: count for item in dataclasses.fields(StoreStats) if item.type == "int"}
    stats = StoreStats(
        tiers=tiers,
        hit_tokens=named,
        loaded_tokens={},
        rejected_blocks=named,
        evicted_blocks={"x": 1},
        disk_faults={"y": 2},
        prefetches=named,
        what_if=(WhatIf("host", 0.25, count, 0.5), WhatIf("disk", 4.0, 3, 1.0)),
        codecs={"fp8": CodecStats(count, 2, 3, 4, 0.5, 0.25, 1.5, 2.5), "blosc2": CodecStats()},
        **numbers,
    )
    message = block_pb2.StoreStats.FromString(convert.stats_to_proto(stats).SerializeToString())
    assert stats == convert.stats_from_proto(message)


@given(
    st.lists(
        st.builds(
            Event,
            counts,
            st.sampled_from(EventKind),
            keys,
            root_key=keys,
            tier=st.none() | st.sampled_from(Tier),
            parent_key=keys,
            keys=st.lists(keys, max_size=3).map(tuple),
            last_copy=st.booleans(),
        ),
        max_size=4,
    ),
    st.booleans(),
)
def test_event_pages_cross_unchanged(events: list[Event], gap: bool):
    page = EventPage("epoch", tuple(events), 5, gap)
    message = block_pb2.EventPage.FromString(convert.page_to_proto(page).SerializeToString())
    assert page == convert.page_from_proto(message)


def test_a_page_beyond_the_message_size_is_cut_and_continued():
    huge = tuple(bytes(16) for _ in range(convert.PAGE_BYTES // 16))
    events = tuple(Event(sequence, EventKind.STORED, b"n" * 16, keys=huge) for sequence in (4, 5, 6))
    page = convert.page_from_proto(convert.page_to_proto(EventPage("epoch", events, 6, gap=False)))
    assert (page.events, page.next_after) == (events[:1], 4)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), 1e10])
def test_a_duration_that_is_no_time_is_refused_by_name(seconds: float):
    from google.protobuf.duration_pb2 import Duration

    with pytest.raises(InvalidArgumentError, match="ttl_seconds"):
        convert.set_duration(Duration(), seconds, "ttl_seconds")


def test_a_root_is_not_remembered_with_fields_that_nobody_knows():
    root = Root(adapter="a")
    raw = convert.root_to_proto(root).SerializeToString() + b"\x7a\xff\x7f" + bytes(16_383)  # field 15, of 16 KiB
    references = sys.getrefcount(raw)
    assert root == convert.root_from_bytes(raw)
    assert references == sys.getrefcount(raw)
