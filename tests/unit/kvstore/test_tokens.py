from __future__ import annotations

import array

import numpy as np
import pytest

from kvstore.errors import InvalidTokensError
from kvstore.tokens import PROMPT_TOKENS_MAX, as_prompt, as_token_array, packed_tokens, unpacked_tokens
from kvstore.types import KvLayout, Namespace

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], dtype=np.int64),
        np.array([1, 0, 2, 0, 3], dtype=np.int32)[::2],
        array.array("i", [1, 2, 3]),
        memoryview(array.array("q", [1, 2, 3])),
        torch.tensor([1, 2, 3]),
    ],
)
def test_all_forms_give_the_same_private_array(tokens: object) -> None:
    made = as_token_array(tokens)
    assert made.dtype == np.uint32
    assert made.tolist() == [1, 2, 3]


def test_the_copy_does_not_follow_the_callers_buffer() -> None:
    buffer = np.array([1, 2], dtype=np.uint32)
    made = as_token_array(buffer)
    buffer[0] = 9
    assert made.tolist() == [1, 2]


def test_no_tokens_are_an_empty_prompt() -> None:
    assert as_token_array([]).size == 0
    assert as_token_array(np.array([], dtype=np.int32)).size == 0


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([1, -2], "token id -2 is out of range"),
        ([2**32], "token id 4294967296 is out of range"),
        (np.array([-1], dtype=np.int32), "token id -1"),
        ([1.0], "type float64"),
        ([True], "type bool"),
        (np.array([], dtype=np.float32), "type float32"),
        ([[1]], "one flat sequence"),
        (7, "one flat sequence"),
        ("text", "tokenize the text first"),
        (b"text", "tokenize the text first"),
        ([2**80], "type object"),
        (range(PROMPT_TOKENS_MAX + 1), "expected at most"),
    ],
)
def test_anything_else_is_refused(tokens: object, problem: str) -> None:
    with pytest.raises(InvalidTokensError, match=problem):
        as_token_array(tokens)


def test_what_was_made_is_private_already_and_not_copied_again() -> None:
    made = as_token_array([1, 2, 3])
    assert as_token_array(made) is made
    assert packed_tokens(made) is made.base
    assert not made.flags.writeable


@pytest.mark.parametrize(
    "tokens",
    [
        unpacked_tokens(bytes(range(12)))[1:],
        unpacked_tokens(bytes(range(12)))[::-1],
        unpacked_tokens(bytes(range(12))).view(np.int32),
        np.frombuffer(bytearray(range(12)), dtype=np.uint32),
        np.ndarray((3,), dtype=np.uint32, buffer=bytes(range(12)), offset=8, strides=(-4,)),
    ],
    ids=["some of them", "another order", "another type", "what can change", "backwards"],
)
def test_other_views_are_copied(tokens: np.ndarray) -> None:
    made = as_token_array(tokens)
    assert made is not tokens
    assert tokens.tolist() == made.tolist()
    assert tokens.astype("<u4").tobytes() == packed_tokens(made) == packed_tokens(tokens.astype(np.uint32))


def test_bytes_that_are_no_whole_digests_are_refused() -> None:
    layout = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="int8", symbols="digests")
    namespace = Namespace(model="model", revision="revision", layout=layout)
    with pytest.raises(InvalidTokensError, match="12 bytes, expected 32"):
        as_prompt(namespace, unpacked_tokens(bytes(12)))
    made = as_prompt(namespace, [bytes(range(32)), bytes(32)])
    assert as_prompt(namespace, made) is made
    assert packed_tokens(made) == bytes(range(32)) + bytes(32)


def test_more_digests_than_a_prompt_may_have_are_refused() -> None:
    layout = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="int8", symbols="digests")
    namespace = Namespace(model="model", revision="revision", layout=layout)
    with pytest.raises(InvalidTokensError, match="at most 524288"):
        as_prompt(namespace, [bytes(32)] * (PROMPT_TOKENS_MAX // 8 + 1))
