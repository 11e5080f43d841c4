"""What the proxy adds to a request: the same requests to one server directly, and through `kvstore route`.

    python bench/bench_route.py --requests 300 --json bench/results/route.json

The server answers at once with one small JSON object, so what is measured is the way there and back. Requests go one
after the other over one connection, directly and through each proxy in turn, so that all rows have the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import aiohttp
from aiohttp import web
from machine import describe

import kvstore
from kvstore.testing.blocks import store_prompt
from kvstore.types import KvLayout, Namespace

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=16)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
FLAGS = ["--model", "model", "--revision", "revision"]
FLAGS += ["--layout", "layers=1,kv_heads=1,head_dim=8,dtype=float16,block_tokens=16"]
PATH = "/v1/completions"


def serve() -> None:
    """The server, until it is killed; its first line is its address."""

    async def run() -> None:
        async def answer(request: web.Request) -> web.Response:
            await request.read()
            return web.json_response({"choices": [{"text": "hello"}]})

        async def well(_request: web.Request) -> web.Response:
            return web.Response()

        app = web.Application(client_max_size=2**26)
        app.router.add_post(PATH, answer)
        app.router.add_get("/health", well)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        sys.stdout.write(json.dumps({"listen": f"127.0.0.1:{runner.addresses[0][1]}"}) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    asyncio.run(run())


def start(stack: ExitStack, *arguments: str) -> str:
    """A process of ours; gives its address."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline())["listen"])


async def measure(addresses: dict[str, str], prompt: list[int], requests: int) -> dict[str, list[float]]:
    """Seconds of each request, by way."""
    seconds: dict[str, list[float]] = {way: [] for way in addresses}
    body = json.dumps({"model": "model", "prompt": prompt}).encode()
    async with aiohttp.ClientSession() as session:
        for number in range(requests + 20):
            for way, address in addresses.items():
                begun_at = time.perf_counter()
                async with session.post(f"http://{address}{PATH}", data=body) as answer:
                    await answer.read()
                    assert answer.status == 200, await answer.text()
                if number >= 20:
                    seconds[way].append(time.perf_counter() - begun_at)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    rows = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        sidecar = f"unix://{folder}/kv.sock"
        server = start(stack, __file__, "--serve")
        start(stack, "-m", "kvstore.cli", "serve", "--listen", sidecar, "--host-bytes", "64MiB")
        common = ["route", "--listen", "127.0.0.1:0", "--upstream", f"a=http://{server}", "--tokenizer", "none"]
        plain = start(stack, "-m", "kvstore.cli", *common)
        located = start(stack, "-m", "kvstore.cli", *common, "--address", sidecar, *FLAGS)
        ways = {"direct": server, "proxy, by the prompt's beginning": plain, "proxy, by Locate": located}
        for tokens in (128, 1024, 8192):
            prompt = list(range(tokens))
            with kvstore.connect(sidecar) as client:
                store_prompt(client, NAMESPACE, prompt)
            seconds = asyncio.run(measure(ways, prompt, arguments.requests))
            direct = statistics.median(seconds["direct"])
            for way, taken in seconds.items():
                p50, p99 = statistics.median(taken), statistics.quantiles(taken, n=100)[98]
                row = {"way": way, "tokens": tokens, "p50_us": p50 * 1e6, "p99_us": p99 * 1e6}
                rows.append(row | {"added_p50_us": (p50 - direct) * 1e6})
                print(f"{tokens:6} {way:34} p50 {p50 * 1e6:8.0f} us, added {(p50 - direct) * 1e6:8.0f} us")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
