"""What a node shows over HTTP: its metrics, and whether it lives and is ready, for whoever watches or restarts it.

These pages have threads of their own and answer whatever the rest of the process does. They are on loopback only, as
they have no access control.

    /          for people: hit rate, tiers, latency, what more memory would bring (kvstore.page)
    /metrics   for Prometheus
    /livez     200 while the node works, else 503: restart it
    /readyz    200 while it takes calls, else 503: send it none
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeAlias

    from prometheus_client import CollectorRegistry

    WsgiApplication: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
# A request of a few lines that takes longer comes from nobody who means it; each has a thread.
_REQUEST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """Whether a node lives and is ready: two questions put to whoever knows. An answer is a complaint, or None."""

    trouble: Callable[[], str | None]
    unready: Callable[[], str | None]

    def of(self, path: str) -> str | None:
        """What is wrong by a page; None: nothing."""
        return self.trouble() or (self.unready() if path == "/readyz" else None)


class NodePages:
    """The pages of a node on a loopback address, until close()."""

    def __init__(
        self,
        registry: CollectorRegistry,
        health: NodeHealth,
        address: str,
        shown: Mapping[str, WsgiApplication] | None = None,
    ) -> None:
        """`shown` are further pages, by path; none without.

        Raises ConfigError for an address that is none, is not on loopback, or is taken.
        """
        host, port = _host_and_port(address)
        try:
            self._server = make_server(
                host,
                port,
                _pages(registry, health, shown or {}),
                server_class=_server_class(host),
                handler_class=_QuietHandler,
            )
        except OSError as err:
            raise ConfigError(
                f"server.metrics_address is {address!r}: cannot listen there: {err.strerror}; choose another port "
                "(--metrics HOST:PORT)"
            ) from err
        self.address = f"{_bracketed(host)}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvstore-pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _QuietHandler(WSGIRequestHandler):
    """Logs no requests."""

    timeout = _REQUEST_SECONDS

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is its base's
        """Nothing: a scrape is no event."""


def _pages(registry: CollectorRegistry, health: NodeHealth, shown: Mapping[str, WsgiApplication]) -> WsgiApplication:
    metrics: WsgiApplication = make_wsgi_app(registry)

    def page(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path not in ("/livez", "/readyz", *shown):
            return metrics(environ, start_response)
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _refuse(start_response)
        answer = shown[path](environ, start_response) if path in shown else _answer(start_response, health.of(path))
        return _without_body(answer) if environ["REQUEST_METHOD"] == "HEAD" else answer

    return page


def _without_body(answer: Iterable[bytes]) -> Iterable[bytes]:
    """Of an answer its headers alone; a stream ends before it begins."""
    close = getattr(answer, "close", None)
    if close is not None:
        close()
    return iter((b"",))


def _refuse(start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("405 Method Not Allowed", [("Content-Type", "text/plain; charset=utf-8"), ("Allow", "GET, HEAD")])
    return [b"expected GET or HEAD\n"]


def _answer(start_response: Callable[..., Any], complaint: str | None) -> Iterable[bytes]:
    status = "200 OK" if complaint is None else "503 Service Unavailable"
    body = ((complaint or "ok") + "\n").encode()
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
    start_response(status, [*headers, ("Cache-Control", "no-store")])
    return [body]


def _server_class(host: str) -> type[WSGIServer]:
    """A server of the family of addresses that the host is of."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return type("_PageServer", (ThreadingWSGIServer,), {"address_family": family, "daemon_threads": True})


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"server.metrics_address is {address!r}, expected HOST:PORT, such as 127.0.0.1:9464")
    if host not in _LOOPBACK_HOSTS:
        raise ConfigError(
            f"server.metrics_address is {address!r}, expected a host of {', '.join(_LOOPBACK_HOSTS)}: the page has "
            "no access control; put a scraper or a proxy on this host"
        )
    return host, int(port)
