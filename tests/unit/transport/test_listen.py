from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.transport.address import TcpAddress, UnixAddress
from kvstore.transport.listen import bind


class SocketServer:
    """Binds as gRPC does, without one."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []

    def add_insecure_port(self, address: str) -> int:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.removeprefix("unix:"))
        listener.listen()
        self.sockets.append(listener)
        return 1

    def close(self) -> None:
        for listener in self.sockets:
            listener.close()


@pytest.fixture
def server():
    server = SocketServer()
    yield server
    server.close()


def test_a_socket_is_for_its_owner_alone_and_leaves_nothing_beside_it(server: SocketServer, tmp_path: Path):
    path = tmp_path / "s"
    bound = bind(server, UnixAddress(str(path)))
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["s"]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    bound.remove()
    bound.remove()
    assert os.listdir(tmp_path) == []


def test_a_stale_socket_is_replaced(server: SocketServer, tmp_path: Path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    bind(server, UnixAddress(str(path)))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_that_answers_is_left_alone(server: SocketServer, tmp_path: Path):
    path = tmp_path / "s"
    bind(server, UnixAddress(str(path)))
    with pytest.raises(ConfigError, match="a server answers there"):
        bind(server, UnixAddress(str(path)))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_of_a_successor_is_not_removed(server: SocketServer, tmp_path: Path):
    path = tmp_path / "s"
    bound = bind(server, UnixAddress(str(path)))
    path.rename(tmp_path / "elsewhere")
    bind(server, UnixAddress(str(path)))
    bound.remove()
    assert path.exists()


def test_a_file_that_is_no_socket_is_never_replaced(server: SocketServer, tmp_path: Path):
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        bind(server, UnixAddress(str(path)))
    assert path.read_text() == "precious"


def test_a_missing_directory_is_named(server: SocketServer, tmp_path: Path):
    with pytest.raises(ConfigError, match="absent: No such file or directory"):
        bind(server, UnixAddress(str(tmp_path / "absent" / "s")))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_addresses_that_others_can_reach_are_refused(server: SocketServer, host: str):
    with pytest.raises(ConfigError, match="TLS is not there yet; use a Unix socket or a loopback address"):
        bind(server, TcpAddress(host, 0))
    assert server.sockets == []
