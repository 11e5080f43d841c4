"""Commands that ask a running sidecar."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvstore.api import SCRUB_BYTES
from kvstore.cli.output import ExitCode, print_json, print_table, show
from kvstore.cli.progress import ProgressBar
from kvstore.cli.prompt import namespace_of, prompt_of, root_of
from kvstore.cli.sidecar import connect_sidecar, sidecar_address
from kvstore.errors import DirectoryUnavailableError, InvalidArgumentError
from kvstore.nodes import NodeState
from kvstore.quantities import format_size, parse_duration, parse_size
from kvstore.types import ScrubPage, Tier
from kvstore.writers import parse_writer, writer_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvstore.events import Event, EventPage
    from kvstore.nodes import Node, NodeMatch
    from kvstore.stats import StoreStats
    from kvstore.transport.client import Client
    from kvstore.types import PrefixMatch

_FOLLOW_SECONDS = 2.0


def status(arguments: argparse.Namespace) -> int:
    """Whether the sidecar serves, which version it is, what its tiers hold and how it stands in its cluster."""
    with connect_sidecar(arguments) as client:
        row = status_row(arguments, client)
    serving = "serving" if row["serving"] else "not serving"
    show(arguments, row, f"{row['address']}: {serving}, version {row['version']}, lane {row['lane']}")
    return ExitCode.DONE if row["serving"] else ExitCode.FAILED


def status_row(arguments: argparse.Namespace, client: Client) -> dict[str, object]:
    """What `kvstore status --json` prints. `cluster` is null where its directory does not answer, and
    `uptime_seconds` to a tenant."""
    answer, snapshot = client.status(), client.stats()
    try:
        own, known = client.nodes()
        states = {node.name: node.state for node in known}
        cluster = {"state": states[own].value if own in states else "alone", "nodes": _living(known)}
    except DirectoryUnavailableError:
        cluster = None
    return {
        "address": sidecar_address(arguments),
        "serving": answer.serving,
        "ready": answer.serving and (cluster is None or cluster["state"] != NodeState.DRAINING.value),
        "version": answer.version,
        "lane": answer.lane,
        "uptime_seconds": snapshot.uptime_seconds or None,
        "node": snapshot.node,
        "tiers": {name: asdict(tier) for name, tier in snapshot.tiers.items()},
        "cluster": cluster,
    }


def _living(nodes: Sequence[Node]) -> int:
    return sum(node.state is not NodeState.GONE for node in nodes)


def stats(arguments: argparse.Namespace) -> int:
    """Occupancy and counters."""
    with connect_sidecar(arguments) as client:
        snapshot = client.stats()
    if arguments.what_if:
        _show_what_if(arguments, snapshot)
    elif arguments.json:
        print_json(asdict(snapshot))
    else:
        _print_stats(snapshot)
    return ExitCode.DONE


def match(arguments: argparse.Namespace) -> int:
    """The longest stored prefix of a prompt, without touching it."""
    namespace, root = namespace_of(arguments), root_of(arguments)
    prompt = prompt_of(arguments, namespace)
    prompt_tokens = namespace.layout.prompt_tokens(prompt.size)
    with connect_sidecar(arguments) as client:
        found = client.match(namespace, prompt, root=root, touch=False)
        writers = client.writers_of(namespace, prompt, root=root) if arguments.json else ()
    row = {"blocks": found.blocks, "tokens": found.tokens, "prompt_tokens": prompt_tokens, "tiers": _tier_blocks(found)}
    row["writers"] = [{"writer": writer_text(run.writer), "blocks": run.blocks} for run in writers]
    places = ", ".join(f"{blocks} in {name}" for name, blocks in _tier_blocks(found).items())
    text = f"{found.tokens} of {prompt_tokens} tokens, {found.blocks} blocks" + (f": {places}" if places else "")
    show(arguments, row, text)
    return ExitCode.DONE


def locate(arguments: argparse.Namespace) -> int:
    """What each node holds of a prompt."""
    namespace, root = namespace_of(arguments), root_of(arguments)
    prompt = prompt_of(arguments, namespace)
    with connect_sidecar(arguments) as client:
        found = client.locate(namespace, prompt, root=root)
    rows = [
        {
            "node": located.node.name,
            "tokens": located.tokens,
            "tiers": {tier.name.lower(): count for tier, count in located.tiers.items()},
            "device": located.device_tokens,
        }
        for located in found
    ]
    if arguments.json:
        print_json({"prompt_tokens": namespace.layout.prompt_tokens(prompt.size), "nodes": rows})
    else:
        texts = [(row["node"], row["tokens"], _places(located)) for row, located in zip(rows, found, strict=True)]
        print_table(("node", "tokens", "where"), texts)
    return ExitCode.DONE


def pin(arguments: argparse.Namespace) -> int:
    """Pin a prompt; partly done if less is stored than the prompt has, failed if nothing is."""
    namespace, root = namespace_of(arguments), root_of(arguments)
    prompt = prompt_of(arguments, namespace)
    wanted = prompt.size // namespace.layout.block_symbols
    ttl_seconds = _ttl_seconds(arguments.ttl)
    with connect_sidecar(arguments) as client:
        made = client.pin(namespace, prompt, root=root, ttl_seconds=ttl_seconds)
    show(arguments, asdict(made), f"pin {made.pin_id}: {made.blocks} of {wanted} blocks")
    if made.blocks == wanted:
        return ExitCode.DONE
    return ExitCode.PARTLY_DONE if made.blocks else ExitCode.FAILED


def unpin(arguments: argparse.Namespace) -> int:
    """End a pin; failed if there is none of that id."""
    with connect_sidecar(arguments) as client:
        ended = client.unpin(arguments.pin_id)
    show(arguments, {"ended": ended}, f"pin {arguments.pin_id} {'ended' if ended else 'is not known'}")
    return ExitCode.DONE if ended else ExitCode.FAILED


def evict(arguments: argparse.Namespace) -> int:
    """Drop a prompt's blocks, or what a writer wrote."""
    if arguments.writer is not None:
        return _evict_writer(arguments)
    namespace, root = namespace_of(arguments), root_of(arguments)
    prompt = prompt_of(arguments, namespace)
    with connect_sidecar(arguments) as client:
        blocks = client.evict(namespace, prompt, root=root, from_block=arguments.from_block)
    show(arguments, {"blocks": blocks}, f"{blocks} blocks dropped")
    return ExitCode.DONE


