"""A cluster of this release and an earlier one: nodes of both store, find and fetch, and start on each other's disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.testing.blocks import store_prompt, verified_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.testing.valkey_server import ValkeyServer

pytestmark = [pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
# The last commit whose leases have no state and which knows no deletions. Its wheel is built once, and kept in build/.
EARLIER = "a84b4ce1bae33593eddd9b55b9d01f3156ce5327"
LAYOUT = kvstore.KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="int8", block_tokens=16)
SECRET = b"shared by all nodes"
NAMESPACE = kvstore.Namespace(model="m", revision="r", layout=LAYOUT, secret=SECRET)
BLOCKS = 64
OLD_PROMPT, NEW_PROMPT = (list(range(first, first + BLOCKS * 16)) for first in (0, 100_000))
SECONDS_MAX = 60.0
_LOOK_SECONDS = 0.05
SETTINGS = {
    "cluster.lease_seconds": "4s",
    "cluster.announce_after_seconds": "0s",
    "cluster.prefill_tokens_per_second": "100",
    "cluster.directory_seconds_max": "5s",
}


@dataclass(frozen=True)
class Release:
    """How a release is run: the words before the command's own, and where its modules are found."""

    words: tuple[str, ...]
    environ: dict[str, str]


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[str]
    client: kvstore.Client

    def bring(self, prompt: list[int]) -> int:
        """Ask until it is there or the time is over; the blocks that are, each asserted right."""
        ends_at = time.monotonic() + SECONDS_MAX
        while self.client.match(NAMESPACE, prompt, touch=False).blocks < BLOCKS and time.monotonic() < ends_at:
            with self.client.prefetch(NAMESPACE, prompt, wait_seconds=5.0):
                pass
        return verified_blocks(self.client, NAMESPACE, prompt)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert 0 == self.process.wait(SECONDS_MAX)


def environ(**further: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}, **further}


@pytest.fixture(scope="module")
def new() -> Release:
    return Release((sys.executable, "-P"), environ())


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The earlier release in a folder of its own, without `site`: this one may be installed as an editable one."""
    folder = tmp_path_factory.mktemp("earlier")
    with zipfile.ZipFile(earlier_wheel(folder)) as wheel:
        wheel.extractall(folder / "installed")
    found = [str(folder / "installed"), *(path for path in sys.path if path.endswith("site-packages"))]
    release = Release((sys.executable, "-S", "-P"), environ(PYTHONPATH=os.pathsep.join(found)))
    where = subprocess.check_output(
        [*release.words, "-c", "import kvstore; print(kvstore.__file__)"], env=release.environ, text=True
    )
    assert where.startswith(str(folder))
    return release


def earlier_wheel(folder: Path) -> Path:
    kept = ROOT / "build" / "earlier" / EARLIER
    if not list(kept.glob("*.whl")):
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", "-o", str(folder / "source.tar"), EARLIER], check=False
        )
        if archive.returncode:
            pytest.skip(f"commit {EARLIER} is not in this checkout: git fetch --unshallow")
        with tarfile.open(folder / "source.tar") as source:
            source.extractall(folder / "source", filter="tar")
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(kept)]
        subprocess.check_call([*pip, str(folder / "source")])
    (wheel,) = kept.glob("*.whl")
    return wheel


@contextmanager
def serving(release: Release, folder: Path, name: str, url: str) -> Iterator[Served]:
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    settings = {**SETTINGS, "tenants.default.secret_files": str(secret)}
    command = [*release.words, "-m", "kvstore.cli", "serve", "--listen", f"unix://{folder}/{name}.s", "--node", name]
    command += ["--cluster", url, "--host-bytes", "4MiB", "--data-dir", str(folder / name), "--disk-bytes", "128MiB"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=release.environ
    ) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["listen"][0]
            with kvstore.connect(address, lookup_seconds=10.0, bulk_seconds=10.0) as client:
                yield Served(process, client)
        finally:
            process.kill()


def until(holds: Callable[[], bool]) -> None:
    """Ask again and again, as a user would, until it is so."""
    end = time.monotonic() + SECONDS_MAX
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < end, "it does not come about"
        pause.wait(_LOOK_SECONDS)


def names(node: Served) -> dict[str, str]:
    return {known.name: known.version for known in node.client.nodes()[1]}


def test_nodes_of_both_releases_fetch_from_each_other_and_start_on_the_disk_of_the_other(
    own_valkey: ValkeyServer, tmp_path: Path, old: Release, new: Release
) -> None:
    url = own_valkey.url
    with serving(old, tmp_path, "a", url) as earlier, serving(new, tmp_path, "b", url) as later:
        until(lambda: {"a", "b"} == set(names(earlier)) == set(names(later)))
        assert "" == names(later)["a"] != names(later)["b"]
        store_prompt(earlier.client, NAMESPACE, OLD_PROMPT)
        store_prompt(later.client, NAMESPACE, NEW_PROMPT)
        assert [BLOCKS, BLOCKS] == [later.bring(OLD_PROMPT), earlier.bring(NEW_PROMPT)]
        earlier.stop()
        later.stop()
    with serving(new, tmp_path, "a", url) as upgraded, serving(old, tmp_path, "b", url) as downgraded:
        for node in (upgraded, downgraded):
            for prompt in (OLD_PROMPT, NEW_PROMPT):
                assert BLOCKS == verified_blocks(node.client, NAMESPACE, prompt)


def test_a_node_takes_nothing_of_a_deleted_namespace_from_one_that_knows_no_deletions(
    own_valkey: ValkeyServer, tmp_path: Path, old: Release, new: Release
) -> None:
    with ExitStack() as stack:
        earlier = stack.enter_context(serving(old, tmp_path, "a", own_valkey.url))
        later = stack.enter_context(serving(new, tmp_path, "b", own_valkey.url))
        until(lambda: {"a", "b"} == set(names(earlier)) == set(names(later)))
        store_prompt(earlier.client, NAMESPACE, OLD_PROMPT)
        assert BLOCKS == later.bring(OLD_PROMPT)
        later.client.delete_namespace(later.client.namespace_id(NAMESPACE))
        for _ in range(3):
            with later.client.prefetch(NAMESPACE, OLD_PROMPT, wait_seconds=5.0):
                pass
            assert 0 == later.client.match(NAMESPACE, OLD_PROMPT).blocks
        assert BLOCKS == verified_blocks(earlier.client, NAMESPACE, OLD_PROMPT)
