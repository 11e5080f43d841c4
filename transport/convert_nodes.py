"""Values about nodes as messages, and back."""

from __future__ import annotations

from kvstore.nodes import Deletion, DrainOrder, DrainProgress, Node, NodeMatch, NodeState
from kvstore.stats import NamespaceStats
from kvstore.transport.convert import duration_seconds, set_duration
from kvstore.types import Tier
from kvstore.v1 import admin_service_pb2 as admin_pb

_STATES = {
    NodeState.READY: admin_pb.NODE_STATE_READY,
    NodeState.DRAINING: admin_pb.NODE_STATE_DRAINING,
    NodeState.GONE: admin_pb.NODE_STATE_GONE,
}
_STATES_BACK = {number: state for state, number in _STATES.items()}


def node_to_proto(node: Node) -> admin_pb.Node:
    """A node of a cluster."""
    message = admin_pb.Node(
        name=node.name,
        slot=node.slot,
        incarnation=node.incarnation,
        addresses=node.addresses,
        host_bytes=node.host_bytes,
        disk_bytes=node.disk_bytes,
        queue=node.queue,
        state=_STATES[node.state],
        version=node.version,
        host_used_bytes=node.host_used_bytes,
        disk_used_bytes=node.disk_used_bytes,
        leases=node.leases,
        deletions=node.deletions,
    )
    set_duration(message.age, node.age_seconds, "age_seconds")
    return message


def node_from_proto(message: admin_pb.Node) -> Node:
    """A node of a cluster; of a server that does not say so it is ready."""
    return Node(
        message.name,
        message.slot,
        message.incarnation,
        tuple(message.addresses),
        message.host_bytes,
        message.disk_bytes,
        message.queue,
        _STATES_BACK.get(message.state, NodeState.READY),
        message.version,
        message.host_used_bytes,
        message.disk_used_bytes,
        message.leases,
        message.deletions,
        duration_seconds(message.age),
    )


def node_match_to_proto(match: NodeMatch) -> admin_pb.NodeMatch:
    """What a node holds of a prompt."""
    return admin_pb.NodeMatch(
        node=node_to_proto(match.node),
        tokens=match.tokens,
        host_tokens=match.tiers.get(Tier.HOST, 0),
        disk_tokens=match.tiers.get(Tier.DISK, 0),
        device_tokens=match.device_tokens,
    )


def node_match_from_proto(message: admin_pb.NodeMatch) -> NodeMatch:
    """What a node holds of a prompt; what is neither in its host memory nor on its disk, as far as is told, is PEER."""
    rest = message.tokens - message.host_tokens - message.disk_tokens
    tiers = {Tier.HOST: message.host_tokens, Tier.DISK: message.disk_tokens, Tier.PEER: rest}
    return NodeMatch(
        node_from_proto(message.node),
        message.tokens,
        {tier: tokens for tier, tokens in tiers.items() if tokens > 0},
        dict(message.device_tokens),
    )


def drain_order_to_proto(order: DrainOrder) -> admin_pb.DrainOrder:
    """What a node is to hand over."""
    message = admin_pb.DrainOrder(limit_bytes=order.limit_bytes, targets=order.targets)
    set_duration(message.limit, order.seconds, "seconds")
    return message


def drain_order_from_proto(message: admin_pb.DrainOrder) -> DrainOrder:
    """What a node is to hand over."""
    return DrainOrder(duration_seconds(message.limit), message.limit_bytes, tuple(message.targets))


def drain_progress_to_proto(progress: DrainProgress) -> admin_pb.DrainResponse:
    """How far a hand-over is."""
    return admin_pb.DrainResponse(
        draining=progress.is_draining,
        done=progress.is_done,
        held=progress.held,
        prefixes=progress.prefixes,
        taken=progress.taken,
        taken_bytes=progress.taken_bytes,
        failures=progress.failures,
    )


def drain_progress_from_proto(message: admin_pb.DrainResponse) -> DrainProgress:
    """How far a hand-over is."""
    return DrainProgress(
        message.draining,
        message.done,
        message.held,
        message.prefixes,
        message.taken,
        message.taken_bytes,
        message.failures,
    )


def namespace_to_proto(stats: NamespaceStats) -> admin_pb.NamespaceUse:
    """What a node has of a namespace."""
    return admin_pb.NamespaceUse(
        ns_id=stats.ns_id,
        tenant=stats.tenant,
        model=stats.model,
        revision=stats.revision,
        host_blocks=stats.host_blocks,
        disk_blocks=stats.disk_blocks,
        block_bytes=stats.block_bytes,
        pins=stats.pins,
    )


def namespace_from_proto(message: admin_pb.NamespaceUse) -> NamespaceStats:
    """What a node has of a namespace."""
    return NamespaceStats(
        message.ns_id,
        message.tenant,
        message.model,
        message.revision,
        message.host_blocks,
        message.disk_blocks,
        message.block_bytes,
        message.pins,
    )


def deletion_from_proto(message: admin_pb.DeleteNamespaceResponse) -> Deletion:
    """What came of deleting a namespace."""
    return Deletion(message.epoch, message.blocks, message.told)