def _evict_writer(arguments: argparse.Namespace) -> int:
    """Step by step, until nothing is left or no step drops any more."""
    if arguments.tokens or arguments.tokens_file or arguments.from_block:
        raise InvalidArgumentError("--writer drops what a writer wrote of all prompts; leave the prompt out")
    writer = parse_writer(arguments.writer)
    with connect_sidecar(arguments) as client:
        page = client.evict_writer(writer)
        blocks = page.blocks
        with ProgressBar(page.blocks + page.remaining_blocks) as progress:
            progress.advance("dropping blocks", page.blocks)
            while page.blocks and page.remaining_blocks:
                page = client.evict_writer(writer)
                blocks += page.blocks
                progress.advance("dropping blocks", page.blocks)
    row = {"writer": writer_text(writer), "blocks": blocks, "remaining_blocks": page.remaining_blocks}
    show(arguments, row, f"{blocks} blocks dropped, {page.remaining_blocks} of writer {row['writer']} left")
    return ExitCode.PARTLY_DONE if page.remaining_blocks else ExitCode.DONE


def clear(arguments: argparse.Namespace) -> int:
    """Drop a namespace's blocks."""
    namespace = namespace_of(arguments)
    with connect_sidecar(arguments) as client:
        blocks = client.clear(namespace)
    show(arguments, {"blocks": blocks}, f"{blocks} blocks dropped")
    return ExitCode.DONE


def flush(arguments: argparse.Namespace) -> int:
    """Wait for the disk."""
    with connect_sidecar(arguments) as client:
        client.flush()
    show(arguments, {"flushed": True}, "everything admitted to disk is there")
    return ExitCode.DONE


def verify(arguments: argparse.Namespace) -> int:
    """Check the index, and with --scrub all that lies on disk; failed if something is wrong."""
    bytes_per_second = _bytes_per_second(arguments.rate)
    with connect_sidecar(arguments) as client:
        found = client.verify()
        read = _scrub(client, bytes_per_second) if arguments.scrub else None
    lines = [*found.problems, f"{found.blocks} blocks in {found.namespaces} namespaces, {len(found.problems)} problems"]
    row = asdict(found)
    if read is not None:
        row["scrub"] = {**asdict(read), "next_after": None}
        lines.append(
            f"{read.blocks} blocks read from disk ({format_size(read.bytes)}), {read.dropped_blocks} wrong and "
            f"dropped, {read.repaired_slots} slots out of quarantine"
        )
    show(arguments, row, "\n".join(lines))
    return ExitCode.FAILED if found.problems or (read and read.dropped_blocks) else ExitCode.DONE


