"""Binding addresses so that a taken one is noticed and a Unix socket is never open to others, not even for a moment."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kvstore.errors import ConfigError
from kvstore.transport.address import SOCKET_PATH_BYTES_MAX, TcpAddress, UnixAddress
from kvstore.transport.left_over import sweep_beside

_PROBE_SECONDS = 1.0
_BACKLOG = 1024
_UNIX_TARGET = "unix:"
_FOLDER_PREFIX = ".kv"
_SOCKET_NAME = "s"
PRIVATE_MODE = 0o600
_FOR_ALL = 0o007


class PortServer(Protocol):
    """What is needed of a gRPC server, or of anything else that listens."""

    def add_insecure_port(self, address: str) -> int:
        """Bind host:port or unix:PATH; returns the port, or raises RuntimeError."""
        ...


@dataclass(frozen=True, slots=True)
class ListenRules:
    """What may be listened on: whether there is a certificate, whether callers are known by name, modes of sockets."""

    tls: bool = False
    closed: bool = False
    unix_mode: int = PRIVATE_MODE
    unix_group: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Door:
    """A listening socket, whether TLS comes first on it, and whether it is for gRPC alone."""

    socket: socket.socket
    tls: bool
    grpc_only: bool


class SocketServer:
    """Plain listening sockets, bound as gRPC binds its own; `sockets` belong to whoever accepts on them."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []

    def doors(self, address: UnixAddress | TcpAddress, first: int) -> list[Door]:
        """The sockets from number `first` on, as those of an address."""
        tls = isinstance(address, TcpAddress) and address.tls
        return [Door(listening, tls, address.grpc_only) for listening in self.sockets[first:]]

    def add_insecure_port(self, address: str) -> int:
        """Bind and listen; a name that stands for several addresses is bound on all that this machine has."""
        if address.startswith(_UNIX_TARGET):
            self._listen(socket.AF_UNIX, address.removeprefix(_UNIX_TARGET))
            return 1
        host, _, port_text = address.rpartition(":")
        port = int(port_text)
        resolved = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, endpoint in resolved:
            try:
                port = self._listen(family, (endpoint[0], port))
            except OSError as err:
                if err.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or endpoint == resolved[-1][-1]:
                    raise RuntimeError(str(err)) from err
        return port

    def close(self) -> None:
        """Close all sockets; idempotent."""
        for listener in self.sockets:
            listener.close()
        self.sockets.clear()

    def _listen(self, family: int, endpoint: str | tuple[str | int, int]) -> int:
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if family != socket.AF_UNIX:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(endpoint)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self.sockets.append(listener)
        return 1 if family == socket.AF_UNIX else int(listener.getsockname()[1])


@dataclass(frozen=True, slots=True)
class BoundAddress:
    """An address that is served; `inode` tells a socket file of ours from one that replaced it."""

    address: UnixAddress | TcpAddress
    inode: int | None = None

    def remove(self) -> None:
        """Take our socket file away, if it is still ours."""
        if isinstance(self.address, UnixAddress):
            with suppress(FileNotFoundError):
                if os.lstat(self.address.path).st_ino == self.inode:
                    os.unlink(self.address.path)


def bind(
    server: PortServer,
    address: UnixAddress | TcpAddress,
    rules: ListenRules = ListenRules(),  # frozen
) -> BoundAddress:
    """Bind an address, port 0 to a free one. Raises ConfigError, one line, if that is not possible or not safe."""
    if isinstance(address, UnixAddress):
        return _bind_unix(server, address, rules)
    return _bind_tcp(server, address, rules)


def is_for_grpc_itself(address: UnixAddress | TcpAddress, rules: ListenRules) -> bool:
    """Whether gRPC may listen there without us in front: where all that it has to know of callers is known anyway."""
    if isinstance(address, UnixAddress):
        return address.grpc_only and rules.unix_mode == PRIVATE_MODE
    return address.grpc_only and not address.tls


def _bind_tcp(server: PortServer, address: TcpAddress, rules: ListenRules) -> BoundAddress:
    if address.tls and not rules.tls:
        raise ConfigError(
            f"cannot listen on {address}: TLS has no certificate; set tls.cert and tls.key (`kvstore certs DIR` makes "
            "some to begin with)"
        )
    if not address.is_loopback:
        _require_safe(address, rules)
    try:
        port = server.add_insecure_port(address.host_and_port)
    except RuntimeError as err:
        raise ConfigError(f"cannot listen on {address}: the port is taken; stop who has it or choose another") from err
    return BoundAddress(replace(address, port=port))


def _require_safe(address: TcpAddress, rules: ListenRules) -> None:
    """Other machines can reach the address: bytes must be encrypted, and callers known."""
    secure = str(replace(address, tls=True))
    if not address.tls:
        raise ConfigError(
            f"refusing to listen on {address}: others could read and change what is sent; listen on {secure} with "
            "tls.cert, tls.key and auth.file set (`kvstore certs DIR` and `kvstore token new` make them), or on "
            "loopback or a Unix socket"
        )
    if not rules.closed:
        raise ConfigError(
            f"refusing to listen on {secure}: anybody could come in; set auth.file (`kvstore token new` makes an "
            "entry) or auth.jwt.issuer, or listen on loopback or a Unix socket"
        )


def _bind_unix(server: PortServer, address: UnixAddress, rules: ListenRules) -> BoundAddress:
    if rules.unix_mode & _FOR_ALL and not rules.closed:
        raise ConfigError(
            f"refusing to listen on {address} with mode {rules.unix_mode:04o}: anybody on this machine could come in; "
            "set auth.file, or let a group in (server.unix_group, server.unix_mode=0660)"
        )
    path = Path(address.path)
    _refuse_unless_free(path)
    try:
        private = tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, dir=path.parent)
    except OSError as err:
        raise ConfigError(f"cannot listen on {address}: {path.parent}: {err.strerror}") from err
    # Bound where nobody else may look, then moved: the socket has its final mode before it can be reached.
    with private as directory:
        sweep_beside(Path(directory), _FOLDER_PREFIX, _SOCKET_NAME)
        inner = Path(directory, _SOCKET_NAME)
        if len(os.fsencode(inner)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(f"cannot listen on {address}: its directory has too long a name for a socket")
        try:
            server.add_insecure_port(f"unix:{inner}")
            if rules.unix_group is not None:
                os.chown(inner, -1, rules.unix_group)
            inner.chmod(rules.unix_mode)
            inode = inner.lstat().st_ino
            inner.rename(path)
        except (RuntimeError, OSError) as err:
            raise ConfigError(f"cannot listen on {address}: {err}") from err
    return BoundAddress(address, inode)


def _refuse_unless_free(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as err:
        raise ConfigError(f"cannot listen on unix://{path}: {err.strerror}") from err
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen on unix://{path}: a file is there that is no socket; choose another path")
    if _answers(path):
        raise ConfigError(f"cannot listen on unix://{path}: a server answers there; stop it or choose another path")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            # Busy, stopped, or not ours to ask: somebody has it.
            return True
        return True
