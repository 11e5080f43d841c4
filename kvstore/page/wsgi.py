"""The page over HTTP: itself, its style and script, and a stream of its sections as they change.

    /          the page, whole without a script
    /page.css  /page.js
    /stream    server-sent events: one "sections" event with what changed, as JSON from section ids to HTML

(https://html.spec.whatwg.org/multipage/server-sent-events.html). Nothing is loaded from anywhere else, and a policy in
the answer forbids it. A browser that was led here by a foreign name (DNS rebinding) is refused by its Host header.
"""

from __future__ import annotations

import json
import re
import threading
from html import escape
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from kvstore.page.history import READING_SECONDS, History
from kvstore.page.sections import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvstore.page.sources import PageSources

STREAMS_MAX = 16  # each has a thread
PATHS = ("/", "/page.css", "/page.js", "/stream")
_HOSTS = ("127.0.0.1", "[::1]", "localhost")
_POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_MARK = re.compile("@([a-z-]+)@")
_HEADERS = [
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
]


class NodePage:
    """A WSGI application for PATHS, with a thread that reads the counters, until close()."""

    def __init__(self, sources: PageSources, *, reading_seconds: float = READING_SECONDS) -> None:
        self._sources = sources
        self._history = History(sources)
        self._reading_seconds = reading_seconds
        self._changed = threading.Condition()
        self._sections: dict[str, str] = {}  # guarded by _changed, as all below
        self._turn = 0
        self._streams = 0
        self._closed = threading.Event()
        self._read()
        self._thread = threading.Thread(target=self._read_on, name="kvstore-page", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread and all streams; idempotent."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request for one of PATHS."""
        host = environ.get("HTTP_HOST", "localhost").lower()
        if host.rpartition(":")[0] not in _HOSTS and host not in _HOSTS:
            return _answer(start_response, HTTPStatus.FORBIDDEN, "text/plain", f"not for {host}\n".encode())
        path = environ["PATH_INFO"]
        if path == "/stream":
            return self._stream(start_response)
        if path == "/":
            return _answer(start_response, HTTPStatus.OK, "text/html", self._page().encode())
        kind = "text/css" if path.endswith(".css") else "text/javascript"
        return _answer(start_response, HTTPStatus.OK, kind, _static(path.removeprefix("/")).encode())

    def _read_on(self) -> None:
        while not self._closed.wait(self._reading_seconds):
            self._read()

    def _read(self) -> None:
        self._history.read()
        with self._changed:
            wanted = self._streams > 0
        sections = render(self._sources, self._history) if wanted else {}
        with self._changed:
            self._sections = sections
            self._turn += 1
            self._changed.notify_all()

    def _page(self) -> str:
        named = render(self._sources, self._history)
        named |= {"node": escape(self._sources.node_name), "version": escape(self._sources.version)}
        return _MARK.sub(lambda mark: named[mark[1]], _static("page.html"))

    def _stream(self, start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._changed:
            if self._streams == STREAMS_MAX:
                message = f"{STREAMS_MAX} browsers look already; reload the page later\n"
                return _answer(start_response, HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", message.encode())
            self._streams += 1
        start_response("200 OK", [("Content-Type", "text/event-stream"), *_HEADERS])
        return _Stream(self._events(), self._end_stream)

    def _end_stream(self) -> None:
        with self._changed:
            self._streams -= 1

    def _events(self) -> Iterator[bytes]:
        """What changed, turn by turn."""
        shown = render(self._sources, self._history)
        yield _event(shown)
        while not self._closed.is_set():
            sections = self._next_sections()
            yield _event({name: html for name, html in sections.items() if shown[name] != html})
            shown |= sections

    def _next_sections(self) -> dict[str, str]:
        """What the next reading shows; empty when the page is closed."""
        with self._changed:
            turn = self._turn
            self._changed.wait_for(lambda: self._turn != turn or self._closed.is_set())
            return self._sections


class _Stream:
    """The bytes of a stream, and who is told when its browser is gone."""

    def __init__(self, events: Iterator[bytes], end: Callable[[], None]) -> None:
        self._events = events
        self._end = end

    def __iter__(self) -> Iterator[bytes]:
        return self._events

    def close(self) -> None:
        """Called by the server once, however the answer ended."""
        self._end()


def _event(sections: dict[str, str]) -> bytes:
    return f"event: sections\ndata: {json.dumps(sections)}\n\n".encode()


def _static(name: str) -> str:
    return (files("kvstore.page") / "static" / name).read_text(encoding="utf-8")


def _answer(start_response: Callable[..., Any], status: HTTPStatus, kind: str, body: bytes) -> Iterable[bytes]:
    headers = [("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body))), *_HEADERS]
    start_response(f"{status.value} {status.phrase}", headers)
    return [body]
