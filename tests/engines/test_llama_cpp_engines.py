"""llama.cpp as processes over a real sidecar, on a real model: the next goes on from what one stored.

Quantised kernels round differently for other batches, so answers are compared with those of an engine without a store
that computed its prompt in the same two pieces.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import subprocess
import time

import numpy as np
import pytest

from kvstore.demo.processes import start_sidecar
from kvstore.transport.client import connect

pytestmark = [pytest.mark.engine, pytest.mark.kill, pytest.mark.timeout(900)]

MODEL = "SmolLM2-135M (Q4_1)"
NEW_TOKENS = 6
Q8_0 = 8  # ggml.h: GGML_TYPE_Q8_0
START_SECONDS_MAX = 300.0
ASKED_MAX = 5


def prompt_of(length, seed):
    return random.Random(seed).choices(range(100, 40_000), k=length)


@pytest.fixture(scope="module")
def address(new_address, start_server):
    chosen = new_address()
    start_server(chosen)
    return chosen


@pytest.fixture(scope="module")
def plain(start_llama):
    """An engine without a store."""
    return start_llama()


@pytest.fixture(scope="module")
def first(start_llama, address):
    return start_llama(address=address)


@pytest.fixture(scope="module")
def second(start_llama, address):
    """Contexts of other sizes share: a state is as long as its tokens."""
    return start_llama(address=address, n_ctx=1024)


@pytest.fixture
def record(record_support, plain):
    """Says what was shown, for docs/support.json."""
    versions = plain.ask("versions")["versions"]

    def shown(feature, dtype="float16"):
        record_support("llama-cpp", versions, layout="full attention", feature=feature, model=MODEL, dtype=dtype)

    return shown


def stored(engine):
    """Wait until everything that was computed is stored."""
    counts = engine.ask("counts")
    assert (counts["flushed"], counts["bypassed"], counts["failures"]) == (True, {}, {})


def check_restart(engines, record, dtype):
    plain, first, second = engines
    prompt = prompt_of(80, seed=1)
    expected = plain.ask("generate", prompt=prompt, new_tokens=NEW_TOKENS, split=79)
    first.ask("generate", prompt=prompt, new_tokens=NEW_TOKENS)
    stored(first)
    answer = second.ask("generate", prompt=prompt, new_tokens=NEW_TOKENS)
    assert (answer["tokens"], answer["loaded"]) == (expected["tokens"], 79)
    record("a prompt that comes again, in another process", dtype)


def test_a_second_process_goes_on_from_what_the_first_one_stored(plain, first, second, record):
    check_restart((plain, first, second), record, "float16")


def test_quantised_keys_and_values_are_served(start_llama, address, record):
    quantised = {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True}
    engines = start_llama(**quantised), start_llama(address=address, **quantised)
    check_restart((*engines, start_llama(address=address, n_ctx=1024, **quantised)), record, "q8_0")


def test_a_longer_state_is_trimmed_to_what_a_prompt_shares(plain, first, second, record):
    system = prompt_of(60, seed=2)
    first.ask("generate", prompt=system + prompt_of(20, seed=3), new_tokens=NEW_TOKENS)
    stored(first)
    prompt = system + prompt_of(10, seed=4)
    answer = second.ask("generate", prompt=prompt, new_tokens=NEW_TOKENS)
    expected = plain.ask("generate", prompt=prompt, new_tokens=NEW_TOKENS, split=60)
    assert (answer["tokens"], answer["loaded"]) == (expected["tokens"], 60)
    record("a common beginning: a longer state is trimmed")


def test_another_salt_finds_nothing(start_llama, address, first, second):
    prompt = prompt_of(80, seed=5)
    first.ask("generate", prompt=prompt, new_tokens=1)
    stored(first)
    salted = start_llama(address=address, salt="another")
    asked = [engine.ask("generate", prompt=prompt, new_tokens=1)["loaded"] for engine in (salted, second)]
    assert asked == [0, 79]


def test_the_turns_of_a_chat_go_on_from_the_answers_before(first, second, record):
    messages = [{"role": "user", "content": "What is the capital of France? Answer in a short sentence."}]
    answer = first.ask("chat", messages=messages, new_tokens=12)
    stored(first)
    assert ("Paris" in answer["text"], answer["loaded"]) == (True, 0)
    messages += [{"role": "assistant", "content": answer["text"]}, {"role": "user", "content": "And of Italy?"}]
    assert second.ask("chat", messages=messages, new_tokens=4)["loaded"] > 40
    record("generated tokens of earlier turns")


def test_the_cache_of_the_engines_own_hook_is_served(start_llama, address, first, second, record):
    hooked = start_llama(address=address, hook="set_cache")
    for number, (one, other) in enumerate(((first, hooked), (hooked, second))):
        text = f"{number} The library opens at nine, and closes at six, on Sundays at noon. " * 4
        assert one.ask("complete", text=text, new_tokens=NEW_TOKENS)["loaded"] == 0
        stored(one)
        assert other.ask("complete", text=text, new_tokens=NEW_TOKENS)["loaded"] > 60
    record("set_cache(): the engine's own hook")


def test_a_server_killed_in_the_middle_changes_no_answer(start_llama, plain, new_address, start_server, record):
    address = new_address()
    server = start_server(address)
    prompts = [prompt_of(60, seed=10), prompt_of(60, seed=11)]
    engine = start_llama(address=address)
    engine.ask("generate", prompt=prompts[0], new_tokens=NEW_TOKENS)
    stored(engine)
    assert engine.ask("generate", prompt=prompts[0], new_tokens=NEW_TOKENS)["loaded"] == 59
    server.kill()
    for prompt in prompts:
        answer = engine.ask("generate", prompt=prompt, new_tokens=NEW_TOKENS)
        expected = plain.ask("generate", prompt=prompt, new_tokens=NEW_TOKENS)
        assert (answer["tokens"], answer["loaded"]) == (expected["tokens"], 0)
    assert engine.ask("counts")["failures"]
    record("the sidecar is killed: answers as without it")


def test_flipped_bits_on_disk_are_a_miss(start_llama, plain, tmp_path, record, new_address):
    address, prompt = new_address(), prompt_of(60, seed=12)
    with start_sidecar(tmp_path, address, 64 << 20, 256 << 20) as server:
        server.receive()
        engine = start_llama(address=address)
        engine.ask("generate", prompt=prompt, new_tokens=NEW_TOKENS)
        stored(engine)
        with connect(address) as store:
            store.flush()
    flipped = 0
    for path in tmp_path.rglob("slab-*.kvs"):
        spots = np.memmap(path, dtype=np.uint8, mode="r+")[40_000::65_536]
        flipped += np.count_nonzero(spots)
        spots[spots != 0] ^= 0x10
    assert flipped
    with start_sidecar(tmp_path, address, 64 << 20, 256 << 20) as server:
        server.receive()
        answer = start_llama(address=address).ask("generate", prompt=prompt, new_tokens=NEW_TOKENS)
    assert (answer["tokens"], answer["loaded"]) == (
        plain.ask("generate", prompt=prompt, new_tokens=NEW_TOKENS)["tokens"],
        0,
    )
    record("damaged states are refused")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def complete(port, prompt, process, log):
    """Ask a server that may not listen yet."""
    ends_at = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < ends_at and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        try:
            body = json.dumps({"prompt": prompt, "max_tokens": 4, "temperature": 0})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())
        except ConnectionRefusedError:
            time.sleep(0.2)
        finally:
            connection.close()
    raise AssertionError(log.read_text(errors="replace")[-3000:])


def test_a_second_server_of_the_engine_finds_what_the_first_one_stored(
    llama_cpp_python, gguf_model, new_address, start_server, tmp_path, record
):
    address = new_address()
    start_server(address)
    prompt = "The library opens at nine, and closes at six, on Sundays at noon. " * 8
    found_tokens = 0
    for number in range(2):
        before_tokens = found_tokens
        port, log = free_port(), tmp_path / f"{number}.log"
        command = [llama_cpp_python, "-P", "-m", "kvstore.connectors.llama_cpp_server", "--kvstore", address]
        command += ["--kvstore-lookup-seconds", "20", "--kvstore-load-seconds", "20"]
        command += ["--model", gguf_model, "--n_ctx", "512", "--n_threads", "1", "--n_threads_batch", "1"]
        with log.open("ab") as file:
            process = subprocess.Popen([*command, "--port", str(port)], stdout=file, stderr=file, cwd=tmp_path)
        try:
            # The first prompts may come before the self-check has passed: they are computed, and not stored.
            for _ in range(ASKED_MAX):
                assert complete(port, prompt, process, log)["choices"]
                with connect(address, control_seconds=30) as store:
                    stats = store.stats()
                found_tokens = sum(stats.hit_tokens.values())
                if stats.tiers["host"].blocks if number == 0 else found_tokens > before_tokens:
                    break
        finally:
            process.terminate()
            process.wait(60)
        told = log.read_text(errors="replace")
        assert "kvstore serves llama.cpp" in told
    assert found_tokens > before_tokens + 100, told[-3000:]
    record("the engine's own server")


def test_check_tells_that_the_engine_works(llama_cpp_python, gguf_model):
    command = [llama_cpp_python, "-P", "-m", "kvstore.cli", "check", "llama-cpp", "--embedded", "--json", "--model"]
    done = subprocess.run([*command, gguf_model], capture_output=True, text=True, check=False, timeout=600)
    told = json.loads(done.stdout)
    assert told["works"], told
    assert [finding["subject"] for finding in told["findings"]] == [
        "store",
        "engine",
        "model",
        "layout",
        "state",
        "prompt",
    ]
