"""What the proxy hands on is what came: byte for byte, nothing added, nothing of one client to another."""

from __future__ import annotations

import asyncio
import contextlib
import gzip

import pytest

pytest.importorskip("aiohttp")

from kvstore.route import proxy as proxy_module
from kvstore.route.prompts import NoTokenizer
from kvstore.route.proxy import Proxy
from kvstore.route.upstreams import Upstream

PATH = b"/v1/completions"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nSet-Cookie: sid=of-one-client; Path=/\r\n\r\nok"
SECONDS_MAX = 30


class PlainServer:
    """Answers every request in the same way, and keeps what it was sent; it knows no `Expect`."""

    def __init__(self):
        self.heads = []
        self.bodies = []

    async def serve(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)
                if not head.startswith(b"GET /health"):
                    self.heads.append(head)
                    self.bodies.append(body)
                writer.write(ANSWER)
        writer.close()


async def ask(address, body, *headers, path=PATH):
    """What a client gets that says this and nothing else; everything until the proxy ends the connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: proxy", b"Content-Length: %d" % len(body), *headers]
    if not any(header.startswith(b"Connection") for header in headers):
        lines.append(b"Connection: close")
    writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
    try:
        return await reader.read()
    finally:
        writer.close()


def before_a_server(play):
    async def run():
        server = PlainServer()
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        # By name: cookies of addresses are not kept anyway.
        proxy = Proxy([Upstream("a", f"http://localhost:{port}")], tokenizer=lambda _: NoTokenizer(), locator=None)
        address = await proxy.start("127.0.0.1", 0, metrics=bytes)
        try:
            await play(address, server)
        finally:
            await proxy.close()
            listener.close()

    asyncio.run(asyncio.wait_for(run(), SECONDS_MAX))


def names(head):
    return sorted(line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:] if line)


def test_a_cookie_for_one_client_is_sent_with_no_request_of_another():
    async def play(address, server):
        for _ in range(2):
            assert b"of-one-client" in await ask(address, b"{}")
        assert [False, False] == [b"cookie" in names(head) for head in server.heads]

    before_a_server(play)


def test_a_server_is_asked_for_nothing_that_the_client_did_not_ask_for():
    async def play(address, server):
        await ask(address, b"{}")
        assert [b"content-length", b"host"] == names(server.heads[0])

    before_a_server(play)


def test_a_client_that_asks_whether_to_send_its_body_gets_an_answer():
    async def play(address, server):
        assert (await ask(address, b"{}", b"Expect: 100-continue")).endswith(b"\r\n\r\nok")
        assert [b"{}"] == server.bodies

    before_a_server(play)


@pytest.mark.parametrize("body", [gzip.compress(b'{"prompt": [1, 2]}'), b"not packed at all"])
def test_a_packed_body_stays_as_its_header_says_it_is(body):
    async def play(address, server):
        assert (await ask(address, body, b"Content-Encoding: gzip")).endswith(b"\r\n\r\nok")
        assert ([body], True) == (server.bodies, b"content-encoding" in names(server.heads[0]))

    before_a_server(play)


@pytest.mark.parametrize(
    ("asked", "handed_on"),
    [
        (b"/a%2Fb/../c//d?x=%2B&y=a+b", b"/a%2Fb/../c//d?x=%2B&y=a+b"),
        (b"http://other.example/v1/models?x=%2B", b"/v1/models?x=%2B"),
    ],
)
def test_a_path_is_handed_on_as_it_came_and_never_leads_elsewhere(asked, handed_on):
    async def play(address, server):
        assert (await ask(address, b"{}", path=asked)).endswith(b"\r\n\r\nok")
        assert [b"POST " + handed_on + b" HTTP/1.1"] == [head.split(b"\r\n")[0] for head in server.heads]

    before_a_server(play)


def test_headers_that_a_connection_names_as_its_own_end_with_it():
    async def play(address, server):
        await ask(address, b"{}", b"Connection: close, X-Hop", b"X-Hop: 1", b"X-End: 1")
        assert [b"content-length", b"host", b"x-end"] == names(server.heads[0])

    before_a_server(play)


def test_a_body_that_does_not_come_is_refused_and_holds_no_place(monkeypatch):
    monkeypatch.setattr(proxy_module, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(proxy_module, "REQUESTS_MAX", 1)

    async def play(address, server):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST " + PATH + b" HTTP/1.1\r\nHost: proxy\r\nContent-Length: 5\r\n\r\n{")
        assert b"HTTP/1.1 408 Request Timeout" == (await reader.readuntil(b"\r\n")).rstrip()
        writer.close()
        assert (await ask(address, b"{}")).endswith(b"\r\n\r\nok")
        assert [b"{}"] == server.bodies

    before_a_server(play)
