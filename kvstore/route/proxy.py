"""The proxy itself: one handler for every request, and a probe of every server.

    body --> tokens --> Locate --> servers in order --> the first that answers --> chunk by chunk to the client

Nothing is buffered but the request. A server that cannot be reached, or fails before its first byte, is left for the
next one; a client that leaves takes its request to the server with it. aiohttp does both sides: it hands chunks on as
they come, cancels the handler of a client that left, and is one library where others take two.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from yarl import URL

from kvstore.route.prompts import PROMPT_PATHS, affinity_of, length_of, read_body
from kvstore.route.upstreams import order_of
from kvstore.stats import RouteStats, UpstreamStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multidict import CIMultiDictProxy

    from kvstore.route.locator import Locator
    from kvstore.route.prompts import Tokenizer
    from kvstore.route.upstreams import Upstream

REQUESTS_MAX = 4096
BODY_BYTES_MAX = 64 * 2**20
PROBE_SECONDS = 2.0
BODY_SECONDS = 120.0  # for a client to send its body: 64 MiB at 5 Mbit/s
TOKENIZE_SECONDS = 0.5
CONNECT_SECONDS = 5.0
IDLE_SECONDS = 2.0  # less than servers keep a connection, so that they close none under a request
_GATEWAY_ERRORS = (502, 503, 504)
# Those of one connection, not of the message (RFC 9110, section 7.6.1), what is counted anew, and what asks whether to
# send a body (section 10.1.1): that was answered here, and a server need not answer it.
_OWN_HEADERS = frozenset(
    ("connection", "content-length", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)
# What aiohttp says of itself where a client said nothing: a server would answer what the client did not ask for.
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Counts:
    prompts: int = 0
    prompt_tokens: int = 0
    located_tokens: int = 0
    without_tokens: int = 0
    decision_seconds: float = 0.0
    running: int = 0
    turns: itertools.count[int] = field(default_factory=itertools.count)


class Proxy:
    """Sends requests on. One event loop; `start` and `close` once each."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        *,
        tokenizer: Callable[[Proxy], Tokenizer],
        locator: Locator | None,
    ) -> None:
        self._upstreams = tuple(upstreams)
        self._tokenizer = tokenizer(self)
        self._locator = locator
        self._metrics: Callable[[], bytes] = bytes
        self._counts = _Counts()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._probe: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, *, metrics: Callable[[], bytes]) -> str:
        """Serve from now on, `metrics` at /metrics; gives the address."""
        self._metrics = metrics
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=REQUESTS_MAX + 2 * len(self._upstreams), keepalive_timeout=IDLE_SECONDS)
        self._session = aiohttp.ClientSession(
            timeout=timeout,
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),  # those of one client are no other's
            skip_auto_headers=_NOT_ADDED,
        )
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/health", self._serve_health)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, auto_decompress=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self._probe = asyncio.create_task(self._keep_probing())
        address = self._runner.addresses[0]
        return f"{address[0]}:{address[1]}"

    async def close(self) -> None:
        """Serve no more."""
        if self._probe is not None:
            self._probe.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probe
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        if self._locator is not None:
            await self._locator.close()

    def stats(self) -> RouteStats:
        """What it did so far."""
        counts = self._counts
        return RouteStats(
            prompts=counts.prompts,
            prompt_tokens=counts.prompt_tokens,
            located_tokens=counts.located_tokens,
            without_tokens=counts.without_tokens,
            locate_failures=0 if self._locator is None else self._locator.failures,
            decision_seconds=counts.decision_seconds,
            upstreams=tuple(
                UpstreamStats(upstream.name, upstream.is_healthy, upstream.waiting_tokens, dict(upstream.outcomes))
                for upstream in self._upstreams
            ),
        )

    async def post(self, path: str, body: dict[str, Any]) -> object:
        """What a server that is well answers; None where none does."""
        healthy = [upstream for upstream in self._upstreams if upstream.is_healthy]
        if not healthy:
            return None
        upstream = healthy[next(self._counts.turns) % len(healthy)]
        try:
            async with self._open.post(upstream.url + path, json=body) as answer:
                return await answer.json() if answer.ok else None
        except (aiohttp.ClientError, ValueError):
            return None

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "it was started"
        return self._session

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self._counts.running >= REQUESTS_MAX:
            return _refusal(503, f"{REQUESTS_MAX} requests are under way; try again later")
        self._counts.running += 1
        try:
            body = await _body_of(request)
            for upstream, cost in await self._order(request.path, body):
                answered = await self._forward(request, body, upstream, cost)
                if answered is not None:
                    return answered
        except _SlowBodyError:
            return _refusal(408, f"the body did not come within {BODY_SECONDS:g} s; send it again")
        finally:
            self._counts.running -= 1
        return _refusal(503, "no server behind this proxy answers; see /metrics for each of them")

    async def _order(self, path: str, raw: bytes) -> list[tuple[Upstream, int]]:
        """The servers to try for a request."""
        if path not in PROMPT_PATHS:
            return order_of(self._upstreams, {}, 0, b"")
        begun_at = time.perf_counter()
        body = read_body(raw)
        tokens = await self._tokens(path, body)
        matches = {}
        if tokens is not None and self._locator is not None:
            matches = await self._locator.locate(tokens, body, self._upstreams)
        length = length_of(tokens, raw)
        order = order_of(self._upstreams, matches, length, affinity_of(tokens, body))
        counts = self._counts
        counts.prompts += 1
        counts.prompt_tokens += length
        counts.without_tokens += tokens is None
        counts.located_tokens += length - order[0][1] if order else 0
        counts.decision_seconds += time.perf_counter() - begun_at
        return order

    async def _tokens(self, path: str, body: dict[str, Any]) -> list[int] | None:
        try:
            async with asyncio.timeout(TOKENIZE_SECONDS):
                return await self._tokenizer.tokens(path, body)
        except TimeoutError:
            return None

    async def _forward(
        self, request: web.Request, body: bytes, upstream: Upstream, cost: int
    ) -> web.StreamResponse | None:
        """Send a request on and its answer back; None where the server failed before the first byte."""
        url = URL(upstream.url + _target(request), encoded=True)
        headers = _end_to_end(request.headers)
        with upstream.busy(cost) as answers:
            try:
                async with self._open.request(
                    request.method, url, headers=headers, data=body or None, allow_redirects=False
                ) as answer:
                    if answer.status in _GATEWAY_ERRORS:
                        upstream.count("failed")
                        return None
                    first = await answer.content.readany()
                    answers()
                    return await self._answer(request, upstream, answer, first)
            except (aiohttp.ClientError, TimeoutError) as err:
                upstream.count("failed")
                if isinstance(err, aiohttp.ClientConnectorError):
                    upstream.is_healthy = False  # until the next probe
                logger.warning("server failed before its first byte: upstream=%s cause=%s", upstream.name, err)
                return None
            except asyncio.CancelledError:
                upstream.count("cancelled")
                raise

    async def _answer(
        self, request: web.Request, upstream: Upstream, answer: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in _end_to_end(answer.headers):
            response.headers.add(name, value)
        if answer.content_length is not None and request.method != "HEAD":
            response.content_length = answer.content_length
        outcome = "answered"
        try:
            await response.prepare(request)
            await response.write(first)
            while chunk := await self._next_chunk(answer):
                await response.write(chunk)
            await response.write_eof()
        except _BrokenAnswerError as err:
            outcome = "broken"
            logger.warning("server failed in its answer: upstream=%s cause=%s", upstream.name, err)
            if request.transport is not None:
                request.transport.abort()  # so that the client does not take it for the end
        except ConnectionResetError:
            outcome = "cancelled"
        upstream.count(outcome)
        return response

    async def _next_chunk(self, answer: aiohttp.ClientResponse) -> bytes:
        try:
            return await answer.content.readany()
        except (aiohttp.ClientError, TimeoutError) as err:
            raise _BrokenAnswerError(str(err)) from err

    async def _serve_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _serve_health(self, _request: web.Request) -> web.Response:
        is_well = any(upstream.is_healthy for upstream in self._upstreams)
        return web.Response(status=200) if is_well else _refusal(503, "no server behind this proxy is well")

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.gather(*(self._look_at(upstream) for upstream in self._upstreams))
            await asyncio.sleep(PROBE_SECONDS)

    async def _look_at(self, upstream: Upstream) -> None:
        was_healthy = upstream.is_healthy
        try:
            async with asyncio.timeout(PROBE_SECONDS), self._open.get(upstream.url + "/health") as answer:
                upstream.is_healthy = answer.status < 500
        except (aiohttp.ClientError, TimeoutError):
            upstream.is_healthy = False
        if was_healthy != upstream.is_healthy:
            logger.info("server is %s: upstream=%s", "well" if upstream.is_healthy else "not well", upstream.name)


class _BrokenAnswerError(Exception):
    """A server failed after its first byte."""


class _SlowBodyError(Exception):
    """A client did not send its body in time."""


async def _body_of(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError as err:
        raise _SlowBodyError from err


def _target(request: web.Request) -> str:
    """Path and query as they came; a client may name the whole URL (RFC 9112, section 3.2.2)."""
    came = request.raw_path
    return came if came.startswith("/") else request.rel_url.raw_path_qs


def _end_to_end(headers: CIMultiDictProxy[str]) -> list[tuple[str, str]]:
    """The headers of the message, without those of the connection, which may name further ones of its own."""
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    own = _OWN_HEADERS | named
    return [(name, value) for name, value in headers.items() if name.lower() not in own]


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "unavailable", "code": status}}, status=status)
