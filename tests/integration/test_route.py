"""The proxy before real HTTP servers: where prompts go, what is passed through, what a failure on each side does."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import kvstore
from kvstore.testing.blocks import store_prompt
from kvstore.types import KvLayout, Namespace

aiohttp = pytest.importorskip("aiohttp")

from aiohttp import web  # noqa: E402

from kvstore.route import proxy as proxy_module  # noqa: E402
from kvstore.route.prompts import EngineTokenizer, NoTokenizer  # noqa: E402
from kvstore.route.proxy import Proxy  # noqa: E402
from kvstore.route.upstreams import Upstream  # noqa: E402

pytestmark = pytest.mark.kill

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=16)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
PATH = "/v1/completions"
SECONDS_MAX = 30


class Server:
    """An OpenAI-compatible server of few words. What a prompt's `user` field asks for is what it does."""

    def __init__(self, name):
        self.name = name
        self.seen = []
        self.left = asyncio.Event()
        self.go = asyncio.Event()
        self.health = 200

    async def answer(self, request):
        body = await request.json()
        self.seen.append(body)
        way = body.get("user", "")
        if way == f"{self.name} is busy":
            return web.Response(status=503)
        if way == f"{self.name} breaks":
            request.transport.abort()
            return web.Response()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Server": self.name})
        await response.prepare(request)
        try:
            await response.write(b"data: first\n\n")
            if way == "break midway":
                request.transport.abort()
                return response
            if way == "wait":
                await self.go.wait()
        except (asyncio.CancelledError, ConnectionResetError):
            self.left.set()
            raise
        await response.write(b"data: [DONE]\n\n")
        return response

    async def tokenize(self, request):
        body = await request.json()
        text = body["prompt"] if "prompt" in body else json.dumps(body["messages"])
        return web.json_response({"tokens": list(text.encode())})

    async def say_health(self, _request):
        return web.Response(status=self.health)

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/{path:v1/.*}", self.answer)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/health", self.say_health)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


class World:
    """Servers, a proxy before them, and a client."""

    def __init__(self, servers, proxy, address, session):
        self.servers = servers
        self.proxy = proxy
        self.url = f"http://{address}"
        self.session = session

    async def ask(self, prompt, **fields):
        body = {"model": "model", "prompt": prompt} | fields
        async with self.session.post(self.url + PATH, json=body) as answer:
            return answer.status, answer.headers.get("X-Server"), await answer.read()

    def outcomes(self):
        return {upstream.name: upstream.outcomes for upstream in self.proxy.stats().upstreams}


async def until(holds):
    while not holds():  # noqa: ASYNC110  # of servers and processes, not of this loop
        await asyncio.sleep(0.01)


def in_world(play, count=3, **options):
    async def run():
        async with AsyncExitStack() as stack:
            servers = [Server(name) for name in "abc"[:count]]
            upstreams = [Upstream(server.name, await stack.enter_async_context(server.serving())) for server in servers]
            given = {"tokenizer": lambda _proxy: NoTokenizer(), "locator": None} | options
            proxy = Proxy(upstreams, **given)
            address = await proxy.start("127.0.0.1", 0, metrics=lambda: b"kvstore_route 1\n")
            stack.push_async_callback(proxy.close)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await play(World({server.name: server for server in servers}, proxy, address, session))

    asyncio.run(asyncio.wait_for(run(), SECONDS_MAX))


def test_chunks_come_as_they_are_sent_and_headers_with_them():
    async def play(world):
        body = {"prompt": "hello", "user": "wait"}
        async with world.session.post(world.url + PATH, json=body) as answer:
            assert b"data: first\n\n" == await answer.content.readany()
            server = world.servers[answer.headers["X-Server"]]
            assert ("text/event-stream", [body]) == (answer.headers["Content-Type"], server.seen)
            server.go.set()
            assert b"data: [DONE]\n\n" == await answer.content.read()
        assert [{"answered": 1}] == [found for found in world.outcomes().values() if found]
        assert [0, 0, 0] == [upstream.waiting_tokens for upstream in world.proxy.stats().upstreams]

    in_world(play)


def test_a_client_that_leaves_takes_its_request_to_the_server_with_it():
    async def play(world):
        async with world.session.post(world.url + PATH, json={"prompt": "hello", "user": "wait"}) as answer:
            await answer.content.readany()
            server = world.servers[answer.headers["X-Server"]]
            answer.close()
        await server.left.wait()
        await until(lambda: any("cancelled" in found for found in world.outcomes().values()))
        assert [0, 0, 0] == [upstream.waiting_tokens for upstream in world.proxy.stats().upstreams]

    in_world(play)


@pytest.mark.parametrize("way", ["is busy", "breaks"])
def test_a_server_that_fails_before_its_first_byte_is_left_for_the_next(way):
    async def play(world):
        _, first, _ = await world.ask("hello")
        status, other, text = await world.ask("hello", user=f"{first} {way}")
        assert (200, True, True) == (status, other != first, text.endswith(b"data: [DONE]\n\n"))
        assert {"answered": 1, "failed": 1} == world.outcomes()[first]

    in_world(play)


def test_a_server_that_fails_in_its_answer_is_no_end_of_it():
    async def play(world):
        with pytest.raises(aiohttp.ClientError):
            await world.ask("hello", user="break midway")
        assert [{"broken": 1}] == [found for found in world.outcomes().values() if found]

    in_world(play)


