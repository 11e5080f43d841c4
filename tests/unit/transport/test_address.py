from __future__ import annotations

import pytest

from kvstore import config
from kvstore.errors import ConfigError
from kvstore.transport.address import ARENA_CHOICES, TcpAddress, UnixAddress, parse_address, with_arena


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unix:///run/kvstore.sock", UnixAddress("/run/kvstore.sock")),
        ("grpc+unix:///run/kvstore.sock", UnixAddress("/run/kvstore.sock", grpc_only=True)),
        ("127.0.0.1:7070", TcpAddress("127.0.0.1", 7070)),
        ("grpc://node-1:0", TcpAddress("node-1", 0, grpc_only=True)),
        ("[::1]:65535", TcpAddress("::1", 65535)),
    ],
)
def test_addresses_are_read_as_users_write_them(text: str, expected: UnixAddress | TcpAddress):
    assert expected == parse_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7070",
        ":7070",
        "host",
        "host:",
        "host:x",
        "host:-1",
        "host:65536",
        "host:\uff17",
        "::1:7070",
        "http://host:7070",
        "grpc://unix:///x",
        "grpc://host:1/path",
        "unix://relative",
        "unix://",
        "unix:///",
        "unix:///a\0b",
        "unix:///" + "x" * 107,
    ],
)
def test_what_is_no_address_is_refused_by_name(text: str):
    with pytest.raises(ConfigError):
        parse_address(text)


@pytest.mark.parametrize("text", ["unix:///run/s", "127.0.0.1:7070", "[::1]:0", "grpc+unix:///run/s", "grpc://[::1]:0"])
def test_an_address_prints_as_it_is_written(text: str):
    assert text == str(parse_address(text))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
    ],
)
def test_only_loopback_counts_as_loopback(host: str, expected: bool):
    assert expected is TcpAddress(host, 1).is_loopback


def test_whether_a_client_maps_blocks_is_said_of_unix_sockets_and_named_if_it_is_no_choice():
    assert config.ARENA_CHOICES == ARENA_CHOICES
    assert "off" == getattr(with_arena(UnixAddress("/run/s"), "off"), "arena", None)
    assert TcpAddress("node", 1) == with_arena(TcpAddress("node", 1), "off")
    with pytest.raises(ConfigError, match="arena is 'no', expected one of map, off"):
        with_arena(UnixAddress("/run/s"), "no")
