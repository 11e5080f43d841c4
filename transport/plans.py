"""What each method of a store asks of a server and what the answer means, for whoever carries it.

A plan is made from arguments that were checked, knows nothing of connections, and is carried by the client's threads
(client.py) or by an event loop (aio.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from grpc_health.v1 import health_pb2

from kvstore.errors import InvalidArgumentError
from kvstore.state_blobs import require_path, require_state_bytes
from kvstore.tokens import as_prompt
from kvstore.transport import convert, convert_doctor, convert_nodes
from kvstore.transport.link import ADMIN, CACHE, Rpc, Wait
from kvstore.types import (
    ScrubPage,
    Verification,
    require_blocks,
    require_namespace,
    require_seconds,
    require_state,
    require_turn_ends,
    require_writer,
)
from kvstore.v1 import admin_service_pb2 as admin_pb
from kvstore.v1 import cache_service_pb2 as pb
from kvstore.writers import WriterPage, WriterRun, require_writer_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from google.protobuf.message import Message

    from kvstore.doctor import Report
    from kvstore.events import EventPage
    from kvstore.nodes import Deletion, DrainOrder, DrainProgress, Node, NodeMatch
    from kvstore.stats import NamespaceStats, StoreStats
    from kvstore.tokens import Tokens
    from kvstore.types import Namespace, Pin, PrefixMatch, Root, Tier, TokenArray

R = TypeVar("R", bound="Message")
T = TypeVar("T")
EVENTS_MAX = 10_000
_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1

LEASE = Rpc(CACHE, "Lease", pb.LeaseResponse)
RELEASE = Rpc(CACHE, "Release", pb.ReleaseResponse)
STAGE = Rpc(CACHE, "Stage", pb.StageResponse)
COMMIT = Rpc(CACHE, "Commit", pb.CommitResponse)
ABORT = Rpc(CACHE, "Abort", pb.AbortResponse)
MATCH = Rpc(CACHE, "Match", pb.MatchResponse)
PREFETCH = Rpc(CACHE, "Prefetch", pb.PrefetchResponse)
CANCEL_PREFETCH = Rpc(CACHE, "CancelPrefetch", pb.CancelPrefetchResponse)
SESSION = Rpc(CACHE, "Session", pb.SessionResponse)
CHECK = Rpc("grpc.health.v1.Health", "Check", health_pb2.HealthCheckResponse)
_HINT = Rpc(CACHE, "Hint", pb.HintResponse)
_STATS = Rpc(CACHE, "GetStats", pb.GetStatsResponse)
_EVENTS = Rpc(CACHE, "ReadEvents", pb.ReadEventsResponse)
_PIN = Rpc(ADMIN, "Pin", admin_pb.PinResponse)
_UNPIN = Rpc(ADMIN, "Unpin", admin_pb.UnpinResponse)
_EVICT = Rpc(ADMIN, "Evict", admin_pb.EvictResponse)
_CLEAR = Rpc(ADMIN, "Clear", admin_pb.ClearResponse)
_FLUSH = Rpc(ADMIN, "Flush", admin_pb.FlushResponse)
_VERIFY = Rpc(ADMIN, "Verify", admin_pb.VerifyResponse)
_EVICT_WRITER = Rpc(ADMIN, "EvictWriter", admin_pb.EvictWriterResponse)
_FIND_WRITERS = Rpc(ADMIN, "FindWriters", admin_pb.FindWritersResponse)
_SCRUB = Rpc(ADMIN, "Scrub", admin_pb.ScrubResponse)
_LIST_NODES = Rpc(ADMIN, "ListNodes", admin_pb.ListNodesResponse)
_DRAIN = Rpc(ADMIN, "Drain", admin_pb.DrainResponse)
_UNDRAIN = Rpc(ADMIN, "Undrain", admin_pb.UndrainResponse)
_GET_DIAGNOSIS = Rpc(ADMIN, "GetDiagnosis", admin_pb.GetDiagnosisResponse)
_RESET_DIAGNOSIS = Rpc(ADMIN, "ResetDiagnosis", admin_pb.ResetDiagnosisResponse)
_LIST_NAMESPACES = Rpc(ADMIN, "ListNamespaces", admin_pb.ListNamespacesResponse)
_DELETE_NAMESPACE = Rpc(ADMIN, "DeleteNamespace", admin_pb.DeleteNamespaceResponse)
_LOCATE = Rpc(ADMIN, "Locate", admin_pb.LocateResponse)


class Plan(NamedTuple, Generic[R, T]):
    """One call: `request` takes the session's id and that of `namespace` (empty if there is none).

    `repeatable` says that the call may be made again when the connection was lost and nobody knows what became of it,
    `is_large` that reading the answer may take a millisecond.
    """

    rpc: Rpc[R]
    wait: Wait
    namespace: Namespace | None
    request: Callable[[bytes, bytes], Message]
    read: Callable[[R], T]
    repeatable: bool = True
    is_large: bool = False


def pin(
    namespace: Namespace, tokens: Tokens, root: Root | None, ttl_seconds: float | None
) -> Plan[admin_pb.PinResponse, Pin]:
    """Not repeatable: the first may have been set, and its id would be lost."""
    request = admin_pb.PinRequest()
    if ttl_seconds is not None:
        convert.set_duration(request.ttl, ttl_seconds, "ttl_seconds")
    prompt = as_prompt(namespace, tokens)

    def of_session(session_id: bytes, ns_id: bytes) -> Message:
        request.session_id = session_id
        request.prompt.CopyFrom(convert.prompt_to_proto(ns_id, root, prompt))
        return request

    return Plan(_PIN, Wait.CONTROL, namespace, of_session, convert.pin_from_proto, repeatable=False)


def unpin(pin_id: int) -> Plan[admin_pb.UnpinResponse, bool]:
    """End a pin. Not repeatable: the second would say that there is none."""
    check_range(pin_id, _UINT64_MAX, "pin_id")
    request = admin_pb.UnpinRequest(pin_id=pin_id)
    return Plan(_UNPIN, Wait.CONTROL, None, lambda _session, _ns: request, lambda answer: answer.found, False)


def hint(namespace: Namespace, tokens: Tokens, root: Root | None, seconds: float | None) -> Plan[pb.HintResponse, int]:
    """Tell when a prompt is used again."""
    prompt = as_prompt(namespace, tokens)
    request = pb.HintRequest(end=pb.SessionEnd())
    if seconds is not None:
        convert.set_duration(request.next, require_seconds(seconds, "seconds"), "seconds")

    def of_session(session_id: bytes, ns_id: bytes) -> Message:
        request.session_id = session_id
        request.prompt.CopyFrom(convert.prompt_to_proto(ns_id, root, prompt))
        return request

    return Plan(_HINT, Wait.LOOKUP, namespace, of_session, lambda answer: answer.blocks)


def evict(
    namespace: Namespace, tokens: Tokens, root: Root | None, from_block: int
) -> Plan[admin_pb.EvictResponse, int]:
    """Drop a prefix."""
    prompt = as_prompt(namespace, tokens)
    check_from_block(from_block)

    def of_session(session_id: bytes, ns_id: bytes) -> Message:
        packed = convert.prompt_to_proto(ns_id, root, prompt)
        return admin_pb.EvictRequest(session_id=session_id, prompt=packed, from_block=from_block)

    return Plan(_EVICT, Wait.LONG, namespace, of_session, lambda answer: answer.blocks)


def evict_writer(writer: int) -> Plan[admin_pb.EvictWriterResponse, WriterPage]:
    """Drop some of what a writer wrote."""
    request = admin_pb.EvictWriterRequest(writer=require_writer_id(writer))

    def read(page: admin_pb.EvictWriterResponse) -> WriterPage:
        return WriterPage(page.blocks, page.remaining_blocks)

    return Plan(_EVICT_WRITER, Wait.LONG, None, lambda _session, _ns: request, read)


def find_writers(
    namespace: Namespace, tokens: Tokens, root: Root | None
) -> Plan[admin_pb.FindWritersResponse, tuple[WriterRun, ...]]:
    """Say who wrote a prefix."""
    prompt = as_prompt(namespace, tokens)

    def of_session(session_id: bytes, ns_id: bytes) -> Message:
        return admin_pb.FindWritersRequest(session_id=session_id, prompt=convert.prompt_to_proto(ns_id, root, prompt))

    def read(answer: admin_pb.FindWritersResponse) -> tuple[WriterRun, ...]:
        return tuple(WriterRun(run.writer, run.blocks) for run in answer.runs)

    return Plan(_FIND_WRITERS, Wait.CONTROL, namespace, of_session, read)


def clear(namespace: Namespace) -> Plan[admin_pb.ClearResponse, int]:
    """Drop a namespace's blocks."""

    def of_session(session_id: bytes, ns_id: bytes) -> Message:
        return admin_pb.ClearRequest(session_id=session_id, ns_id=ns_id)

    return Plan(_CLEAR, Wait.LONG, namespace, of_session, lambda answer: answer.blocks)


