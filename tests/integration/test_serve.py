"""`kvstore serve` as a process: what it prints, what it refuses, how it stops, and the commands that ask it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.cli import main
from kvstore.testing.patience import ANSWER_SECONDS, wait_until

LAYOUT = kvstore.KvLayout(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
NAMESPACE = kvstore.Namespace(model="m", revision="r", layout=LAYOUT)
FLAGS = ["--model", "m", "--revision", "r", "--layout", "layers=2,kv_heads=1,head_dim=8,dtype=float32,block_tokens=4"]
TOKENS = list(range(40))
BLOCKS = 10


@dataclass
class Sidecar:
    """A running `kvstore serve`, its ready line, and where its log goes."""

    process: subprocess.Popen[str]
    ready: dict[str, object]

    @property
    def address(self) -> str:
        return self.ready["listen"][0]

    def log_line(self, text: str) -> str:
        """The next line of the log that has `text`."""
        return next(line for line in self.process.stderr if text in line)

    def log_lines(self, *texts: str) -> list[str]:
        """The next line that has each of `texts`, in whatever order they come."""
        found: dict[str, str] = {}
        while len(found) < len(texts):
            line = next(self.process.stderr)
            found |= {text: line for text in texts if text in line and text not in found}
        return [found[text] for text in texts]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=ANSWER_SECONDS)


def command(*flags: object) -> list[str]:
    return [sys.executable, "-P", "-m", "kvstore.cli", "serve", *(str(flag) for flag in flags)]


@contextlib.contextmanager
def sidecar(*flags):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    with subprocess.Popen(
        command("--host-bytes", "16MiB", *flags),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
    ) as process:  # fmt: skip
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield Sidecar(process, json.loads(line))
        finally:
            process.kill()


@pytest.fixture
def unix_sidecar(tmp_path):
    with sidecar("--listen", f"unix://{tmp_path}/kvstore.sock") as running:
        yield running


def payload() -> np.ndarray:
    return np.random.default_rng(301).integers(0, 256, (BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)


def store_prompt(address: str) -> None:
    with kvstore.connect(address) as client, client.stage(NAMESPACE, TOKENS) as stage:
        stage.write_from(payload())


def test_the_ready_line_has_the_real_addresses(tmp_path):
    unix = f"unix://{tmp_path}/kvstore.sock"
    with sidecar("--listen", f"{unix},127.0.0.1:0", "--metrics", "127.0.0.1:0") as running:
        first, second = running.ready["listen"]
        assert (True, running.process.pid, unix) == (running.ready["ready"], running.ready["pid"], first)
        assert 0 != int(second.rpartition(":")[2])
        assert not running.ready["metrics"].endswith(":0")
        for address in (first, second):
            with kvstore.connect(address) as client:
                assert 0 == client.stats().lookups


def test_a_start_says_what_host_memory_it_has(tmp_path):
    flags = ("--listen", f"unix://{tmp_path}/s", "--host-bytes", "128MiB", "--set", "store.huge_pages=never")
    with sidecar(*flags) as running:
        assert "capacity_bytes=134217728 pages=plain pages" in running.log_line(
            "reserved and touched in the background"
        )
        serving, ready = running.log_lines("host memory: ", "host memory is ready")
        assert "pages=plain pages" in serving
        assert "touched=134217728" in ready


def test_sigterm_stops_in_order_and_removes_the_socket(tmp_path, unix_sidecar):
    assert 0 == unix_sidecar.stop()
    assert "stopped" in unix_sidecar.process.stderr.read()
    assert not (tmp_path / "kvstore.sock").exists()


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_of_the_start_ends_the_process(stop_signal):
    """At random moments: asked too early it dies of the signal, later it stops in order; it never goes on serving."""
    expected = {0, 130, -signal.SIGTERM, -signal.SIGINT}
    for delay_seconds in np.linspace(0.2, 0.8, 4):
        with subprocess.Popen(
            command("--host-bytes", "16MiB", "--listen", "127.0.0.1:0"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=delay_seconds)
            process.send_signal(stop_signal)
            assert process.wait(timeout=ANSWER_SECONDS) in expected


INTERRUPTED_UNHEARD = """
import os, signal, sys
import kvstore.server
from kvstore.cli import main

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)  # what a handler of Python's raises here is ignored

