"""A vLLM engine of two tensor-parallel ranks, each a process of its own, stores and loads each block in two parts."""

from __future__ import annotations

import random
import time

import pytest

import kvstore

WHOLE_BLOCKS = 9
MAX_TOKENS = 12
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.kill, pytest.mark.timeout(2400)]


def test_a_second_engine_of_two_ranks_loads_what_the_first_stored(start_engine, start_server, new_address):
    prompt = random.Random(2).choices(range(3, 500), k=300)
    engine = start_engine()
    expected = engine.ask("generate", prompts=[prompt], max_tokens=MAX_TOKENS)["tokens"]
    engine.close()
    address = new_address()
    start_server(address)
    cached = []
    for _ in range(2):
        engine = start_engine(address, tensor_parallel_size=2)
        answer = engine.ask("generate", prompts=[prompt], max_tokens=MAX_TOKENS)
        assert answer["tokens"] == expected
        cached += answer["cached"]
        wait_stored(address)
        engine.close()
    assert cached == [0, WHOLE_BLOCKS * 32]


def wait_stored(address):
    """Until both ranks have sent their parts."""
    ends_at = time.monotonic() + 60
    with kvstore.connect(address, lookup_seconds=10.0) as client:
        while client.stats().tiers["host"].blocks < WHOLE_BLOCKS and time.monotonic() < ends_at:
            time.sleep(0.1)
        assert client.stats().tiers["host"].blocks >= WHOLE_BLOCKS
