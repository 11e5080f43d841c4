"""10,000 connections that say hello and no more cost little; the server answers others and refuses what is over."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path

import pytest

import kvstore
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.conformance import BLOCKS, LAYOUT, PROMPT
from kvstore.testing.patience import wait_until
from kvstore.types import Namespace

NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
IDLE = 10_000
LIMIT = IDLE + 50
OVER = 200
FILES = LIMIT + 1000
CONNECTION_BYTES_MAX = 8 * 1024

RAISE_LIMIT = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""
SERVER_PROGRAM = (
    RAISE_LIMIT
    + f"""
import sys, kvstore
from kvstore.testing.serving import ServedStore
from kvstore.transport.limits import ServiceLimits
limits = ServiceLimits(connections={LIMIT})
with kvstore.open(None, host_bytes=1 << 23) as store, ServedStore(store, [sys.argv[1]], limits=limits) as served:
    print(served.addresses[0], flush=True)
    for _ in sys.stdin:
        print(served.server.connections["wire"], flush=True)
"""
)
# Prints how many connections of how many were welcomed, for each number on its standard input.
IDLE_PROGRAM = (
    RAISE_LIMIT
    + """
import json, socket, sys
from kvstore.transport import wire
held = []
def welcomed():
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(sys.argv[1])
    held.append(connected)
    try:
        connected.sendall(wire.encode_client_hello(wire.Lane.CONTROL))
        answer = connected.recv(wire.SERVER_HELLO_BYTES, socket.MSG_WAITALL)
    except ConnectionError:
        return False
    return len(answer) == wire.SERVER_HELLO_BYTES and wire.decode_server_hello(answer).verdict == wire.Verdict.OK
for line in sys.stdin:
    print(json.dumps(sum(welcomed() for _ in range(int(line)))), flush=True)
"""
)


def ask(process: subprocess.Popen[str], line: object) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return int(json.loads(process.stdout.readline()))


def resident_bytes(process: subprocess.Popen[str]) -> int:
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.kill
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < FILES, reason=f"the hard limit of open files is below {FILES}"
)
def test_ten_thousand_idle_connections_cost_little_and_keep_nobody_from_being_answered(start_process, tmp_path: Path):
    path = f"{tmp_path}/s"
    server = start_process(SERVER_PROGRAM, f"unix://{path}")
    server.stdout.readline()
    with kvstore.connect(f"unix://{path}") as client:
        store_prompt(client, NAMESPACE, PROMPT)
        before = resident_bytes(server)
        idle = start_process(IDLE_PROGRAM, path)
        assert IDLE == ask(idle, IDLE)
        assert resident_bytes(server) - before < IDLE * CONNECTION_BYTES_MAX
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        with kvstore.connect(f"unix://{path}") as another:
            assert BLOCKS == verified_blocks(another, NAMESPACE, PROMPT)
        assert ask(idle, OVER) <= LIMIT - IDLE
        assert BLOCKS == verified_blocks(client, NAMESPACE, PROMPT)
        idle.kill()
        wait_until(lambda: ask(server, "how many?") <= 3)  # for control, for bytes, and an arena
        with kvstore.connect(f"unix://{path}") as another:
            assert BLOCKS == verified_blocks(another, NAMESPACE, PROMPT)
        assert resident_bytes(server) - before < IDLE * CONNECTION_BYTES_MAX