def stats() -> Plan[pb.GetStatsResponse, StoreStats]:
    """Occupancy and counters."""
    request = pb.GetStatsRequest()
    return Plan(
        _STATS,
        Wait.CONTROL,
        None,
        lambda _session, _ns: request,
        lambda answer: convert.stats_from_proto(answer.stats),
    )


def check_events(after: int, limit: int, wait_seconds: float) -> None:
    """Raises InvalidArgumentError for a page of events that cannot be asked for."""
    check_range(after, _UINT64_MAX, "after")
    if limit < 1 or not 0 <= wait_seconds < float("inf"):
        raise InvalidArgumentError(f"limit={limit}, wait_seconds={wait_seconds}: expected at least 1 and 0")


def read_events(after: int, limit: int, wait_seconds: float) -> Plan[pb.ReadEventsResponse, EventPage]:
    """A page of events, with arguments that were checked."""
    request = pb.ReadEventsRequest(after=after, limit=min(limit, EVENTS_MAX))
    convert.set_duration(request.wait, wait_seconds, "wait_seconds")
    return Plan(
        _EVENTS,
        Wait.CONTROL,
        None,
        lambda _session, _ns: request,
        lambda answer: convert.page_from_proto(answer.page),
        is_large=True,
    )


def flush() -> Plan[admin_pb.FlushResponse, None]:
    """Wait for the disk."""
    request = admin_pb.FlushRequest()
    return Plan(_FLUSH, Wait.LONG, None, lambda _session, _ns: request, lambda _answer: None)


