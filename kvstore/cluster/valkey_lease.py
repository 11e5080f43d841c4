"""The lease of a node as it lies in Valkey: JSON, which is read as what a stranger may have written."""

from __future__ import annotations

import json

from kvstore.cluster.directory import SLOTS_MAX
from kvstore.nodes import Node, NodeState

_LEASE_BYTES_MAX = 1 << 16
_BYTES_MAX = 2**63 - 1
_QUEUE_MAX = 2**31 - 1
_INCARNATION_MAX = 2**64 - 1
_STATES = {state.value: state for state in (NodeState.READY, NodeState.DRAINING)}


def lease_text(node: Node, identity: bytes, lease_ms: int) -> str:
    """What a node says of itself. Nodes of an older release pass over what they do not know."""
    return json.dumps(
        {
            "name": node.name,
            "identity": identity.hex(),
            "incarnation": incarnation_text(node.incarnation),
            "addresses": node.addresses,
            "host_bytes": node.host_bytes,
            "disk_bytes": node.disk_bytes,
            "queue": node.queue,
            "state": node.state.value,
            "version": node.version,
            "host_used_bytes": node.host_used_bytes,
            "disk_used_bytes": node.disk_used_bytes,
            "leases": node.leases,
            "deletions": node.deletions,
            "lease_ms": lease_ms,
        }
    )


def read_lease(slot: bytes, text: bytes, left_ms: int) -> Node | None:
    """The node of a lease that has so long left; None for what no node of ours wrote, which says nothing of others.

    What a node of an older release does not say of itself is taken as 0, and its state as ready.
    """
    if len(text) > _LEASE_BYTES_MAX or not slot.isdigit() or len(slot) > len(str(SLOTS_MAX)):
        return None
    try:
        told = json.loads(text)
        addresses = told["addresses"]
        if not isinstance(addresses, list):
            return None
        return Node(
            _name(told["name"]),
            _number(int(slot), SLOTS_MAX - 1),
            _number(int(told["incarnation"], 16), _INCARNATION_MAX),
            tuple(_text(address) for address in addresses),
            _number(told["host_bytes"], _BYTES_MAX),
            _number(told["disk_bytes"], _BYTES_MAX),
            _number(told["queue"], _QUEUE_MAX),
            _STATES.get(_text(told.get("state", "")), NodeState.READY),
            _name(told.get("version", "")),
            _number(told.get("host_used_bytes", 0), _BYTES_MAX),
            _number(told.get("disk_used_bytes", 0), _BYTES_MAX),
            _number(told.get("leases", 0), _QUEUE_MAX),
            _number(told.get("deletions", 0), _BYTES_MAX),
            max(0, _number(told.get("lease_ms", 0), _QUEUE_MAX) - left_ms) / 1000,
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def incarnation_text(incarnation: int) -> str:
    """An incarnation as leases, owners and claims name it."""
    return f"{incarnation:016x}"


def _number(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is no number in 0..{most}")
    return value


def _name(value: object) -> str:
    name = _text(value)
    if not name.isprintable():
        raise ValueError("a node's name is printable, so that logs and terminals may show it")
    return name


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    value.encode()  # a lone surrogate has no bytes: no answer could name it
    return value