def test_where_all_servers_fail_the_client_is_told(monkeypatch):
    async def play(world):
        status, _, text = await world.ask("hello", user="a is busy")
        assert (503, "no server behind this proxy answers") == (status, json.loads(text)["error"]["message"][:35])

    in_world(play, count=1)


def test_a_server_that_is_not_well_gets_nothing_until_it_is(monkeypatch):
    monkeypatch.setattr(proxy_module, "PROBE_SECONDS", 0.05)

    def healthy(world):
        return {upstream.name for upstream in world.proxy.stats().upstreams if upstream.is_healthy}

    async def play(world):
        _, first, _ = await world.ask("hello")
        world.servers[first].health = 500
        await until(lambda: first not in healthy(world))
        assert first != (await world.ask("hello"))[1]
        world.servers[first].health = 200
        await until(lambda: first in healthy(world))
        assert first == (await world.ask("hello"))[1]

    in_world(play)


def test_without_tokens_prompts_that_begin_alike_go_to_one_server_and_others_are_spread():
    async def play(world):
        head = "You are a librarian. " * 60
        went = {(await world.ask(f"{head}{number}"))[1] for number in range(6)}
        assert 1 == len(went)
        spread = {(await world.ask(f"{number} is another beginning"))[1] for number in range(30)}
        assert {"a", "b", "c"} == spread
        assert 36 == world.proxy.stats().without_tokens

    in_world(play)


def test_the_engine_is_asked_for_tokens_of_texts_and_chats():
    async def play(world):
        await world.ask("hello")
        chat = {"model": "model", "messages": [{"role": "user", "content": "hello"}]}
        async with world.session.post(world.url + "/v1/chat/completions", json=chat) as answer:
            assert 200 == answer.status
        stats = world.proxy.stats()
        assert (2, 0, 5 + len(json.dumps(chat["messages"]))) == (
            stats.prompts,
            stats.without_tokens,
            stats.prompt_tokens,
        )

    in_world(play, tokenizer=lambda proxy: EngineTokenizer(proxy.post))


def test_what_is_no_json_goes_to_a_server_that_says_so():
    async def play(world):
        async with world.session.post(world.url + PATH, data=b"\xff{") as answer:
            assert 500 == answer.status
        async with world.session.get(world.url + "/metrics") as answer:
            assert b"kvstore_route 1\n" == await answer.read()
        async with world.session.get(world.url + "/health") as answer:
            assert 200 == answer.status

    in_world(play)


def start(stack, *arguments):
    process = subprocess.Popen([sys.executable, *map(str, arguments)], stdin=-1, stdout=-1, text=True)

    async def end():
        process.terminate()
        process.communicate(timeout=SECONDS_MAX)

    stack.push_async_callback(end)
    return process, json.loads(process.stdout.readline())


def test_a_prompt_goes_to_the_engine_that_holds_it_by_a_real_sidecar(tmp_path):
    pytest.importorskip("zmq")
    tokens = list(range(200))
    live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    address = f"unix://{tmp_path}/kv.sock"
    given = {"endpoint": live, "replay_endpoint": replay, "model": "model"}

    async def play():
        async with AsyncExitStack() as stack:
            servers = [Server(name) for name in "abc"]
            urls = [await stack.enter_async_context(server.serving()) for server in servers]
            engine, _ = start(stack, Path(__file__).with_name("engine_publisher_process.py"), live, replay)
            settings = [f"--set=engine_events.c.{name}={value}" for name, value in given.items()]
            start(stack, "-m", "kvstore.cli", "serve", "--listen", address, "--host-bytes", "1MiB", *settings)
            options = [f"--upstream={name}={url}" for name, url in zip("abc", urls, strict=True)]
            options += ["--model", "model", "--revision", "revision", "--tokenizer", "none", "--address", address]
            options += ["--layout", "layers=1,kv_heads=1,head_dim=8,dtype=float16,block_tokens=16"]
            _, ready = start(stack, "-m", "kvstore.cli", "route", "--listen", "127.0.0.1:0", *options)
            event = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "block_size": 64}
            engine.stdin.write(json.dumps([event | {"token_ids": tokens[:128], "medium": "GPU"}]) + "\n")
            engine.stdin.flush()
            with kvstore.connect(address) as client:
                store_prompt(client, NAMESPACE, tokens[:32])
                await until(lambda: client.locate(NAMESPACE, tokens)[0].device_tokens)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            went = []
            for last in range(6):
                async with session.post(f"http://{ready['listen']}{PATH}", json={"prompt": [*tokens, last]}) as answer:
                    went.append(answer.headers["X-Server"])
            assert ["c"] * 6 == went
            async with session.get(f"http://{ready['listen']}/metrics") as answer:
                assert f"kvstore_route_located_tokens_total {6 * 128}.0" in await answer.text()

    asyncio.run(asyncio.wait_for(play(), 2 * SECONDS_MAX))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "there is no --upstream"),
        (["--upstream", "a"], "--upstream is 'a', expected NAME=VALUE"),
        (["--upstream", "a=ftp://x"], "expected http://host:port"),
        (["--upstream", "a=http://x", "--node", "b=n"], "--node names 'b'"),
        (["--upstream", "a=http://x", "--listen", "8000"], "expected HOST:PORT"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, sentence, capsys):
    from kvstore.cli import main

    assert 1 == main(["route", *options])
    assert sentence in capsys.readouterr().err
