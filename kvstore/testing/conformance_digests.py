"""Conformance of opaque namespaces: their engines hand over a digest of each block, and no token ids."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.errors import InvalidTokensError
from kvstore.layer_groups import SlidingWindow
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.conformance_cases import BASE, BLOCKS, LAYOUT, PROMPT
from kvstore.tokens import as_prompt
from kvstore.types import Symbols, Tier

if TYPE_CHECKING:
    from kvstore.api import KvStore

OPAQUE = dataclasses.replace(BASE, layout=dataclasses.replace(LAYOUT, symbols=Symbols.DIGESTS.value))
DIGESTS = [hashlib.sha256(bytes((number,))).digest() for number in range(BLOCKS)]
BLOCK_TOKENS = LAYOUT.block_tokens


class DigestConformance:
    """Part of KvStoreConformance, which provides the fixtures."""

    def test_a_prompt_of_digests_is_found_by_its_leading_digests(self, store: KvStore) -> None:
        assert store_prompt(store, OPAQUE, DIGESTS).blocks == BLOCKS
        match = store.match(OPAQUE, DIGESTS)
        assert (match.blocks, match.tokens, match.tiers) == (BLOCKS, BLOCKS * BLOCK_TOKENS, {Tier.HOST: BLOCKS})
        assert verified_blocks(store, OPAQUE, DIGESTS) == BLOCKS
        assert verified_blocks(store, OPAQUE, [*DIGESTS[:4], *reversed(DIGESTS)]) == 4
        assert store.match(OPAQUE, DIGESTS[1:]).blocks == 0

    def test_a_digest_is_another_in_any_of_its_bytes(self, store: KvStore) -> None:
        store_prompt(store, OPAQUE, DIGESTS)
        for place in range(len(DIGESTS[0])):
            changed = bytearray(DIGESTS[0])
            changed[place] ^= 1
            assert store.match(OPAQUE, [bytes(changed), *DIGESTS[1:]]).blocks == 0

    def test_a_block_whose_parent_is_unknown_is_refused_and_counted(self, store: KvStore) -> None:
        store_prompt(store, OPAQUE, DIGESTS[:2])
        result = store_prompt(store, OPAQUE, DIGESTS, from_block=3)
        assert (result.blocks, result.refused_blocks) == (0, BLOCKS - 3)
        assert store.stats().rejected_blocks["missing_prefix"] == BLOCKS - 3
        assert store_prompt(store, OPAQUE, DIGESTS, from_block=2).blocks == BLOCKS - 2

    def test_digests_and_token_ids_of_the_same_bytes_share_nothing(self, store: KvStore) -> None:
        of_eight = dataclasses.replace(LAYOUT, block_tokens=8)
        tokens = dataclasses.replace(BASE, layout=of_eight)
        digests = dataclasses.replace(BASE, layout=dataclasses.replace(of_eight, symbols=Symbols.DIGESTS.value))
        assert store.namespace_id(tokens) != store.namespace_id(digests)
        store_prompt(store, digests, DIGESTS)
        ids = np.frombuffer(b"".join(DIGESTS), dtype=np.uint32)
        assert (store.match(digests, DIGESTS).blocks, store.match(tokens, ids).blocks) == (BLOCKS, 0)

    @pytest.mark.parametrize(
        "wrong",
        [PROMPT, [*DIGESTS, b"short"], [DIGESTS[0].hex()], b"".join(DIGESTS), 7, np.arange(8, dtype=np.uint32)],
        ids=["token ids", "short", "text", "one text of all", "a number", "an array"],
    )
    def test_what_are_no_digests_is_refused_by_name(self, store: KvStore, wrong: object) -> None:
        with pytest.raises(InvalidTokensError, match="digest"):
            store.match(OPAQUE, wrong)
        with pytest.raises(InvalidTokensError, match="digest"):
            store.stage(OPAQUE, wrong)
        assert store.stats().stages == 0

    def test_digests_are_refused_where_token_ids_are_expected(self, store: KvStore) -> None:
        with pytest.raises(InvalidTokensError, match="expected integers"):
            store.match(BASE, DIGESTS)

    def test_counts_are_in_tokens_of_the_engine(self, store: KvStore) -> None:
        store_prompt(store, OPAQUE, DIGESTS[:3])
        before = store.stats()
        store.match(OPAQUE, DIGESTS)
        after = store.stats()
        assert after.lookup_tokens - before.lookup_tokens == BLOCKS * BLOCK_TOKENS
        assert after.hit_tokens["host"] - before.hit_tokens.get("host", 0) == 3 * BLOCK_TOKENS

    def test_a_window_is_kept_by_tokens_of_the_engine(self, store: KvStore) -> None:
        window = SlidingWindow(layers=1, window=2 * BLOCK_TOKENS, kv_heads=2, head_dim=8, dtype="float16")
        namespace = dataclasses.replace(OPAQUE, layout=dataclasses.replace(OPAQUE.layout, groups=(window,)))
        store_prompt(store, namespace, DIGESTS, turn_ends=[4 * BLOCK_TOKENS])
        assert verified_blocks(store, namespace, DIGESTS) == BLOCKS
        assert verified_blocks(store, namespace, DIGESTS[:4]) == 4

    def test_what_was_pinned_hinted_and_evicted_is_named_by_digests(self, store: KvStore) -> None:
        store_prompt(store, OPAQUE, DIGESTS)
        pin = store.pin(OPAQUE, DIGESTS[:4])
        assert (pin.blocks, store.hint_next_use(OPAQUE, DIGESTS, seconds=60)) == (4, BLOCKS)
        assert store.unpin(pin.pin_id)
        assert store.evict(OPAQUE, DIGESTS, from_block=2) == BLOCKS - 2
        assert store.match(OPAQUE, as_prompt(OPAQUE, DIGESTS)).blocks == 2

    def test_digests_come_back_from_disk(self, store: KvStore) -> None:
        store_prompt(store, OPAQUE, DIGESTS)
        store.flush()
        assert store.prefetch(OPAQUE, DIGESTS).wait(5.0) == BLOCKS
        assert verified_blocks(store, OPAQUE, DIGESTS) == BLOCKS

    def test_what_was_matched_is_asked_for_again_as_it_is(self, store: KvStore) -> None:
        store_prompt(store, OPAQUE, DIGESTS[:5])
        store.flush()
        found = store.match(OPAQUE, DIGESTS).prefix
        assert store.prefetch(OPAQUE, found).wait(5.0) == 5
        assert store.match(OPAQUE, found).blocks == 5
        assert store.match(OPAQUE, found[8:]).blocks == 0
        assert store.hint_next_use(OPAQUE, found, seconds=60) == 5
        assert store.evict(OPAQUE, found, from_block=1) == 4
        with pytest.raises(InvalidTokensError, match="36 bytes, expected 32 for each block"):
            store.match(OPAQUE, found[:9])
