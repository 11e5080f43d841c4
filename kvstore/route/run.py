"""`kvstore route` as a process: from its options to a proxy that serves until a signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import uvloop

from kvstore import __version__
from kvstore.errors import ConfigError, UnavailableError
from kvstore.metrics import make_route_registry, render
from kvstore.route.locator import Locator
from kvstore.route.prompts import EngineTokenizer, LocalTokenizer, NoTokenizer
from kvstore.route.upstreams import Upstream
from kvstore.transport.aio import connect_async

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.route.prompts import Tokenizer
    from kvstore.route.proxy import Proxy
    from kvstore.transport.credentials import CredentialFiles
    from kvstore.types import Namespace


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """What `kvstore route` was told. Without a namespace no sidecar is asked."""

    host: str
    port: int
    upstreams: tuple[str, ...]
    nodes: tuple[str, ...]
    adapters: tuple[str, ...]
    tokenizer: str
    address: str
    files: CredentialFiles
    namespace: Namespace | None


def run(options: RouteOptions, *, ready: TextIO) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError."""
    upstreams = upstreams_of(options.upstreams, options.nodes)
    try:
        uvloop.run(_serve(options, upstreams, ready))
    except OSError as err:
        raise UnavailableError(f"{options.host}:{options.port} cannot be served on: {err.strerror or err}") from err


def upstreams_of(urls: Sequence[str], nodes: Sequence[str]) -> list[Upstream]:
    """Servers from NAME=URL and NAME=NODE; raises ConfigError."""
    named = pairs_of(nodes, "--node")
    found = {
        name: Upstream(name, url.rstrip("/"), named.pop(name, "")) for name, url in pairs_of(urls, "--upstream").items()
    }
    for upstream in found.values():
        if not upstream.url.startswith(("http://", "https://")):
            raise ConfigError(f"--upstream {upstream.name} is at {upstream.url!r:.80}, expected http://host:port")
    if named:
        raise ConfigError(f"--node names {next(iter(named))!r:.80}, which no --upstream has")
    if not found:
        raise ConfigError("there is no --upstream, expected at least one NAME=URL")
    return list(found.values())


def pairs_of(texts: Sequence[str], flag: str) -> dict[str, str]:
    """Names and values of NAME=VALUE; raises ConfigError."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value) or name in pairs:
            raise ConfigError(f"{flag} is {text!r:.80}, expected NAME=VALUE, each name once")
        pairs[name] = value
    return pairs


async def _serve(options: RouteOptions, upstreams: Sequence[Upstream], ready: TextIO) -> None:
    try:
        from kvstore.route.proxy import Proxy
    except ImportError as err:
        raise ConfigError(
            f"kvstore route needs aiohttp, and {err.name} is not installed: pip install 'prefix-kvstore[route]'"
        ) from err
    proxy = Proxy(upstreams, tokenizer=_tokenizer(options.tokenizer), locator=_locator(options))
    registry = make_route_registry(proxy.stats, __version__)
    try:
        listen = await proxy.start(options.host, options.port, metrics=lambda: render(registry))
        stop_asked = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop_asked.set)
        ready.write(json.dumps({"ready": True, "pid": os.getpid(), "listen": listen}) + "\n")
        ready.flush()
        await stop_asked.wait()
    finally:
        await proxy.close()


def _tokenizer(choice: str) -> Callable[[Proxy], Tokenizer]:
    if choice == "none":
        return lambda _proxy: NoTokenizer()
    if choice == "engine":
        return lambda proxy: EngineTokenizer(proxy.post)
    local = LocalTokenizer(choice)
    return lambda _proxy: local


def _locator(options: RouteOptions) -> Locator | None:
    if options.namespace is None:
        return None
    client = connect_async(options.address, **options.files)
    return Locator(client, options.namespace, pairs_of(options.adapters, "--adapter-digest"))
