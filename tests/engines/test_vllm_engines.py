"""Real vLLM engines over a real sidecar answer as without one, whatever happens to it or to their requests."""

from __future__ import annotations

import random
import time

import pytest

import kvstore

BLOCK_TOKENS = 32
MAX_TOKENS = 40
pytestmark = [pytest.mark.engine, pytest.mark.kill, pytest.mark.timeout(1500)]


def tokens_of(count, seed):
    return random.Random(seed).choices(range(3, 500), k=count)


def text_tokens(text):
    """Bytes as token ids of their own."""
    return [3 + byte for byte in text.encode()]


def mixed_prompts():
    """Shared beginnings, lengths around the edges of blocks, several languages, and prompts of less than a block."""
    systems = [tokens_of(200, "system a"), tokens_of(97, "system b")]
    prompts = [system + tokens_of(5 + 9 * turn, f"turn {turn}") for system in systems for turn in range(8)]
    edges = [BLOCK_TOKENS * blocks + more for blocks in range(1, 5) for more in (-1, 0, 1)]
    prompts += [tokens_of(count, f"edge {count}") for count in edges]
    prompts += [tokens_of(64, "edge 64") + tokens_of(count, "behind 64") for count in (1, 31, 32, 33)]
    texts = ["Wie heißt der längste Fluß Europas?", "長い文章を要約してください。", "اكتب قصيدة قصيرة", "🦀 or 🐍?"]
    prompts += [text_tokens(text * repeat) for text in texts for repeat in (1, 3)]
    prompts += [tokens_of(count, "short") for count in (1, 2, 16, 30)]
    return prompts


def second_turns(prompts, answers):
    """Conversations go on: the prompt, what was answered, and more."""
    return [
        prompt + answer + tokens_of(7, f"second {number}")
        for number, (prompt, answer) in enumerate(zip(prompts[:10], answers, strict=False))
    ]


@pytest.fixture(scope="module")
def plain(start_engine):
    """Prompts, and what vLLM answers without a connector."""
    engine = start_engine()
    first = mixed_prompts()
    answers = engine.ask("generate", prompts=first, max_tokens=MAX_TOKENS)["tokens"]
    second = second_turns(first, answers)
    answers += engine.ask("generate", prompts=second, max_tokens=MAX_TOKENS)["tokens"]
    aborted = tokens_of(300, "to be aborted")
    engine.close()
    assert len(first + second) >= 50
    return first, second, answers, aborted


@pytest.fixture(scope="module")
def address(new_address):
    return new_address()


@pytest.fixture(scope="module")
def server(start_server, address):
    return start_server(address)


@pytest.fixture(scope="module")
def first_engine(start_engine, address, server):
    return start_engine(address)


@pytest.fixture(scope="module")
def second_engine(start_engine, address, server):
    return start_engine(address)


def generate(engine, prompts, **more):
    answer = engine.ask("generate", prompts=prompts, max_tokens=MAX_TOKENS, **more)
    assert answer["reasons"] == ["length"] * len(prompts)
    return answer


def quiet(counts):
    """What must be left of requests that have ended: nothing. One block of vLLM's is never given out."""
    return counts["blocks"] - counts["free_blocks"], counts["held"], counts["leased"]


NOTHING_LEFT = (1, 0, 0)


def test_two_engines_answer_as_without_a_connector_and_the_second_loads_what_the_first_stored(
    plain, first_engine, second_engine, address, record_vllm
):
    first, second, expected, _ = plain
    for engine in (first_engine, second_engine):
        answers = [generate(engine, prompts) for prompts in (first, second)]
        assert [tokens for answer in answers for tokens in answer["tokens"]] == expected
        assert quiet(engine.ask("wait_stored")) == NOTHING_LEFT
    whole = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in first + second]
    assert [cached for answer in answers for cached in answer["cached"]] == whole
    stored, loaded = first_engine.ask("counts"), second_engine.ask("counts")
    assert stored["stored_blocks"] > 100
    assert loaded["loaded_tokens"] > 3000
    assert [stored["failures"], loaded["failures"]] == [{}, {}]
    assert [stored["bypassed"], loaded["bypassed"]] == [{}, {}]
    assert [stored["dropped_blocks"], loaded["dropped_blocks"]] == [0, 0]
    with kvstore.connect(address, lookup_seconds=10.0) as client:
        stats = client.stats()
    assert stats.leases == stats.stages == 0
    # One count of each request, however often vLLM asked; and the self-checks, which count as none.
    assert stats.lookups == stored["lookups"] + loaded["lookups"]
    assert stored["lookups"] == sum(len(prompt) > BLOCK_TOKENS for prompt in first + second)
    record_vllm("58 prompts and turns, generated tokens too, loaded by a second engine")


def test_a_prompt_of_another_salt_is_not_found(plain, second_engine, record_vllm):
    prompt = plain[0][0]
    salted = generate(second_engine, [prompt], salts=["tenant-b"])
    assert salted["cached"] == [0]
    assert salted["tokens"] == [plain[2][0]]
    record_vllm("cache salts")


