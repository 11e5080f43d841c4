from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.cluster.directory import NodeProfile
from kvstore.cluster.locate import NodeView
from kvstore.cluster.memory_directory import MemoryDirectory, SharedDirectory
from kvstore.testing.blocks import store_prompt
from kvstore.testing.manual_clock import ManualClock
from kvstore.types import KvLayout, Namespace, Tier

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
ANNOUNCE_TOKENS = 8
PROMPT = list(range(4 * 50 + 3))


@settings(max_examples=25, deadline=None)
@given(own_blocks=st.integers(0, 50), held=st.lists(st.integers(0, 25), min_size=1, max_size=4))
def test_each_node_has_what_it_holds_to_its_last_boundary(own_blocks: int, held: list[int]) -> None:
    shared = SharedDirectory(ManualClock())
    own = MemoryDirectory(shared)
    own.join(NodeProfile("own", b"1"))
    with kvstore.open(None, host_bytes=1 << 20) as store:
        if own_blocks:
            store_prompt(store, NAMESPACE, PROMPT[: own_blocks * 4])
        boundaries = store.block_keys(NAMESPACE, PROMPT)[1::2]
        expected = {"own": own_blocks * 4}
        for number, count in enumerate(held):
            other = MemoryDirectory(shared)
            other.join(NodeProfile(f"other{number}", b"1"))
            other.announce(boundaries[:count])
            expected[f"other{number}"] = count * ANNOUNCE_TOKENS
        found = NodeView(store, own, "own", ANNOUNCE_TOKENS).locate(NAMESPACE, PROMPT, None)
    assert expected == {match.node.name: match.tokens for match in found}
    assert sorted((match.tokens for match in found), reverse=True) == [match.tokens for match in found]
    for match in found:
        tier = Tier.HOST if match.node.name == "own" else Tier.PEER
        assert ({tier: match.tokens} if match.tokens else {}) == match.tiers


def test_asking_where_a_prompt_lies_counts_as_no_lookup() -> None:
    own = MemoryDirectory(SharedDirectory(ManualClock()))
    own.join(NodeProfile("own", b"1"))
    with kvstore.open(None, host_bytes=1 << 20) as store:
        store_prompt(store, NAMESPACE, PROMPT)
        NodeView(store, own, "own", ANNOUNCE_TOKENS).locate(NAMESPACE, PROMPT, None)
        assert 0 == store.stats().lookups
