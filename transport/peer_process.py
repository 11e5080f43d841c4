"""The process at the other end of a Unix socket, and when it has ended."""

from __future__ import annotations

import os
import select
import socket
import struct

# From Linux 6.5 on; see unix(7). The number is of asm-generic/socket.h, which all of our machines use.
_SO_PEERPIDFD = 77
_PEERCRED = struct.Struct("3i")  # pid, uid, gid


class PeerProcess:
    """Whoever has connected a Unix socket, by a descriptor that never means another process.

    Raises OSError where the system cannot tell: the process has ended already, or lives where its number is not known.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._fd = _open(connected)

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._fd

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended: nothing of it can read, write or map any more."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Give the descriptor back; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open(connected: socket.socket) -> int:
    try:
        raw = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        (fd,) = struct.unpack("i", raw)
        os.set_inheritable(fd, False)
    except OSError:
        return _open_by_number(connected)
    return int(fd)


def _open_by_number(connected: socket.socket) -> int:
    """For older kernels. The number may be another process's by now, unless the connection is still there afterwards.

    (A child that has inherited the socket can keep it open for a parent that is gone; then a process that got the
    number within that time is waited for instead, and memory comes back later.)
    """
    pid, _, _ = _PEERCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    if pid <= 0:
        raise OSError("the process has no number here, it lives in a namespace of its own")
    fd = os.pidfd_open(pid)
    try:
        if connected.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
            raise ConnectionResetError("the process has ended the connection")
    except BlockingIOError:
        return fd
    except OSError:
        os.close(fd)
        raise
    return fd
