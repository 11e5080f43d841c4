"""Blocks that an image touches are told apart by what it is and where it stands, and no others are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connectors.vllm.contents import NO_TOKEN, contents_of, have_keys
from kvstore.connectors.vllm.plan import PackedTokens

BLOCK_TOKENS = 16
PLACEHOLDER = 7


def image(identifier, offset, length, modality="image"):
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(modality=modality, identifier=identifier, mm_position=place)


def blocks_of(tokens, *images):
    """What the store compares of each block."""
    packed = PackedTokens(contents_of(images, BLOCK_TOKENS))
    packed.extend_to(tokens, len(tokens))
    symbols = packed.first(len(tokens)).token_array().tolist()
    return [tuple(symbols[start : start + BLOCK_TOKENS]) for start in range(0, len(tokens), BLOCK_TOKENS)]


TOKENS = list(range(100, 120)) + [PLACEHOLDER] * 30 + list(range(200, 230))
PLAIN = [tuple(TOKENS[start : start + BLOCK_TOKENS]) for start in range(0, 80, BLOCK_TOKENS)]


def test_only_the_blocks_that_an_image_touches_differ_from_their_tokens():
    keyed = blocks_of(TOKENS, image("a", 20, 30))
    assert [True, False, False, False, True] == [one == other for one, other in zip(keyed, PLAIN, strict=True)]
    assert {True} == {symbol >= NO_TOKEN for block in keyed[1:4] for symbol in block}
    assert keyed == blocks_of(TOKENS, image("a", 20, 30))


@pytest.mark.parametrize(
    "other", [image("b", 20, 30), image("a", 21, 29), image("a", 20, 29), image("a", 20, 30, modality="video")]
)
def test_another_image_place_length_or_kind_is_another_block(other):
    ours, theirs = blocks_of(TOKENS, image("a", 20, 30)), blocks_of(TOKENS, other)
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]


def test_the_same_images_in_another_order_are_other_blocks():
    one = blocks_of(TOKENS, image("a", 20, 4), image("b", 24, 4))
    assert one != blocks_of(TOKENS, image("b", 20, 4), image("a", 24, 4))
    assert one == blocks_of(TOKENS, image("b", 24, 4), image("a", 20, 4))  # however vLLM lists them


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 150), st.integers(1, 60)), max_size=3),
    st.lists(st.integers(0, 10), max_size=4),
)
def test_keys_do_not_depend_on_the_steps_in_which_tokens_are_learned(places, steps):
    tokens = [*range(100, 260)]
    images = [image(f"image {number}", offset, length) for number, offset, length in places]
    packed = PackedTokens(contents_of(images, BLOCK_TOKENS))
    for blocks in [*steps, 10]:
        packed.extend_to(tokens, blocks * BLOCK_TOKENS)
    whole = [symbol for block in blocks_of(tokens, *images) for symbol in block]
    assert whole == packed.first(160).token_array().tolist()
    touched = {block for one in images for block in range(10) if touches(one, block)}
    assert touched == {block for block in range(10) if whole[16 * block] >= NO_TOKEN}


def touches(one, block):
    place, start = one.mm_position, block * BLOCK_TOKENS
    return start < place.offset + place.length and place.offset < start + BLOCK_TOKENS


def test_what_has_no_identifier_no_tokens_or_too_short_blocks_has_no_keys():
    assert have_keys([], 4)
    assert have_keys([image("a", 0, 4)], 8)
    assert [False] * 3 == [
        have_keys([image("", 0, 4)], 16),
        have_keys([image("a", 0, 0)], 16),
        have_keys([image("a", 0, 4)], 4),
    ]
