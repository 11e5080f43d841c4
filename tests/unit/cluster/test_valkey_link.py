"""How servers are called that do not answer: once, whatever the library would do by itself."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Self

import pytest

from kvstore.clock import SystemClock
from kvstore.cluster.valkey_address import parse_valkey_address
from kvstore.cluster.valkey_link import LinkOptions, ValkeyLink
from kvstore.errors import DirectoryUnavailableError

if TYPE_CHECKING:
    from types import TracebackType

pytest.importorskip("redis")


class SilentServer:
    """Hangs up on whoever calls, and counts them."""

    def __init__(self) -> None:
        self.calls = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._hang_up)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _hang_up(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                return
            self.calls += 1
            connected.close()


@pytest.mark.parametrize("url", ["valkey://127.0.0.1:{}", "valkey+sentinel://127.0.0.1:{}/service"])
def test_a_server_that_hangs_up_is_called_once(url: str) -> None:
    with SilentServer() as server:
        address = parse_valkey_address(url.format(server.port))
        link = ValkeyLink(address, LinkOptions(timeout_seconds=5.0, retry_seconds=60.0), SystemClock())
        with closing(link):
            for _ in range(3):
                with pytest.raises(DirectoryUnavailableError):
                    link.run(("PING",))
    assert 1 == server.calls