kvstore.server.run = lambda config, *, ready: Finalized()
sys.exit(main(["serve", "--host-bytes", "16MiB", "--listen", "127.0.0.1:0"]))
"""


def test_an_interrupt_of_the_start_is_not_lost_where_python_hears_none():
    done = subprocess.run(
        [sys.executable, "-P", "-c", INTERRUPTED_UNHEARD], capture_output=True, text=True, timeout=ANSWER_SECONDS
    )
    assert -signal.SIGINT == done.returncode, done.stderr


@pytest.mark.parametrize("lane", ["unix", "grpc+unix"])
def test_a_stop_after_work_prints_nothing_but_the_log(tmp_path, lane):
    with sidecar("--listen", f"{lane}://{tmp_path}/s") as running:
        store_prompt(running.address)
        assert 0 == running.stop()
        lines = running.process.stderr.read().splitlines()
    assert [] == [line for line in lines if " kvstore." not in line]


def test_what_was_committed_is_found_again_after_a_stop(tmp_path):
    flags = ("--listen", f"unix://{tmp_path}/s", "--data-dir", tmp_path / "data", "--disk-bytes", "32MiB")
    with sidecar(*flags) as running:
        store_prompt(running.address)
        assert 0 == running.stop()

    loaded = np.zeros_like(payload())
    with sidecar(*flags) as running, kvstore.connect(running.address) as client:
        match = client.match(NAMESPACE, TOKENS)
        assert {kvstore.Tier.DISK: BLOCKS} == match.tiers
        with client.lease(match) as lease:
            assert BLOCKS == lease.load_into(loaded).blocks
    assert np.array_equal(payload(), loaded)


def test_the_pages_tell_whether_the_sidecar_lives_and_is_ready(tmp_path):
    listen = ("--listen", f"unix://{tmp_path}/s", "--metrics", "127.0.0.1:0")
    with sidecar(*listen, "--set", "server.grace_seconds=1h") as running:
        assert [(200, "ok"), (200, "ok")] == [page(running, path) for path in ("/livez", "/readyz")]

        with call_that_waits(running):
            running.process.send_signal(signal.SIGTERM)
            running.log_line("stopping")
            told = [(200, "ok"), (503, "stopping")]
            wait_until(lambda: told == [page(running, path) for path in ("/livez", "/readyz")])


@contextlib.contextmanager
def call_that_waits(running: Sidecar):
    """A client in the middle of a call that a stop gives time to."""
    store_prompt(running.address)
    waiting = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvstore.cli", "events", "--address", running.address, "--follow"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with waiting:
        try:
            waiting.stdout.readline()
            yield
        finally:
            waiting.kill()


def page(running: Sidecar, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{running.ready['metrics']}{path}") as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()


def test_a_second_signal_ends_a_stop_that_waits_for_a_call(tmp_path):
    flags = ("--listen", f"unix://{tmp_path}/s", "--set", "server.grace_seconds=1h")
    with sidecar(*flags) as running, call_that_waits(running):
        running.process.send_signal(signal.SIGTERM)
        running.log_line("stopping:")
        running.process.send_signal(signal.SIGTERM)
        assert -signal.SIGTERM == running.process.wait(timeout=ANSWER_SECONDS)


def test_the_metrics_page_moves_with_what_is_done(tmp_path):
    with sidecar("--listen", f"unix://{tmp_path}/s", "--metrics", "127.0.0.1:0") as running:
        store_prompt(running.address)
        with kvstore.connect(running.address) as client:
            assert BLOCKS == client.match(NAMESPACE, [*TOKENS, 1, 2]).blocks
        with urllib.request.urlopen(f"http://{running.ready['metrics']}/metrics") as page:
            lines = page.read().decode().splitlines()

    assert f"kvstore_stored_blocks_total {float(BLOCKS)}" in lines
    assert 'kvstore_hit_tokens_total{tier="host"} 40.0' in lines
    assert "kvstore_lookup_tokens_total 42.0" in lines
    assert "kvstore_failures_total 0.0" in lines
    assert any(line.startswith('kvstore_call_seconds_count{method="Match",status="OK"} 1.0') for line in lines)


def test_quotas_and_the_policy_of_the_settings_are_those_of_the_sidecar(tmp_path):
    file = tmp_path / "kvstore.toml"
    file.write_text(f'[[quota]]\ntenant = "default"\nmodel = "m"\nhost_max = {4 * LAYOUT.block_bytes}\n')
    with sidecar(
        "--config", file, "--eviction-policy", "lru", "--listen", f"unix://{tmp_path}/s", "--metrics", "127.0.0.1:0"
    ) as running:
        store_prompt(running.address)
        with kvstore.connect(running.address) as client:
            assert 4 == client.match(NAMESPACE, TOKENS).blocks
            assert {"quota": BLOCKS - 4} == client.stats().rejected_blocks
            assert 4 == client.end_session(NAMESPACE, TOKENS[:16])
        with urllib.request.urlopen(f"http://{running.ready['metrics']}/metrics") as page:
            assert f'kvstore_rejected_blocks_total{{reason="quota"}} {float(BLOCKS - 4)}' in page.read().decode()


def refused(*flags: object) -> str:
    """The one line that a sidecar with these flags says before it gives up."""
    done = subprocess.run(command(*flags), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert (1, "") == (done.returncode, done.stdout), done.stderr
    assert done.stderr.startswith("kvstore serve: "), done.stderr
    assert 1 == len(done.stderr.splitlines()), done.stderr
    return done.stderr


WRONG = [
    (["--host-bytes", "64XB"], "unknown unit 'XB'"),
    (["--host-bytes", "1000TiB"], str(1000 * 2**40)),
    (["--disk-bytes", "1GiB"], "--data-dir"),
    (["--set", "tiers.hots.capacity_bytes=1GiB"], "tiers.host.capacity_bytes"),
    (["--metrics", "0.0.0.0:9464"], "server.metrics_address"),
    (["--listen", "0.0.0.0:7070"], "0.0.0.0:7070"),
    (["--listen", "ftp://x"], "ftp://x"),
    (["--cluster", "valkey://cache", "--advertise", "node-3"], "node-3"),
    (["--config", "/nowhere/kvstore.toml"], "/nowhere/kvstore.toml"),
    (["--data-dir", "/proc/kvstore", "--disk-bytes", "16MiB"], "/proc/kvstore"),
    (["--set", "tenants.a.secret_files=/nowhere/secret"], "/nowhere/secret"),
    (["--eviction-policy", "mru"], "expected one of survival, survival_flops, lru, lfu, fifo, s3fifo, sieve"),
    (["--set", "quota.1.host_min=17MiB"], "quota.1.host_min is 17825792"),
    (["--set", "quota.1.priority=-1"], "expected a number above 0"),
]
ALL_AT_ONCE = """
import contextlib, io, json, sys
from kvstore.cli import main
told = []
for flags in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(["serve", *flags])
    told.append([status, out.getvalue(), said.getvalue()])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """What `kvstore serve` says to each wrong choice: status, output, errors. One process asks them all."""
    listen = f"unix://{tmp_path_factory.mktemp('refusals')}/s"
    asked = [["--host-bytes", "16MiB", "--listen", listen, *flags] for flags, _ in WRONG]
    done = subprocess.run(
        [sys.executable, "-P", "-c", ALL_AT_ONCE],
        input=json.dumps(asked), capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[" ".join(flags) for flags, _ in WRONG])
