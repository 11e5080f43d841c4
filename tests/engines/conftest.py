"""Real engines as processes, in the venv that `make engines` builds; without it these tests are skipped."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.demo.processes import start_sidecar

ROOT = Path(__file__).resolve().parents[2]
VLLM = "vLLM 0.32.0 for the CPU, V1 model runner"
HOST_BYTES, DISK_BYTES = 128 << 20, 256 << 20
BLOCK_TOKENS = 32
ANSWER_SECONDS_MAX = 900.0
# On a busy machine an answer takes its time, and what is asked here is whether it is right.
PATIENT = {"lookup_seconds": 20.0, "promote_seconds": 10.0, "bulk_seconds": 20.0}
# Processes that SGLang spawns import the script anew, and with it the shim beside it.
SGLANG_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "KMP_BLOCKTIME": "0", "PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture(scope="session")
def vllm_python():
    return python_of("vllm")


def python_of(engine):
    """The Python of an engine's venv, or of KVSTORE_<ENGINE>_PYTHON; the test is skipped where there is none."""
    variable = f"KVSTORE_{engine.upper().replace('-', '_')}_PYTHON"
    python = Path(os.environ.get(variable) or ROOT / f".venv-{engine}" / "bin" / "python")
    if not python.exists():
        pytest.skip(f"there is no {engine} at {python}: make engine-{engine}")
    return python


@pytest.fixture
def record_vllm(record_support):
    """Says what vLLM was shown to do with the tiny model, or another."""

    def record(feature, layout="full attention", model="Llama", dtype="float32"):
        record_support("vllm", VLLM, layout=layout, feature=feature, model=model, dtype=dtype)

    return record


@pytest.fixture(scope="session")
def llama_cpp_python():
    return python_of("llama-cpp")


@pytest.fixture(scope="session")
def gguf_model():
    """SmolLM2-135M in 4 bits, which `make engine-llama-cpp` puts beside the engine."""
    folder = Path(os.environ.get("KVSTORE_GGUF_FOLDER") or ROOT / ".venv-llama-cpp" / "model")
    for path in sorted(folder.rglob("*.gguf")):
        return path
    pytest.skip(f"there is no model under {folder}: make engine-llama-cpp")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a Llama of random weights, spread so wide that no two tokens are equally likely."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class EngineProcess:
    """An engine that takes a command as a line of JSON and answers with one; see vllm_process.py."""

    def __init__(self, python, options, folder, script="vllm_process.py", environment=None):
        self.log = folder / f"engine-{os.urandom(4).hex()}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [python, "-P", Path(__file__).with_name(script), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                text=True,
                env=os.environ | (environment or {}),
            )

    def tell(self, do, **arguments):
        self.process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self.process.stdin.flush()

    def answer(self):
        timer = threading.Timer(ANSWER_SECONDS_MAX, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line, f"the engine ended with {self.process.wait()}: {self.log.read_text(errors='replace')[-3000:]}"
        return json.loads(line)

    def ask(self, do, **arguments):
        self.tell(do, **arguments)
        return self.answer()

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def start_engine(vllm_python, tiny_model, tmp_path_factory):
    """Starts engines of the tiny model, with a connector if an address is given; they end with the module."""
    with ExitStack() as stack:

        def start(address=None, settings=None, **options):
            options = {"model": str(tiny_model), "max_model_len": 1024, "block_size": BLOCK_TOKENS} | options
            if address is not None:
                options["kv_transfer_config"] = {
                    "kv_connector": "KvstoreConnector",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": PATIENT | {"address": address} | (settings or {}),
                }
            engine = EngineProcess(
                vllm_python, options | {"skip_tokenizer_init": True}, tmp_path_factory.mktemp("engine")
            )
            stack.callback(engine.close)
            assert engine.answer() == {"ready": True}
            return engine

        yield start


@pytest.fixture(scope="module")
def start_llama(llama_cpp_python, gguf_model, tmp_path_factory):
    """Starts engines of llama.cpp, with a connector if an address is given; they end with the module."""
    with ExitStack() as stack:

        def start(**options):
            options = {"model": str(gguf_model)} | options
            engine = EngineProcess(
                llama_cpp_python, options, tmp_path_factory.mktemp("llama"), script="llama_cpp_process.py"
            )
            stack.callback(engine.close)
            assert engine.answer() == {"ready": True}
            return engine

        yield start


@pytest.fixture(scope="session")
def sglang_python():
    return python_of("sglang")


@pytest.fixture(scope="module")
def start_sglang(sglang_python, tiny_model, tmp_path_factory):
    """Starts engines of the tiny model; they end with the module."""
    with ExitStack() as stack:

        def start(options=None, environment=None):
            options = {"model_path": str(tiny_model)} | (options or {})
            environment = SGLANG_ENVIRONMENT | (environment or {})
            folder = tmp_path_factory.mktemp("sglang")
            engine = EngineProcess(sglang_python, options, folder, "sglang_process.py", environment)
            stack.callback(engine.close)
            assert engine.answer() == {"ready": True}
            return engine

        yield start


@pytest.fixture(scope="module")
def new_address(tmp_path_factory):
    """Makes addresses of short paths: the name of a Unix socket has 108 bytes at most."""
    return lambda: f"unix://{tmp_path_factory.mktemp('s')}/kv.sock"


@pytest.fixture(scope="module")
def start_server(tmp_path_factory):
    """Starts sidecars one after the other, on the same data at the same address."""
    folders: dict[str, Path] = {}
    with ExitStack() as stack:

        def start(address):
            folder = folders.setdefault(address, tmp_path_factory.mktemp("data"))
            process = stack.enter_context(start_sidecar(folder, address, HOST_BYTES, DISK_BYTES))
            assert process.receive()["ready"] is True
            return process

        yield start