@pytest.mark.parametrize("pace", ["hasty", "patient"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_an_abort_at_any_step_leaves_nothing_held(plain, first_engine, second_engine, is_stored, pace, record_vllm):
    # Beginnings of their own, so that the engine's own cache has nothing of them.
    prompts = [[100 + number, len(pace), 3 + is_stored, *plain[3]] for number in range(12)]
    if is_stored:
        generate(first_engine, prompts)
        first_engine.ask("wait_stored")
    before = second_engine.ask("counts")
    for steps, prompt in enumerate(prompts):
        counts = second_engine.ask("abort", prompt=prompt, steps=steps, pace=pace)
        assert (*quiet(counts), counts["finished"]) == (*NOTHING_LEFT, False)
    assert counts["failures"] == {}
    if pace == "patient":
        assert (counts["loaded_tokens"] > before["loaded_tokens"]) is is_stored
        after = second_engine.ask("wait_stored")
        assert (after["stored_blocks"] > before["stored_blocks"]) is not is_stored
    record_vllm("aborts at every step")


@pytest.mark.parametrize("arriving", [0, 1, 3])
def test_blocks_that_cannot_be_loaded_are_computed(plain, first_engine, second_engine, arriving, record_vllm):
    prompts = [[7, arriving, number, *tokens_of(150, "cut short")] for number in range(3)]
    expected = generate(first_engine, prompts)["tokens"]
    first_engine.ask("wait_stored")
    before = second_engine.ask("counts")["loaded_tokens"]
    second_engine.ask("limit", blocks=arriving)
    try:
        assert generate(second_engine, prompts)["tokens"] == expected
    finally:
        second_engine.ask("limit", blocks=None)
    counts = second_engine.ask("counts")
    assert counts["loaded_tokens"] - before == len(prompts) * arriving * BLOCK_TOKENS
    assert quiet(counts) == NOTHING_LEFT
    record_vllm("loads that break off")


def test_a_reset_of_the_cache_finds_nothing_of_before(plain, second_engine, record_vllm):
    prompt = tokens_of(100, "before the reset")
    expected = generate(second_engine, [prompt])["tokens"]
    second_engine.ask("wait_stored")
    assert second_engine.ask("reset") == {"reset": True}
    assert generate(second_engine, [prompt]) == {"tokens": expected, "cached": [96], "reasons": ["length"]}
    assert second_engine.ask("reset", connector=True) == {"reset": True}
    assert generate(second_engine, [prompt]) == {"tokens": expected, "cached": [0], "reasons": ["length"]}
    record_vllm("new weights")


def test_a_killed_server_changes_no_answer_and_its_disk_serves_after_a_restart(
    plain, first_engine, start_server, server, address, record_vllm
):
    first, second, expected, _ = plain
    with kvstore.connect(address, lookup_seconds=10.0) as client:
        client.flush()
    assert first_engine.ask("reset") == {"reset": True}
    first_engine.tell("generate", prompts=first + second, max_tokens=MAX_TOKENS)
    time.sleep(0.3)  # the run takes longer; whatever it has come to, nothing may change
    server.kill()
    assert first_engine.answer() | {"cached": []} == {
        "tokens": expected,
        "cached": [],
        "reasons": ["length"] * len(expected),
    }
    assert quiet(first_engine.ask("counts")) == NOTHING_LEFT
    start_server(address)
    generate_until_loaded(first_engine, first, expected[: len(first)])
    record_vllm("server killed in mid-run, and started again")


def generate_until_loaded(engine, prompts, expected):
    """The engine finds its server again some time after it came back; until then, and then, it answers the same."""
    before = engine.ask("counts")["loaded_tokens"]
    ends_at = time.monotonic() + 120
    while engine.ask("counts")["loaded_tokens"] == before and time.monotonic() < ends_at:
        assert engine.ask("reset") == {"reset": True}
        assert generate(engine, prompts)["tokens"] == expected
        engine.ask("wait_stored")
    assert engine.ask("counts")["loaded_tokens"] > before


def test_an_engine_that_preempts_answers_the_same_without_a_server_and_when_it_comes(
    plain, start_engine, start_server, new_address, record_vllm
):
    first, second, expected, _ = plain
    address = new_address()
    engine = start_engine(address, num_gpu_blocks_override=40, max_num_seqs=16)
    assert generate(engine, first + second)["tokens"] == expected
    alone = engine.ask("counts")
    assert quiet(alone) == NOTHING_LEFT
    assert (alone["loaded_tokens"], alone["stored_blocks"]) == (0, 0)
    assert alone["preemptions"] > 0
    with_server = start_server(address)
    generate_until_loaded(engine, first + second, expected)
    counts = engine.ask("counts")
    assert quiet(counts) == NOTHING_LEFT
    assert counts["preemptions"] > alone["preemptions"]
    record_vllm("preemption")
    with_server.kill()