def test_what_a_user_gets_wrong_is_one_line(refusals, number):
    status, out, said = refusals[number]
    assert (1, "") == (status, out)
    assert said.startswith("kvstore serve: "), said
    assert 1 == len(said.splitlines()), said
    assert WRONG[number][1] in said


def test_bad_toml_is_one_line_with_file_and_line(tmp_path):
    file = tmp_path / "kvstore.toml"
    file.write_text("[server]\nlisten = = 3\n")

    assert f"{file}:2: " in refused("--config", file)


def test_a_taken_port_or_socket_is_one_line_that_names_it(tmp_path, unix_sidecar):
    assert unix_sidecar.address in refused("--host-bytes", "16MiB", "--listen", unix_sidecar.address)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        assert address in refused("--host-bytes", "16MiB", "--listen", address)
        metrics = refused("--host-bytes", "16MiB", "--listen", f"unix://{tmp_path}/other", "--metrics", address)
        assert address in metrics


def test_a_data_directory_in_use_is_one_line_that_names_the_process(tmp_path):
    disk = ("--data-dir", tmp_path / "data", "--disk-bytes", "16MiB")
    with sidecar("--listen", f"unix://{tmp_path}/s", *disk) as running:
        error = refused("--host-bytes", "16MiB", "--listen", f"unix://{tmp_path}/other", *disk)
    assert str(running.process.pid) in error


def test_a_disk_that_is_too_small_is_one_line(tmp_path):
    error = refused(
        "--host-bytes", "16MiB", "--listen", f"unix://{tmp_path}/s", "--data-dir", tmp_path, "--disk-bytes", "1000TiB"
    )
    assert str(tmp_path) in error


