"""Every expression of the dashboards and rules, asked of a real Prometheus that scrapes a real sidecar under load."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.cli import main
from kvstore.dashboards import BOARDS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="there is no prometheus: apt-get install prometheus"
)
LAYOUT = kvstore.KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=16)
NAMESPACE = kvstore.Namespace(model="llama", revision="r1", layout=LAYOUT)
WAIT_SECONDS = 90
LISTENING = r"Listening on.*address=127\.0\.0\.1:(\d+)"
SCRAPES = 8
# What a sidecar by itself, with room left and without codecs, has nothing of.
WITHOUT_DATA = {
    "What would another capacity find?",
    "What do codecs save?",
    "How do fetches end?",
    "Fetch, or compute again?",
    "Who is turned away?",
    "Why do blocks leave?",
}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    folder = tmp_path_factory.mktemp("sidecar")
    flags = ["--listen", f"unix://{folder}/s", "--metrics", "127.0.0.1:0", "--host-bytes", "16MiB"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvstore.cli", "serve", *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.communicate(timeout=30)


class Prometheus:
    """A real one, on a port that the system chose, which scrapes once a second."""

    def __init__(self, folder: Path, target: str) -> None:
        assert 0 == main(["dashboards", "export", str(folder)])
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "prometheus-rules.yaml")],
            "scrape_configs": [{"job_name": "kvstore", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yaml").write_text(json.dumps(config))  # JSON is YAML
        flags = [
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            "--web.listen-address=127.0.0.1:0",
        ]
        self._process = subprocess.Popen(["prometheus", *flags], stderr=subprocess.PIPE, text=True)
        started = "".join(itertools.takewhile(lambda line: "Server is ready" not in line, self._process.stderr))
        self._url = f"http://127.0.0.1:{re.search(LISTENING, started)[1]}/api/v1"
        self._drain = subprocess.Popen(["cat"], stdin=self._process.stderr, stdout=subprocess.DEVNULL)

    def ask(self, path: str, **parameters: str) -> dict[str, object]:
        with urllib.request.urlopen(f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}") as response:
            answer = json.load(response)
        assert "success" == answer["status"], answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, object]]:
        filled = expression.replace("$instance", ".+").replace("$__rate_interval", "1m")
        return self.ask("query", query=filled)["result"]

    def close(self) -> None:
        for process in (self._process, self._drain):
            process.terminate()
            process.wait(30)
        self._process.stderr.close()


def serve_prompts(client: kvstore.KvStore, first: int) -> None:
    for prompt in (list(range(first, first + 512)), list(range(512))):
        with client.lease(client.match(NAMESPACE, prompt)) as lease:
            if lease.blocks:
                lease.load_into(np.empty((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8))
        with client.stage(NAMESPACE, prompt) as stage:
            if stage.blocks:
                stage.write_from(np.zeros((stage.blocks, LAYOUT.block_bytes), dtype=np.uint8))


@pytest.fixture(scope="module")
def prometheus(sidecar: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), sidecar["metrics"])
    try:
        ends_at = time.monotonic() + WAIT_SECONDS
        with kvstore.connect(sidecar["listen"][0], lookup_seconds=10) as client:
            turn = 0
            while (
                not (found := prometheus.query("count_over_time(kvstore_build_info[5m])"))
                or int(found[0]["value"][1]) < SCRAPES
            ):
                turn += 1
                serve_prompts(client, turn * 1000)
                assert time.monotonic() < ends_at, found
        yield prometheus
    finally:
        prometheus.close()


PANELS = [panel for board in BOARDS for panel in board.panels]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.question)
def test_each_panel_has_data(prometheus: Prometheus, panel):
    found = [prometheus.query(query.expression) for query in panel.queries]
    if panel.question not in WITHOUT_DATA:
        assert any(found), [query.expression for query in panel.queries]


def test_what_the_panels_say_is_what_the_sidecar_counted(prometheus: Prometheus, sidecar: dict[str, object]):
    with kvstore.connect(sidecar["listen"][0], lookup_seconds=10) as client:
        stats = client.stats()
    ends_at = time.monotonic() + WAIT_SECONDS
    expected = {"kvstore_lookup_tokens_total": stats.lookup_tokens, "kvstore_stored_blocks_total": stats.stored_blocks}
    while (found := {name: int(prometheus.query(name)[0]["value"][1]) for name in expected}) != expected:
        assert time.monotonic() < ends_at, (found, expected)


def test_rules_are_evaluated_without_errors_and_no_alert_fires(prometheus: Prometheus):
    ends_at = time.monotonic() + WAIT_SECONDS
    while not (rules := [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]) or any(
        rule["health"] == "unknown" for rule in rules
    ):
        assert time.monotonic() < ends_at, rules
    assert [] == [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"]
    assert [] == [rule["name"] for rule in rules if rule.get("state") == "firing"]
