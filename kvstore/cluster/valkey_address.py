"""What `valkey://...` means: which servers, how they are asked, and as whom."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from urllib.parse import unquote, urlsplit

from kvstore.errors import ConfigError

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379
_FORMS = (
    "valkey://host:port, valkey+unix:///path, valkey+sentinel://host,host/service or valkey+cluster://host,host, with "
    "valkeys for TLS"
)


class ValkeyMode(Enum):
    """How the servers belong together."""

    SINGLE = "single"
    UNIX = "unix"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    """The servers of a directory."""

    mode: ValkeyMode
    hosts: tuple[tuple[str, int], ...] = ()
    is_tls: bool = False
    path: str = ""  # of a Unix socket
    service: str = ""  # which of those that the Sentinels watch
    database: int = 0
    username: str = ""
    password: str = ""

    def __repr__(self) -> str:
        """Without the password, as logs and errors show it."""
        hosts = self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{self.mode.value}:{hosts}/{self.service or self.database}"


def parse_valkey_address(url: str) -> ValkeyAddress:
    """The servers that a URL names; raises ConfigError, which does not show the password."""
    scheme, separator, rest = url.partition("://")
    if not separator:  # what comes first may be a password
        raise ConfigError(f"the directory's address has no ://, expected {_FORMS}")
    family, _, kind = scheme.partition("+")
    mode = ValkeyMode(kind or "single") if kind in ("", "unix", "sentinel", "cluster") else None
    if family not in ("valkey", "valkeys", "redis", "rediss") or mode is None or not rest:
        raise ConfigError(f"the directory's address begins with {scheme!r:.40}, expected {_FORMS}")
    login, at, place = rest.rpartition("@")
    username, _, password = login.partition(":") if at else ("", "", "")
    hosts, _, path = place.partition("/")
    port = DEFAULT_SENTINEL_PORT if mode is ValkeyMode.SENTINEL else DEFAULT_PORT
    service, _, number = path.rpartition("/") if mode is ValkeyMode.SENTINEL and "/" in path else ("", "", path)
    if mode is ValkeyMode.SENTINEL and not service:
        service, number = number, ""
    is_unix = mode is ValkeyMode.UNIX
    address = ValkeyAddress(
        mode,
        hosts=() if is_unix else tuple(_host(text, port, place) for text in hosts.split(",")),
        is_tls=family in ("valkeys", "rediss"),
        path=f"/{path}" if is_unix else "",
        service=unquote(service),
        database=0 if is_unix else _database(number),
        username=unquote(username),
        password=unquote(password),
    )
    _check(address, place)
    return address


def _host(text: str, port: int, place: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        found = (parts.hostname or "", port if parts.port is None else parts.port)
    except ValueError as err:
        raise ConfigError(f"the directory's address names {place!r:.80}: {err}; expected {_FORMS}") from err
    if not found[0] or not 0 < found[1] < 65536:
        raise ConfigError(f"the directory's address names {place!r:.80}, expected {_FORMS}")
    return found


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise ConfigError(f"the directory's address ends with {text!r:.40}, expected the number of a database")
    return int(text or 0)


def _check(address: ValkeyAddress, place: str) -> None:
    if address.mode is ValkeyMode.SENTINEL and not address.service:
        raise ConfigError(f"the directory's address names {place!r:.80}, expected the service that Sentinels watch too")
    if address.mode is ValkeyMode.SINGLE and len(address.hosts) > 1:
        raise ConfigError(
            f"the directory's address names {len(address.hosts)} servers, expected one, or valkey+sentinel or "
            "valkey+cluster before ://"
        )
    if address.mode is ValkeyMode.CLUSTER and address.database:
        raise ConfigError(f"the directory's address names database {address.database}, expected none in Cluster mode")
