"""Binding real addresses, and what a user gets told who cannot have one."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.errors import ConfigError
from kvstore.testing.conformance import MIB
from kvstore.testing.serving import ServedStore

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def store() -> Iterator[kvstore.KvStore]:
    with kvstore.open(None, host_bytes=MIB) as store:
        yield store


def test_a_taken_port_is_noticed_and_named(store: kvstore.KvStore):
    with ServedStore(store) as served:
        port = served.addresses[0].rpartition(":")[2]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: the port is taken"):
            ServedStore(store, [f"127.0.0.1:{port}"])


def test_a_port_taken_by_another_program_is_noticed(store: kvstore.KvStore):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="taken"):
        ServedStore(store, [f"127.0.0.1:{other.getsockname()[1]}"])


def test_one_address_that_fails_leaves_none_served(store: kvstore.KvStore, tmp_path: Path):
    path = tmp_path / "s"
    with pytest.raises(ConfigError, match="refusing to listen"):
        ServedStore(store, [f"unix://{path}", "0.0.0.0:0"])
    assert os.listdir(tmp_path) == []


def test_a_socket_left_by_a_killed_server_is_replaced(store: kvstore.KvStore, tmp_path: Path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with ServedStore(store, [f"unix://{path}"]) as served:
        assert os.stat(path).st_mode & 0o777 == 0o600
        with kvstore.connect(served.addresses[0]) as client:
            assert client.status().serving
    assert os.listdir(tmp_path) == []


def test_a_live_socket_is_refused_and_goes_on_serving(store: kvstore.KvStore, tmp_path: Path):
    address = f"unix://{tmp_path}/s"
    with ServedStore(store, [address]):
        with pytest.raises(ConfigError, match="a server answers there"):
            ServedStore(store, [address])
        with kvstore.connect(address) as client:
            assert client.status().serving


def test_several_addresses_serve_one_store(store: kvstore.KvStore, tmp_path: Path):
    with ServedStore(store, [f"unix://{tmp_path}/s", "127.0.0.1:0", "grpc://localhost:0"]) as served:
        assert len(set(served.addresses)) == 3
        for address in served.addresses:
            with kvstore.connect(address) as client:
                assert client.status().serving
