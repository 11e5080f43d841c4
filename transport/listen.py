"""Binding addresses so that a taken one is noticed and a Unix socket is never open to others, not even for a moment."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvstore.errors import ConfigError
from kvstore.transport.address import SOCKET_PATH_BYTES_MAX, TcpAddress, UnixAddress

_PROBE_SECONDS = 1.0


class PortServer(Protocol):
    """What is needed of a gRPC server."""

    def add_insecure_port(self, address: str) -> int:
        """Bind; returns the port, or raises RuntimeError."""
        ...


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


def bind(server: PortServer, address: UnixAddress | TcpAddress) -> BoundAddress:
    """Bind an address, port 0 to a free one. Raises ConfigError, one line, if that is not possible or not safe."""
    return _bind_unix(server, address) if isinstance(address, UnixAddress) else _bind_tcp(server, address)


def _bind_tcp(server: PortServer, address: TcpAddress) -> BoundAddress:
    if not address.is_loopback:
        raise ConfigError(
            f"refusing to listen on {address}: TLS is not there yet; use a Unix socket or a loopback address"
        )
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError as err:
        raise ConfigError(f"cannot listen on {address}: the port is taken; stop who has it or choose another") from err
    return BoundAddress(TcpAddress(address.host, port))


def _bind_unix(server: PortServer, address: UnixAddress) -> BoundAddress:
    path = Path(address.path)
    _refuse_unless_free(path)
    try:
        private = tempfile.TemporaryDirectory(prefix=".kv", dir=path.parent)
    except OSError as err:
        raise ConfigError(f"cannot listen on {address}: {path.parent}: {err.strerror}") from err
    # Bound where nobody else may look, then moved: the socket has its final mode before it can be reached.
    with private as directory:
        inner = Path(directory, "s")
        if len(os.fsencode(inner)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(f"cannot listen on {address}: its directory has too long a name for a socket")
        try:
            server.add_insecure_port(f"unix:{inner}")
            inner.chmod(0o600)
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
