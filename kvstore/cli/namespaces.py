"""Commands about whole namespaces."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvstore.cli.output import ExitCode, print_json, print_table, show
from kvstore.cli.prompt import namespace_of
from kvstore.cli.sidecar import connect_sidecar
from kvstore.errors import InvalidArgumentError
from kvstore.hashing import KEY_BYTES
from kvstore.nodes import NodeState
from kvstore.quantities import format_size, parse_duration

if TYPE_CHECKING:
    import argparse

    from kvstore.stats import NamespaceStats
    from kvstore.transport.client import Client

_LOOK_SECONDS = 0.5


def list_namespaces(arguments: argparse.Namespace) -> int:
    """The namespaces of the node that is asked."""
    with connect_sidecar(arguments) as client:
        found = client.namespaces()
    if arguments.json:
        print_json([asdict(stats) for stats in found])
    else:
        rows = [
            (
                stats.ns_id.hex(),
                stats.tenant or "?",
                stats.model or "?",
                stats.revision or "?",
                format_size(stats.host_blocks * stats.block_bytes),
                format_size(stats.disk_blocks * stats.block_bytes),
                stats.pins,
            )
            for stats in found
        ]
        print_table(("namespace", "tenant", "model", "revision", "host", "disk", "pins"), rows)
    return ExitCode.DONE


def show_namespace(arguments: argparse.Namespace) -> int:
    """One of them; failed where the node has none of that id."""
    with connect_sidecar(arguments) as client:
        ns_id = _chosen(arguments, client)
        stats = next((stats for stats in client.namespaces() if stats.ns_id == ns_id), None)
    if stats is None:
        show(arguments, None, f"{ns_id.hex()}: nothing is here")
        return ExitCode.FAILED
    show(arguments, asdict(stats), "\n".join(f"{name}: {value}" for name, value in _fields(stats).items()))
    return ExitCode.DONE


def delete_namespace(arguments: argparse.Namespace) -> int:
    """Delete one everywhere; partly done where a living node has not applied it in time, or the directory is down."""
    seconds = _seconds(arguments.seconds)
    with connect_sidecar(arguments) as client:
        ns_id = _chosen(arguments, client)
        done = client.delete_namespace(ns_id)
        behind = _behind(client, done.epoch, seconds) if done.is_told else ()
    row = {"namespace": ns_id.hex(), "epoch": done.epoch, "blocks": done.blocks, "told": done.is_told, "behind": behind}
    text = f"{ns_id.hex()}: {done.blocks} blocks dropped here"
    if not done.is_told:
        text += "; the directory does not answer, other nodes will be told when it does"
    elif behind:
        text += f"; not yet dropped by {', '.join(behind)}"
    else:
        text += ", and all that living nodes had"
    show(arguments, row, text)
    return ExitCode.DONE if done.is_told and not behind else ExitCode.PARTLY_DONE


def _behind(client: Client, epoch: int, seconds: float) -> tuple[str, ...]:
    """The living nodes that have not applied a deletion after so long."""
    ends_at = time.monotonic() + seconds
    while True:
        own, known = client.nodes()
        living = [node for node in known if node.state is not NodeState.GONE and node.name != own]
        behind = tuple(node.name for node in living if node.deletions < epoch)
        if not behind or time.monotonic() >= ends_at:
            return behind
        time.sleep(_LOOK_SECONDS)


def _chosen(arguments: argparse.Namespace, client: Client) -> bytes:
    """The public id that was given, or that of the namespace which the flags describe and prove."""
    if arguments.id is None:
        return client.namespace_id(namespace_of(arguments))
    try:
        ns_id = bytes.fromhex(arguments.id)
    except ValueError:
        ns_id = b""
    if len(ns_id) != KEY_BYTES:
        raise InvalidArgumentError(
            f"{arguments.id!r:.80} is no id of a namespace, expected {2 * KEY_BYTES} hexadecimal digits as "
            "`kvstore namespace list` prints them"
        )
    return ns_id


def _fields(stats: NamespaceStats) -> dict[str, object]:
    return {**asdict(stats), "ns_id": stats.ns_id.hex()}


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as err:
        raise InvalidArgumentError(f"--seconds {text!r}: {err}") from err
