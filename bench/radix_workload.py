"""The prompts that bench_radix.py stores and looks up: chats and documents under shared system prompts.

200 system prompts of 2,048 tokens, picked by Zipf's law. Chats of 1 to 6 turns with 512 to 8,192 new tokens; about a
third of all blocks lies in documents of 36k and 136k tokens. Each turn stores the whole prompt so far. A lookup repeats
the first 80-95 % of a stored prompt and goes on with random tokens; a miss is random from the first token on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

VOCABULARY = 128_000
SYSTEM_PROMPTS = 200
SYSTEM_TOKENS = 2048
DOCUMENT_TOKENS = (137_216, 36_864)
DOCUMENT_SHARES = (0.24, 0.12)
DOCUMENTS_MIN = 3
CHAT_TOKENS = (512, 8192)
TURNS_MAX = 6
LOOKUPS = {1024: 400, 8192: 200, 32768: 60, 131072: 24}
MISS_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Query:
    """One lookup and its right answer."""

    op: str
    prompt: NDArray[np.uint32]
    blocks: int


@dataclass(frozen=True, slots=True)
class Workload:
    """`inserts` are (index of a prompt, its leading tokens) in the order of time; `blocks` all distinct blocks."""

    block_tokens: int
    blocks: int
    prompts: list[NDArray[np.uint32]]
    inserts: list[tuple[int, int]]
    queries: list[Query]


def make_workload(blocks: int, block_tokens: int, seed: int = 1) -> Workload:
    """Prompts that hold at least `blocks` distinct blocks, and lookups of them."""
    rng = np.random.default_rng(seed)
    prompts, stored_blocks = _prompts(rng, blocks, block_tokens)
    inserts = _inserts(rng, prompts)
    queries = [query for tokens in LOOKUPS for query in _lookups(rng, prompts, tokens, block_tokens)]
    queries += [Query("miss", _random(rng, MISS_TOKENS), 0) for _ in range(LOOKUPS[MISS_TOKENS])]
    return Workload(block_tokens, stored_blocks, prompts, inserts, queries)


def _random(rng: np.random.Generator, tokens: int) -> NDArray[np.uint32]:
    return rng.integers(0, VOCABULARY, tokens, dtype=np.uint32)


def _prompts(rng: np.random.Generator, blocks: int, block_tokens: int) -> tuple[list[NDArray[np.uint32]], int]:
    systems = [_random(rng, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    weights = 1.0 / np.arange(1, SYSTEM_PROMPTS + 1)
    weights /= weights.sum()
    lengths = [
        tokens - SYSTEM_TOKENS
        for tokens, share in zip(DOCUMENT_TOKENS, DOCUMENT_SHARES, strict=True)
        for _ in range(max(DOCUMENTS_MIN, int(blocks * block_tokens * share / tokens)))
    ]
    used: set[int] = set()
    prompts: list[NDArray[np.uint32]] = []
    stored_blocks = 0
    while lengths or stored_blocks < blocks:
        new_tokens = lengths.pop() if lengths else int(np.exp(rng.uniform(*np.log(CHAT_TOKENS))))
        system = int(rng.choice(SYSTEM_PROMPTS, p=weights))
        prompts.append(np.concatenate([systems[system], _random(rng, new_tokens)]))
        shared_blocks = SYSTEM_TOKENS // block_tokens if system in used else 0
        used.add(system)
        stored_blocks += prompts[-1].size // block_tokens - shared_blocks
    return prompts, stored_blocks


def _inserts(rng: np.random.Generator, prompts: list[NDArray[np.uint32]]) -> list[tuple[int, int]]:
    """Every turn of every prompt, with the turns of different prompts mixed."""
    timed: list[tuple[float, int, int]] = []
    for index, prompt in enumerate(prompts):
        turns = int(rng.integers(1, TURNS_MAX + 1))
        ends = [*np.sort(rng.integers(SYSTEM_TOKENS + 64, prompt.size, turns - 1)).tolist(), prompt.size]
        times = rng.uniform() + np.cumsum(rng.exponential(0.02, turns))
        timed += [(float(time), index, end) for time, end in zip(times, ends, strict=True)]
    return [(index, end) for _, index, end in sorted(timed)]


def _lookups(
    rng: np.random.Generator, prompts: list[NDArray[np.uint32]], tokens: int, block_tokens: int
) -> list[Query]:
    long_enough = [prompt for prompt in prompts if prompt.size >= tokens]
    queries = []
    for _ in range(LOOKUPS[tokens]):
        prompt = long_enough[int(rng.integers(len(long_enough)))]
        stored = int(tokens * rng.uniform(0.80, 0.95))
        query = np.concatenate([prompt[:stored], _random(rng, tokens - stored)])
        queries.append(Query("match", query, stored // block_tokens))
    return queries
