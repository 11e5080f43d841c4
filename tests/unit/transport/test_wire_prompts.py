"""Prompts sent by their growth arrive whole, or are asked for again; both memories keep their bounds."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidTokensError
from kvstore.tokens import PROMPT_TOKENS_MAX
from kvstore.transport.wire import Delta
from kvstore.transport.wire_prompts import (
    PROMPTS_MAX,
    PromptBudget,
    PromptMemory,
    SentPrompts,
    prompt_digest,
)

KIB = 1024


def packed(*runs: tuple[int, int]) -> bytes:
    """A prompt of runs of equal tokens, given as (token, how many)."""
    return b"".join(struct.pack("<I", token) * count for token, count in runs)


def send(sent: SentPrompts, memory: PromptMemory, whole: bytes) -> int:
    """Send a prompt as a client does; returns the bytes of tokens that crossed."""
    growth = sent.growth(whole)
    if growth is None:
        return len(whole)
    crossed = len(growth.tail)
    found = memory.complete(growth.delta, growth.tail)
    if found is None:
        growth = sent.whole_again(growth, whole)
        crossed += len(growth.tail)
        found = memory.complete(growth.delta, growth.tail)
    assert found is not None
    assert whole == found.packed
    return crossed


prompts = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 100, 256, 300, 1000])), min_size=0, max_size=6).map(
    lambda runs: packed(*runs)
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(prompts, st.booleans()), max_size=40), st.sampled_from([0, 4 * KIB, 16 * KIB, 10**6]))
def test_every_prompt_arrives_as_it_was_sent_whatever_is_forgotten(steps: list[tuple[bytes, bool]], server_bytes: int):
    budget = PromptBudget(20 * KIB)
    memory = PromptMemory(server_bytes, budget)
    sent = SentPrompts(16 * KIB)
    for whole, forget in steps:
        if forget:
            memory.clear()
        send(sent, memory, whole)
        assert budget.used_bytes <= min(server_bytes, 20 * KIB)
    memory.clear()
    assert 0 == budget.used_bytes


def test_a_growing_prompt_crosses_once():
    sent, memory = SentPrompts(10**6), PromptMemory(10**6, PromptBudget(10**6))
    first, second = packed((1, 1000)), packed((1, 1000), (2, 10))
    assert [4000, 0, 40, 0, 0] == [send(sent, memory, whole) for whole in (first, first, second, second, second[:2000])]


def test_two_conversations_that_begin_alike_share_their_beginning_and_keep_their_own_ends():
    sent, memory = SentPrompts(10**6), PromptMemory(10**6, PromptBudget(10**6))
    system = packed((1, 1000))
    one, other = system + packed((2, 100)), system + packed((3, 100))
    assert [4400, 400, 4, 4] == [
        send(sent, memory, whole) for whole in (one, other, one + packed((4, 1)), other + packed((5, 1)))
    ]


def test_a_prompt_that_shares_little_is_sent_whole():
    sent, memory = SentPrompts(10**6), PromptMemory(10**6, PromptBudget(10**6))
    send(sent, memory, packed((1, 200), (2, 100)))
    assert 1200 == send(sent, memory, packed((1, 200), (3, 100)))


def test_a_prompt_too_large_to_be_remembered_is_sent_as_it_is():
    assert SentPrompts(1000).growth(packed((1, 251))) is None


def test_the_oldest_prompt_is_forgotten_first_on_both_sides():
    sent, memory = SentPrompts(10**6), PromptMemory(10**6, PromptBudget(10**6))
    conversations = [packed((number + 1, 300)) for number in range(PROMPTS_MAX + 1)]
    for whole in conversations:
        send(sent, memory, whole)
    assert 0 == send(sent, memory, conversations[1])
    assert 1200 == send(sent, memory, conversations[0])


def test_a_server_that_remembers_less_than_it_said_asks_again():
    sent, memory = SentPrompts(10**6), PromptMemory(10**6, PromptBudget(2 * KIB))
    whole = packed((1, 1000))
    assert [4000, 4000] == [send(sent, memory, whole), send(sent, memory, whole)]


@pytest.mark.parametrize(
    "delta",
    [
        Delta(1, 2, 4, prompt_digest(packed((1, 8)), 16)),
        Delta(1, 1, 9, prompt_digest(packed((1, 8)), 32)),
        Delta(1, 1, 4, prompt_digest(packed((1, 8)), 16) ^ 1),
        Delta(1, 0, 4, 0),
    ],
    ids=["unknown base", "longer than the base", "another digest", "no base"],
)
def test_a_beginning_that_is_not_known_exactly_is_asked_for(delta: Delta):
    memory = PromptMemory(10**6, PromptBudget(10**6))
    memory.complete(Delta(1, 0, 0, 0), packed((1, 8)))
    assert memory.complete(delta, b"") is None


def test_a_prompt_longer_than_any_may_be_is_refused_before_it_is_put_together():
    memory = PromptMemory(10**6, PromptBudget(10**6))
    memory.complete(Delta(1, 0, 0, 0), packed((1, 8)))
    with pytest.raises(InvalidTokensError, match="4294967297 tokens"):
        memory.complete(Delta(1, 1, 2**32 - 1, 0), bytes(8))
    with pytest.raises(InvalidTokensError, match=f"at most {PROMPT_TOKENS_MAX}"):
        memory.complete(Delta(1, 1, PROMPT_TOKENS_MAX, 0), bytes(4))
