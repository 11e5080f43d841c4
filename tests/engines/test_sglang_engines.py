"""Real SGLang engines over a real sidecar answer as without one, and find what another of them has stored."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from pathlib import Path

import pytest

import kvstore

PAGE, MAX_TOKENS = 16, 16
STORED_SECONDS_MAX = 120.0
VERSIONS = "SGLang 0.5.23"
BACKEND = {
    "backend_name": "kvstore",
    "module_path": "kvstore.connectors.sglang",
    "class_name": "KvstoreStorage",
    "interface_v1": 1,
    "prefetch_threshold": 16,
    "hicache_storage_pass_prefix_keys": True,
}
# On a busy machine an answer takes its time, and what is asked here is whether it is right.
PATIENT = {"lookup_seconds": 20.0, "bulk_seconds": 20.0}
pytestmark = [pytest.mark.engine, pytest.mark.kill, pytest.mark.timeout(2400)]


def with_storage(address):
    """SGLang's own settings for pages in a server; `direct` copies are those that a CPU can make."""
    extra = BACKEND | {"kvstore": PATIENT | {"address": address}}
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def tokens_of(count, seed):
    return random.Random(seed).choices(range(3, 500), k=count)


def mixed_prompts():
    """Shared beginnings, lengths around the edges of pages, bytes of several languages, less than a page."""
    system = tokens_of(150, "system")
    prompts = [system + tokens_of(5 + 9 * turn, f"turn {turn}") for turn in range(4)]
    prompts += [tokens_of(4 * PAGE + more, "edge") for more in (-1, 0, 1)]
    prompts += [[3 + byte for byte in (text * 3).encode()] for text in ("長い文章を要約して。", "🦀 or 🐍?")]
    return [*prompts, tokens_of(9, "short")]


def second_turns(prompts, answers):
    """Conversations go on: the prompt, what was answered, and more."""
    return [
        prompt + answer["tokens"] + tokens_of(7, f"second {number}")
        for number, (prompt, answer) in enumerate(zip(prompts[:3], answers, strict=False))
    ]


def of_tokens(answers):
    return [answer["tokens"] for answer in answers]


def from_storage(answers):
    return [(answer["cached"] or {}).get("storage", 0) for answer in answers]


def whole_pages(prompts):
    """How many different pages prompts have, each counted with all before it."""
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(PAGE, len(prompt) + 1, PAGE)})


def wait_until_stored(address, pages):
    """SGLang stores behind its answers."""
    ends_at = time.monotonic() + STORED_SECONDS_MAX
    pause = threading.Event()
    with kvstore.connect(address) as client:
        while (found := client.stats().tiers["host"].blocks) < pages and time.monotonic() < ends_at:
            pause.wait(0.2)
    assert found >= pages


@pytest.fixture(scope="module")
def plain(start_sglang):
    """Prompts, and what SGLang answers without a store."""
    engine = start_sglang()
    first = mixed_prompts()
    answers = engine.ask("generate", prompts=first, max_tokens=MAX_TOKENS)
    second = second_turns(first, answers)
    answers += engine.ask("generate", prompts=second, max_tokens=MAX_TOKENS)
    engine.close()
    return first, second, of_tokens(answers)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_pages_of_sglangs_own_host_pools_come_back_bit_for_bit(pools, layout, record_support):
    for dtype in ("float32", "bfloat16"):
        assert pools["layouts"][f"{layout} torch.{dtype}"] == {
            "stored": [True] * 4,
            "found": 4,
            "loaded": [True] * 4,
            "exact": True,
            "of_other_layouts": 0,
            "moved": 4,
        }
        record_support("sglang", VERSIONS, layout=layout, feature="host pools", model="multi-head", dtype=dtype)


def test_sglang_wraps_the_backend_in_its_failure_injector(pools):
    assert pools["with injector"] == "HiCacheStorageFailureInjector"


@pytest.fixture(scope="module")
def pools(sglang_python, new_address, start_server):
    """What sglang_pools.py found out."""
    address = new_address()
    start_server(address)
    script = Path(__file__).with_name("sglang_pools.py")
    done = subprocess.run([sglang_python, script, address], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_engine_finds_what_the_first_has_stored_and_outlives_the_server(
    start_sglang, start_server, new_address, plain, record_support
):
    first, second, answers = plain
    address = new_address()
    server = start_server(address)
    storage = with_storage(address)
    engine = start_sglang(storage)
    assert of_tokens(engine.ask("generate", prompts=first, max_tokens=MAX_TOKENS)) == answers[: len(first)]
    wait_until_stored(address, whole_pages(first))
    engine.close()

    other = start_sglang(storage)
    found = other.ask("generate", prompts=first + second, max_tokens=MAX_TOKENS)
    assert of_tokens(found) == answers
    assert found[0]["cached"]["storage_backend"] == "KvstoreStorage"
    # Whatever begins anew comes from the store, all whole pages but one token; the rest is in the engine already.
    anew = [0, 4, 7, 8]
    assert [from_storage(found)[index] for index in anew] == [(len(first[index]) - 1) // PAGE * PAGE for index in anew]
    record_support(
        "sglang", VERSIONS, layout="page_first_direct", feature="a second engine", model="Llama", dtype="float32"
    )

    assert other.ask("clear")
    server.kill()
    assert of_tokens(other.ask("generate", prompts=first + second, max_tokens=MAX_TOKENS)) == answers
    other.close()


def test_answers_are_the_same_with_sglangs_failure_injector_on(
    start_sglang, start_server, new_address, plain, record_support
):
    first, second, answers = plain
    address = new_address()
    start_server(address)
    injected = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.5"}
    engine = start_sglang(with_storage(address), injected)
    for _ in range(2):
        assert of_tokens(engine.ask("generate", prompts=first + second, max_tokens=MAX_TOKENS)) == answers
        assert engine.ask("clear")
    record_support(
        "sglang", VERSIONS, layout="page_first_direct", feature="half of all calls fail", model="Llama", dtype="float32"
    )
