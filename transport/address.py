"""Addresses as users write them, shared by client and server.

unix:///run/kvstore.sock    a Unix socket, by absolute path
127.0.0.1:7070              TCP; [::1]:7070 is IPv6, port 0 lets a server choose

tls://node-7.example:7070   TLS over TCP: the only form that may leave this machine

All carry the fast lane and gRPC. grpc+unix:///path, grpc://host:port and grpc+tls://host:port ask for gRPC alone: a
client does not try the fast lane then, and a server does not offer it.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.transport.credentials import Credentials

ARENA_CHOICES = ("map", "off")
SOCKET_PATH_BYTES_MAX = 107
_UNIX_SCHEMES = {"unix://": False, "grpc+unix://": True}
_TCP_SCHEMES = {  # gRPC alone, TLS
    "grpc+tls://": (True, True),
    "tls://": (False, True),
    "grpc://": (True, False),
}
_TCP_SCHEME_OF = {kind: scheme for scheme, kind in _TCP_SCHEMES.items()}


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket. `arena` is one of ARENA_CHOICES: whether a client maps blocks of a server behind it."""

    path: str
    grpc_only: bool = False
    arena: str = field(default=ARENA_CHOICES[0], repr=False, compare=False)
    credentials: Credentials | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{'grpc+' if self.grpc_only else ''}unix://{self.path}"

    @property
    def target(self) -> str:
        """How gRPC names it."""
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP host and port; `host` has no brackets. `credentials` are what a client shows and whom it trusts."""

    host: str
    port: int
    grpc_only: bool = False
    tls: bool = False
    credentials: Credentials | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{_TCP_SCHEME_OF.get((self.grpc_only, self.tls), '')}{self.host_and_port}"

    @property
    def host_and_port(self) -> str:
        """Without a scheme."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """How gRPC names it."""
        return f"dns:///{self.host_and_port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nothing outside this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_any(self) -> bool:
        """Whether it stands for all addresses of a machine: one to listen on, and none to be found at."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """Read an address; raises ConfigError that says what was expected."""
    for scheme, grpc_only in _UNIX_SCHEMES.items():
        if text.startswith(scheme):
            return UnixAddress(_socket_path(text, text.removeprefix(scheme)), grpc_only)
    for scheme, (grpc_only, tls) in _TCP_SCHEMES.items():
        if text.startswith(scheme):
            host, port = _host_and_port(text, text.removeprefix(scheme))
            return TcpAddress(host, port, grpc_only, tls)
    if "://" in text:
        raise ConfigError(
            f"address {text!r} has an unknown scheme, expected unix:///path, tls://host:port, grpc://host:port or "
            "host:port"
        )
    return TcpAddress(*_host_and_port(text, text))


def with_arena(address: UnixAddress | TcpAddress, choice: str) -> UnixAddress | TcpAddress:
    """The address, to be used with or without reading in place; over TCP there is none. Raises ConfigError."""
    if choice not in ARENA_CHOICES:
        raise ConfigError(f"arena is {choice!r}, expected one of {', '.join(ARENA_CHOICES)}")
    return replace(address, arena=choice) if isinstance(address, UnixAddress) else address


def _socket_path(text: str, path: str) -> str:
    if not path.startswith("/") or "\0" in path or not PurePosixPath(path).name:
        raise ConfigError(f"address {text!r} names no absolute path, expected unix:///path/to/socket")
    try:
        length = len(path.encode())
    except UnicodeEncodeError as err:
        raise ConfigError(f"address {text!r} is no Unicode text") from err
    if length > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"socket path {path!r} has {length} bytes, Unix allows {SOCKET_PATH_BYTES_MAX}; use a shorter one"
        )
    return path


def _host_and_port(text: str, rest: str) -> tuple[str, int]:
    host, separator, port_text = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not separator or not host or "/" in host or (":" in host and not bracketed):
        raise ConfigError(f"address {text!r} is not host:port; write IPv6 as [::1]:7070")
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) <= 65535):
        raise ConfigError(f"address {text!r} has port {port_text!r}, expected 0..65535")
    return host[1:-1] if bracketed else host, int(port_text)
