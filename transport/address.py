"""Addresses as users write them, shared by client and server.

unix:///run/kvstore.sock    a Unix socket, by absolute path
127.0.0.1:7070              TCP; [::1]:7070 is IPv6, port 0 lets a server choose

Both carry the fast lane and gRPC. grpc+unix:///path and grpc://host:port ask for gRPC alone: a client does not try the
fast lane then, and a server does not offer it.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import PurePosixPath

from kvstore.errors import ConfigError

SOCKET_PATH_BYTES_MAX = 107
_UNIX_SCHEMES = {"unix://": False, "grpc+unix://": True}
_TCP_SCHEME = "grpc://"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket."""

    path: str
    grpc_only: bool = False

    def __str__(self) -> str:
        return f"{'grpc+' if self.grpc_only else ''}unix://{self.path}"

    @property
    def target(self) -> str:
        """How gRPC names it."""
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP host and port; `host` has no brackets."""

    host: str
    port: int
    grpc_only: bool = False

    def __str__(self) -> str:
        return f"{_TCP_SCHEME if self.grpc_only else ''}{self.host_and_port}"

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


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """Read an address; raises ConfigError that says what was expected."""
    for scheme, grpc_only in _UNIX_SCHEMES.items():
        if text.startswith(scheme):
            return UnixAddress(_socket_path(text, text.removeprefix(scheme)), grpc_only)
    rest = text.removeprefix(_TCP_SCHEME)
    if "://" in rest:
        raise ConfigError(
            f"address {text!r} has an unknown scheme, expected unix:///path, grpc://host:port or host:port"
        )
    return _tcp_address(text, rest)


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


def _tcp_address(text: str, rest: str) -> TcpAddress:
    host, separator, port_text = rest.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not separator or not host or "/" in host or (":" in host and not bracketed):
        raise ConfigError(f"address {text!r} is not host:port; write IPv6 as [::1]:7070")
    if not (port_text.isascii() and port_text.isdigit() and int(port_text) <= 65535):
        raise ConfigError(f"address {text!r} has port {port_text!r}, expected 0..65535")
    return TcpAddress(host[1:-1] if bracketed else host, int(port_text), text.startswith(_TCP_SCHEME))