def verify() -> Plan[admin_pb.VerifyResponse, Verification]:
    """Check the index."""
    request = admin_pb.VerifyRequest()

    def read(found: admin_pb.VerifyResponse) -> Verification:
        return Verification(found.namespaces, found.blocks, tuple(found.problems))

    return Plan(_VERIFY, Wait.LONG, None, lambda _session, _ns: request, read)


def scrub(after: int, limit_bytes: int) -> Plan[admin_pb.ScrubResponse, ScrubPage]:
    """Read some of the disk."""
    check_range(after, _UINT64_MAX, "after")
    if not 1 <= limit_bytes <= _UINT64_MAX:
        raise InvalidArgumentError(f"limit_bytes is {limit_bytes}, expected at least 1")
    request = admin_pb.ScrubRequest(after=after, limit_bytes=limit_bytes)

    def read(page: admin_pb.ScrubResponse) -> ScrubPage:
        return ScrubPage(
            page.blocks,
            page.bytes,
            page.dropped_blocks,
            page.repaired_slots,
            page.remaining_blocks,
            page.next_after if page.HasField("next_after") else None,
        )

    return Plan(_SCRUB, Wait.LONG, None, lambda _session, _ns: request, read)


def list_nodes() -> Plan[admin_pb.ListNodesResponse, tuple[str, tuple[Node, ...]]]:
    """Name the nodes."""
    request = admin_pb.ListNodesRequest()

    def read(answer: admin_pb.ListNodesResponse) -> tuple[str, tuple[Node, ...]]:
        return answer.node_name, tuple(convert_nodes.node_from_proto(node) for node in (*answer.nodes, *answer.gone))

    return Plan(_LIST_NODES, Wait.CONTROL, None, lambda _session, _ns: request, read)


def drain(order: DrainOrder | None, wait_seconds: float) -> Plan[admin_pb.DrainResponse, DrainProgress]:
    """Have the node drain, or ask how far it is."""
    request = admin_pb.DrainRequest()
    if order is not None:
        check_range(order.limit_bytes, _UINT64_MAX, "limit_bytes")
        request.order.CopyFrom(convert_nodes.drain_order_to_proto(order))
    convert.set_duration(request.wait, require_seconds(wait_seconds, "wait_seconds"), "wait_seconds")
    return Plan(_DRAIN, Wait.CONTROL, None, lambda _session, _ns: request, convert_nodes.drain_progress_from_proto)


def undrain() -> Plan[admin_pb.UndrainResponse, bool]:
    """Have it take part again. Not repeatable: the second would say that it did not drain."""
    request = admin_pb.UndrainRequest()
    return Plan(_UNDRAIN, Wait.CONTROL, None, lambda _session, _ns: request, lambda answer: answer.drained, False)


def list_namespaces() -> Plan[admin_pb.ListNamespacesResponse, tuple[NamespaceStats, ...]]:
    """Name the namespaces."""
    request = admin_pb.ListNamespacesRequest()

    def read(answer: admin_pb.ListNamespacesResponse) -> tuple[NamespaceStats, ...]:
        return tuple(convert_nodes.namespace_from_proto(use) for use in answer.namespaces)

    return Plan(_LIST_NAMESPACES, Wait.CONTROL, None, lambda _session, _ns: request, read)


