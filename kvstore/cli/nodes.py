"""Commands about the nodes of a cluster."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvstore.cli.output import ExitCode, print_json, print_table, show
from kvstore.cli.progress import ProgressBar
from kvstore.cli.sidecar import connect_sidecar
from kvstore.cluster.peer_address import peer_address
from kvstore.errors import InvalidArgumentError
from kvstore.nodes import DrainOrder, NodeState
from kvstore.quantities import format_size, parse_duration, parse_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvstore.nodes import DrainProgress, Node
    from kvstore.transport.client import Client

_WATCH_SECONDS = 2.0
_STEP_SECONDS = 1.0


def nodes(arguments: argparse.Namespace) -> int:
    """The nodes of the cluster, once or again and again."""
    with connect_sidecar(arguments) as client:
        while True:
            _print_nodes(arguments, *client.nodes())
            if not arguments.watch:
                return ExitCode.DONE
            time.sleep(_WATCH_SECONDS)


def drain(arguments: argparse.Namespace) -> int:
    """Have a node drain and wait for the end of its hand-over, or have it take part again.

    Partly done where some of what was to be handed over was not.
    """
    order = _order(arguments)
    with connect_sidecar(arguments) as asked:
        name, address = _found(asked, arguments.node)
        if address is None:
            return _drain_at(arguments, asked, name, order)
    with connect_sidecar(arguments, address) as client:
        return _drain_at(arguments, client, name, order)


def _drain_at(arguments: argparse.Namespace, client: Client, name: str, order: DrainOrder) -> int:
    if arguments.undo:
        was_draining = client.undrain()
        text = "takes part again" if was_draining else "did not drain"
        show(arguments, {"node": name, "draining": False, "was_draining": was_draining}, f"{name} {text}")
        return ExitCode.DONE
    progress = _wait(client, client.drain(order), order)
    text = (
        f"{name} drains: {progress.taken} of {progress.prefixes} prefixes handed over "
        f"({format_size(progress.taken_bytes)}), {progress.held} more lay elsewhere already, {progress.failures} calls "
        "failed"
    )
    show(arguments, {"node": name, **asdict(progress)}, text)
    is_all = progress.is_done and progress.taken == progress.prefixes
    return ExitCode.DONE if is_all else ExitCode.PARTLY_DONE


def _wait(client: Client, progress: DrainProgress, order: DrainOrder) -> DrainProgress:
    """Until the hand-over has ended; a little longer than it may take."""
    ends_at = time.monotonic() + order.seconds + 10 * _STEP_SECONDS
    with ProgressBar(round(order.seconds)) as bar:
        while not progress.is_done and time.monotonic() < ends_at:
            progress = client.drain(None, wait_seconds=_STEP_SECONDS)
            bar.advance(f"{progress.taken} of {progress.prefixes} prefixes taken")
    return progress


def _found(client: Client, wanted: str | None) -> tuple[str, str | None]:
    """The name of a node, and where it is; no address for the one that is asked."""
    own, known = client.nodes()
    if wanted is None or wanted == own:
        return own, None
    node = next((node for node in known if node.name == wanted), None)
    if node is None or node.state is NodeState.GONE:
        living = ", ".join(node.name for node in known if node.state is not NodeState.GONE)
        raise InvalidArgumentError(f"no living node is called {wanted!r:.200}, expected one of: {living:.1000}")
    address = peer_address(node.addresses)
    if address is None:
        raise InvalidArgumentError(f"node {wanted!r} told no address; ask itself, with --address")
    return node.name, address


def _order(arguments: argparse.Namespace) -> DrainOrder:
    try:
        seconds = parse_duration(arguments.seconds)
        limit_bytes = parse_size(arguments.bytes)
    except ValueError as err:
        raise InvalidArgumentError(f"--seconds {arguments.seconds!r}, --bytes {arguments.bytes!r}: {err}") from err
    targets = tuple(name for name in (arguments.to or "").split(",") if name)
    return DrainOrder(seconds, limit_bytes, targets)


def _print_nodes(arguments: argparse.Namespace, own: str, found: Sequence[Node]) -> None:
    if arguments.json:
        print_json({"node": own, "nodes": [{**asdict(node), "state": node.state.value} for node in found]})
        return
    rows = [
        (
            f"{node.name} (this one)" if node.name == own else node.name,
            node.state.value,
            node.slot,
            ",".join(node.addresses),
            node.version,
            _use(node.host_used_bytes, node.host_bytes),
            _use(node.disk_used_bytes, node.disk_bytes),
            node.leases,
            node.queue,
            f"{node.age_seconds:.1f} s",
        )
        for node in found
    ]
    print_table(("node", "state", "slot", "addresses", "version", "host", "disk", "leases", "queue", "age"), rows)


def _use(used_bytes: int, capacity_bytes: int) -> str:
    return f"{format_size(used_bytes)} of {format_size(capacity_bytes)}" if capacity_bytes else "-"
