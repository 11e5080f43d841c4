"""A client of another language, made from the .proto files alone: Node.js with @grpc/grpc-js."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import kvstore
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore
from kvstore.types import Namespace

PROTOS = Path(__file__).parents[2] / "protos"
PROGRAM = Path(__file__).with_name("node_client.js")
PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)


@pytest.fixture
def node_modules(request: pytest.FixtureRequest) -> Path:
    """A folder with the packages, installed once and kept beside pytest's cache."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node or npm is not installed")
    folder = request.config.cache.mkdir("node_client")
    if not (folder / "node_modules" / "@grpc" / "proto-loader").is_dir():
        install = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--prefer-offline"]
        options = ["--ignore-scripts", "--fetch-retries=0", "--fetch-timeout=20000"]
        try:
            done = subprocess.run(
                [*install, *options, *PACKAGES], capture_output=True, text=True, timeout=ANSWER_SECONDS
            )
        except subprocess.TimeoutExpired:
            pytest.skip("npm did not install @grpc/grpc-js within 90 s")
        if done.returncode:
            pytest.skip(f"npm cannot install @grpc/grpc-js: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "node_modules"


@pytest.mark.slow  # downloads packages
def test_a_client_in_another_language_stores_and_loads(node_modules: Path, tmp_path: Path):
    program = node_modules.parent / PROGRAM.name
    shutil.copy(PROGRAM, program)
    with (
        kvstore.open(None, host_bytes=MIB) as store,
        ServedStore(store, [f"unix://{tmp_path}/s"]),
    ):
        command = ["node", str(program), str(PROTOS), f"unix:{tmp_path}/s"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
        assert "" == done.stderr
        seen = json.loads(done.stdout)
        counts = dict.fromkeys(("staged", "rows", "committed", "after", "leased", "loaded"), BLOCKS)
        assert {"before": 0, **counts, "equal": True, "refused": "InvalidArgumentError"} == seen
        assert BLOCKS == store.match(NAMESPACE, PROMPT).blocks
        assert (0, 0) == (store.stats().leases, store.stats().stages)