def _scrub(client: Client, bytes_per_second: int) -> ScrubPage:
    """All pages of a scrub in one, read no faster than asked for."""
    limit_bytes = min(SCRUB_BYTES, bytes_per_second)
    started_at = time.monotonic()
    page = client.scrub(limit_bytes=limit_bytes)
    total = page
    with ProgressBar(page.blocks + page.remaining_blocks) as progress:
        progress.advance("reading the disk", page.blocks)
        while page.next_after is not None:
            time.sleep(max(0.0, started_at + total.bytes / bytes_per_second - time.monotonic()))
            page = client.scrub(after=page.next_after, limit_bytes=limit_bytes)
            progress.advance("reading the disk", page.blocks)
            total = ScrubPage(
                blocks=total.blocks + page.blocks,
                bytes=total.bytes + page.bytes,
                dropped_blocks=total.dropped_blocks + page.dropped_blocks,
                repaired_slots=total.repaired_slots + page.repaired_slots,
                remaining_blocks=page.remaining_blocks,
                next_after=page.next_after,
            )
    return total


def events(arguments: argparse.Namespace) -> int:
    """Print a page of the event log, or follow it."""
    after = arguments.after
    with connect_sidecar(arguments) as client:
        while True:
            wait_seconds = _FOLLOW_SECONDS if arguments.follow else 0.0
            page = client.events(after=after, limit=arguments.limit, wait_seconds=wait_seconds)
            _print_events(arguments, page)
            after = page.next_after
            if not arguments.follow:
                return ExitCode.DONE


def _bytes_per_second(text: str) -> int:
    try:
        rate = parse_size(text)
    except ValueError as err:
        raise InvalidArgumentError(f"--rate {text!r}: {err}") from err
    if rate < 1:
        raise InvalidArgumentError(f"--rate {text!r}: expected at least one byte per second")
    return rate


def _ttl_seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as err:
        raise InvalidArgumentError(f"--ttl {text!r}: {err}") from err


def _places(located: NodeMatch) -> str:
    tiers = [
        f"{tokens} to a boundary" if tier is Tier.PEER else f"{tokens} in {tier.name.lower()}"
        for tier, tokens in located.tiers.items()
    ]
    return ", ".join([*tiers, *(f"{tokens} in device of {name}" for name, tokens in located.device_tokens.items())])


def _tier_blocks(found: PrefixMatch) -> dict[str, int]:
    return {tier.name.lower(): blocks for tier, blocks in found.tiers.items()}


def _print_stats(snapshot: StoreStats) -> None:
    rows = [
        (name, tier.blocks, format_size(tier.used_bytes), format_size(tier.capacity_bytes))
        for name, tier in snapshot.tiers.items()
    ]
    print_table(("tier", "blocks", "used", "capacity"), rows)
    print()
    print_table(("counter", "value"), [row for name, value in asdict(snapshot).items() for row in _rows(name, value)])


def _show_what_if(arguments: argparse.Namespace, snapshot: StoreStats) -> None:
    if arguments.json:
        print_json([asdict(row) for row in snapshot.what_if])
    elif not snapshot.what_if:
        print("no tier has been full yet: more capacity would change nothing so far")
    else:
        rows = [
            (row.tier, f"{row.scale:g}", format_size(row.capacity_bytes), f"{row.hit_rate:.1%}")
            for row in snapshot.what_if
        ]
        print_table(("tier", "scale", "capacity", "hit rate"), rows)


def _rows(name: str, value: object) -> Sequence[tuple[str, object]]:
    if name in ("tiers", "what_if"):
        return ()
    if isinstance(value, dict) and value:
        return [(f"{name}.{label}", count) for label, count in sorted(value.items())]
    return [(name, value or 0)]


def _print_events(arguments: argparse.Namespace, page: EventPage) -> None:
    if page.gap:
        show(arguments, {"epoch": page.epoch, "gap": True}, "gap: older events were lost")
    for event in page.events:
        show(arguments, {"epoch": page.epoch, **_event_row(event)}, _event_text(event))


def _event_row(event: Event) -> dict[str, object]:
    row = asdict(event)
    row["kind"] = event.kind.name.lower()
    row["tier"] = None if event.tier is None else event.tier.name.lower()
    return row


def _event_text(event: Event) -> str:
    tier = "" if event.tier is None else f" tier={event.tier.name.lower()}"
    last = " last_copy" if event.last_copy else ""
    return f"{event.sequence} {event.kind.name.lower()} ns={event.ns_id.hex()}{tier} blocks={len(event.keys)}{last}"
