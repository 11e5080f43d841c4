from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.transport import listen
from kvstore.transport.address import TcpAddress, UnixAddress
from kvstore.transport.listen import ListenRules, bind


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


BEYOND = ["0.0.0.0", "::", "192.0.2.1", "example.org"]


@pytest.mark.parametrize("host", BEYOND)
@pytest.mark.parametrize("rules", [ListenRules(), ListenRules(tls=True, closed=True)])
def test_without_tls_others_cannot_reach_us(server: SocketServer, host: str, rules: ListenRules):
    told = (
        r"listen on tls://.*:0 with tls.cert, tls.key and auth.file set \(`kvstore certs DIR` and `kvstore token new`"
    )
    with pytest.raises(ConfigError, match=told):
        bind(server, TcpAddress(host, 0), rules)
    with pytest.raises(ConfigError, match="refusing to listen"):
        bind(server, TcpAddress(host, 0, grpc_only=True), rules)
    assert server.sockets == []


@pytest.mark.parametrize("host", BEYOND)
def test_with_tls_and_without_names_others_cannot_reach_us(server: SocketServer, host: str):
    with pytest.raises(
        ConfigError, match=r"anybody could come in; set auth.file \(`kvstore token new` makes an entry\)"
    ):
        bind(server, TcpAddress(host, 0, tls=True), ListenRules(tls=True))
    assert server.sockets == []


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_tls_needs_a_certificate(server: SocketServer, host: str):
    with pytest.raises(ConfigError, match=r"TLS has no certificate; set tls.cert and tls.key"):
        bind(server, TcpAddress(host, 0, tls=True), ListenRules(closed=True))
    assert server.sockets == []


def test_with_tls_and_names_any_address_is_served():
    shared = listen.SocketServer()
    try:
        bound = bind(shared, TcpAddress("0.0.0.0", 0, tls=True), ListenRules(tls=True, closed=True))
        assert str(bound.address) == f"tls://0.0.0.0:{shared.sockets[0].getsockname()[1]}"
        assert [True] == [door.tls for door in shared.doors(bound.address, 0)]
    finally:
        shared.close()


def test_a_group_may_be_let_in(server: SocketServer, tmp_path: Path):
    path = tmp_path / "s"
    bind(server, UnixAddress(str(path)), ListenRules(unix_mode=0o660, unix_group=os.getegid()))
    found = path.stat()
    assert (found.st_mode & 0o777, found.st_gid) == (0o660, os.getegid())


def test_all_of_the_machine_is_let_in_only_where_callers_are_known(server: SocketServer, tmp_path: Path):
    path = tmp_path / "s"
    with pytest.raises(ConfigError, match=r"mode 0666: anybody on this machine could come in; set auth.file"):
        bind(server, UnixAddress(str(path)), ListenRules(unix_mode=0o666))
    assert not path.exists()
    bind(server, UnixAddress(str(path)), ListenRules(unix_mode=0o666, closed=True))
    assert path.stat().st_mode & 0o777 == 0o666
