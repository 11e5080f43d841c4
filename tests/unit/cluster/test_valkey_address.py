from __future__ import annotations

import pytest

from kvstore.cluster.valkey_address import ValkeyAddress, ValkeyMode, parse_valkey_address
from kvstore.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("valkey://cache", ValkeyAddress(ValkeyMode.SINGLE, (("cache", 6379),))),
        ("redis://[::1]:7000/3", ValkeyAddress(ValkeyMode.SINGLE, (("::1", 7000),), database=3)),
        (
            "valkeys://me:p%40ss@cache:1",
            ValkeyAddress(ValkeyMode.SINGLE, (("cache", 1),), is_tls=True, username="me", password="p@ss"),
        ),
        ("valkey+unix:///run/valkey.sock", ValkeyAddress(ValkeyMode.UNIX, path="/run/valkey.sock")),
        (
            "valkey+sentinel://a,b:27000/main/2",
            ValkeyAddress(ValkeyMode.SENTINEL, (("a", 26379), ("b", 27000)), service="main", database=2),
        ),
        ("valkey+sentinel://a/main", ValkeyAddress(ValkeyMode.SENTINEL, (("a", 26379),), service="main")),
        ("rediss+cluster://a,b", ValkeyAddress(ValkeyMode.CLUSTER, (("a", 6379), ("b", 6379)), is_tls=True)),
    ],
)
def test_an_address_says_which_servers_and_how(url: str, expected: ValkeyAddress) -> None:
    assert expected == parse_valkey_address(url)


@pytest.mark.parametrize(
    "url",
    [
        "cache:6379",
        "http://cache",
        "valkey://",
        "valkey+raft://cache",
        "valkey://a,b",
        "valkey://cache:0",
        "valkey://cache:x",
        "valkey://cache/main",
        "valkey+sentinel://a,b",
        "valkey+cluster://a/1",
        "valkey://,",
        "valkey://[::1",
    ],
)
def test_what_is_no_address_is_refused_in_words(url: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse_valkey_address(url)


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(parse_valkey_address("valkey://me:secret@cache"))
    for url in ("valkey://me:secret@cache:0", "me:secret@cache:6379", "valkey:/me:secret@cache"):
        with pytest.raises(ConfigError) as refused:
            parse_valkey_address(url)
        assert "secret" not in str(refused.value)