def get_diagnosis() -> Plan[admin_pb.GetDiagnosisResponse, Report]:
    """Say why prompts were not found."""
    request = admin_pb.GetDiagnosisRequest()
    return Plan(_GET_DIAGNOSIS, Wait.CONTROL, None, lambda _session, _ns: request, convert_doctor.report_from_proto)


def reset_diagnosis() -> Plan[admin_pb.ResetDiagnosisResponse, None]:
    """Count anew."""
    request = admin_pb.ResetDiagnosisRequest()
    return Plan(_RESET_DIAGNOSIS, Wait.CONTROL, None, lambda _session, _ns: request, lambda _answer: None)


def delete_namespace(ns_id: bytes) -> Plan[admin_pb.DeleteNamespaceResponse, Deletion]:
    """Delete one. Not repeatable: the second would drop what was stored since."""
    request = admin_pb.DeleteNamespaceRequest(ns_id=ns_id)
    return Plan(
        _DELETE_NAMESPACE, Wait.LONG, None, lambda _session, _ns: request, convert_nodes.deletion_from_proto, False
    )


def locate(
    namespace: Namespace, tokens: Tokens, root: Root | None
) -> Plan[admin_pb.LocateResponse, tuple[NodeMatch, ...]]:
    """Say where a prompt lies."""
    prompt = as_prompt(namespace, tokens)

    def of_session(session_id: bytes, ns_id: bytes) -> Message:
        return admin_pb.LocateRequest(session_id=session_id, prompt=convert.prompt_to_proto(ns_id, root, prompt))

    def read(answer: admin_pb.LocateResponse) -> tuple[NodeMatch, ...]:
        return tuple(convert_nodes.node_match_from_proto(match) for match in answer.matches)

    return Plan(_LOCATE, Wait.CONTROL, namespace, of_session, read)


def check() -> Plan[health_pb2.HealthCheckResponse, bool]:
    """Whether the server takes calls."""
    request = health_pb2.HealthCheckRequest()
    return Plan(CHECK, Wait.CONTROL, None, lambda _session, _ns: request, is_serving)


def is_serving(health: health_pb2.HealthCheckResponse) -> bool:
    """Whether a server says that it takes calls."""
    return bool(health.status == health_pb2.HealthCheckResponse.SERVING)


def lease_request(
    session_id: bytes, ns_id: bytes, match: PrefixMatch, lease_id: int, tiers: Collection[Tier] | None
) -> pb.LeaseRequest:
    """Protect a match, or what of it lies in some tiers."""
    return pb.LeaseRequest(
        session_id=session_id,
        prompt=convert.prompt_to_proto(ns_id, match.root, match.prefix),
        blocks=match.blocks,
        lease_id=lease_id,
        tiers=convert.tiers_to_proto(tiers or ()),
    )


def stage_request(
    namespace: Namespace, prompt: TokenArray, from_block: int, turn_ends: Sequence[int], rank: int | None
) -> pb.StageRequest:
    """Begin to store; names no session, no stage and no prompt yet."""
    check_from_block(from_block)
    require_namespace(namespace)
    require_blocks(namespace.layout)
    ends = require_turn_ends(turn_ends, namespace.layout.prompt_tokens(prompt.size))
    request = pb.StageRequest(from_block=from_block, turn_ends=ends)
    if rank is not None:
        request.rank = require_writer(namespace.layout, rank)
    return request


def stage_state_request(namespace: Namespace, prompt: TokenArray, state_bytes: int) -> pb.StageRequest:
    """Begin to store a sequence state; names no session, no stage and no prompt yet."""
    require_namespace(namespace)
    require_state(namespace.layout)
    require_path(prompt.size)
    return pb.StageRequest(state_bytes=require_state_bytes(state_bytes))


def check_from_block(from_block: int) -> None:
    """Raises InvalidArgumentError for what is no index of a block."""
    check_range(from_block, _UINT32_MAX, "from_block")


def check_range(value: int, highest: int, name: str) -> None:
    """Raises InvalidArgumentError outside 0..highest."""
    if not 0 <= value <= highest:
        raise InvalidArgumentError(f"{name} is {value}, expected 0..{highest}")


def unicode_text(text: str, name: str) -> str:
    """`text`, if it can be sent."""
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{name} is {text!r:.60}, expected a text")
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise InvalidArgumentError(f"{name} is not Unicode text") from err
    return text