@pytest.fixture
def ask(unix_sidecar, capsys):
    """Run a command against the sidecar; gives its exit code and what it printed as JSON."""

    def run(*argv: object) -> tuple[int, dict[str, object]]:
        status = main([str(word) for word in (argv[0], "--address", unix_sidecar.address, "--json", *argv[1:])])
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_the_commands_say_what_the_store_says(ask, unix_sidecar):
    store_prompt(unix_sidecar.address)

    assert (0, True) == (ask("status")[0], ask("status")[1]["serving"])
    assert kvstore.__version__ == ask("status")[1]["version"]
    assert "wire" == ask("status")[1]["lane"]
    status, matched = ask("match", *TOKENS, 99, *FLAGS)
    ((_, writer),) = [(run["blocks"], run.pop("writer")) for run in matched["writers"]]
    expected = {"blocks": 10, "tokens": 40, "prompt_tokens": 41, "tiers": {"host": 10}, "writers": [{"blocks": 10}]}
    assert (0, expected) == (status, matched)
    assert 16 == len(writer)
    assert (0, BLOCKS) == (ask("stats")[0], ask("stats")[1]["stored_blocks"])
    assert 0 == ask("stats")[1]["lookups"]
    assert "stored" == ask("events")[1]["kind"]
    assert (0, {"flushed": True}) == ask("flush")
    assert (0, {"namespaces": 1, "blocks": BLOCKS, "problems": []}) == ask("verify")


def test_what_a_writer_wrote_is_named_by_match_and_dropped_by_evict(ask, unix_sidecar, capsys):
    store_prompt(unix_sidecar.address)

    writer = ask("match", *TOKENS, *FLAGS)[1]["writers"][0]["writer"]
    nobody = f"{int(writer, 16) ^ 1:016x}"
    assert (0, {"writer": nobody, "blocks": 0, "remaining_blocks": 0}) == ask("evict", "--writer", nobody)
    assert (0, {"writer": writer, "blocks": BLOCKS, "remaining_blocks": 0}) == ask("evict", "--writer", writer)
    assert (0, []) == (ask("match", *TOKENS, *FLAGS)[0], ask("match", *TOKENS, *FLAGS)[1]["writers"])
    for words in (("evict", "--writer", "engine"), ("evict", "--writer", writer, 1, 2)):
        assert main([str(word) for word in (words[0], "--address", unix_sidecar.address, *words[1:])])
        assert "writer" in capsys.readouterr().err


def test_pins_hold_and_end(ask, unix_sidecar):
    store_prompt(unix_sidecar.address)

    status, pin = ask("pin", *TOKENS, *FLAGS, "--ttl", "1h")
    assert (0, BLOCKS) == (status, pin["blocks"])
    assert pin["expires_unix_seconds"] is not None
    assert (0, {"blocks": 0}) == ask("evict", *TOKENS, *FLAGS)
    assert (0, {"ended": True}) == ask("unpin", pin["pin_id"])
    assert (1, {"ended": False}) == ask("unpin", pin["pin_id"])
    assert (0, {"blocks": 4}) == ask("evict", *TOKENS, *FLAGS, "--from-block", 6)
    assert 3 == ask("pin", *TOKENS, *FLAGS)[0]
    assert (0, {"blocks": 6}) == ask("clear", *FLAGS)
    assert 1 == ask("pin", *TOKENS, *FLAGS)[0]


def test_people_get_text(unix_sidecar, capsys):
    store_prompt(unix_sidecar.address)

    for argv in (["status"], ["stats"], ["events"], ["match", *map(str, TOKENS), *FLAGS]):
        assert 0 == main([argv[0], "--address", unix_sidecar.address, *argv[1:]])

    shown = capsys.readouterr().out
    assert f"{unix_sidecar.address}: serving, version {kvstore.__version__}" in shown
    assert "40 of 40 tokens, 10 blocks: 10 in host" in shown
    assert "stored_blocks" in shown


def test_no_sidecar_is_one_line_that_says_how_to_start_one(tmp_path, capsys):
    assert 1 == main(["stats", "--address", f"unix://{tmp_path}/none.sock"])

    error = capsys.readouterr().err
    assert error.startswith("kvstore stats: ")
    assert "kvstore serve" in error
    assert 1 == len(error.splitlines())


def test_a_wrong_ttl_is_one_line(tmp_path, capsys):
    assert 1 == main(["pin", "1", "--ttl", "soon", "--address", f"unix://{Path(tmp_path)}/none.sock", *FLAGS])
    assert "--ttl 'soon'" in capsys.readouterr().err
