"""What leases, stages and the client need of a connection, whichever lane it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from kvstore.errors import LayoutMismatchError
from kvstore.hashing import secret_proof
from kvstore.transport import convert
from kvstore.types import require_namespace
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    import numpy as np
    from google.protobuf.message import Message
    from numpy.typing import NDArray

    from kvstore.types import Namespace, Root, TierRun, TokenArray

R = TypeVar("R", bound="Message")
CACHE = "kvstore.v1.CacheService"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Longest time of one call: for lookups and the like, and for moving bytes."""

    control_seconds: float
    bulk_seconds: float


class Lookup(NamedTuple):
    """What a match asks."""

    namespace: Namespace
    root: Root | None
    prompt: TokenArray
    peek: bool
    request_id: str


class Matched(NamedTuple):
    """What a match answers."""

    blocks: int
    runs: tuple[TierRun, ...]


class Link(Protocol):
    """A connection and the session that lives on it. Thread-safe. Once ended it stays so: make another one."""

    @property
    def lane(self) -> str:
        """Name of the lane: "wire" or "grpc"."""
        ...

    @property
    def session(self) -> pb.SessionResponse:
        """What the server said of the session."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the session is over, and with it every lease and stage it held."""
        ...

    def close(self) -> None:
        """End the session; idempotent. The server releases what it held."""
        ...

    def call(self, service: str, method: str, request: Message, response_type: type[R]) -> R:
        """One call within the deadline of control calls."""
        ...

    def match(self, lookup: Lookup) -> Matched:
        """A lookup, within the deadline of control calls."""
        ...

    def long_call(self, service: str, method: str, request: Message, response_type: type[R]) -> R:
        """One call within the deadline of bulk calls."""
        ...

    def new_id(self) -> int:
        """An id that names one lease or stage of this session."""
        ...

    def give_up(self, service: str, method: str, request: Message, response_type: type[Message]) -> None:
        """Send a call that ends what we may or may not hold, without waiting. If it fails, the session is ended."""
        ...

    def load(self, request: pb.LoadRequest, target: NDArray[np.uint8]) -> int:
        """Receive leased blocks into the flat `target`; returns how many leading blocks are right."""
        ...

    def write(self, start: pb.WriteStart, source: NDArray[np.uint8]) -> int:
        """Send the flat `source` to a stage; returns how many rows were taken."""
        ...

    def ns_id(self, namespace: Namespace) -> bytes:
        """The id of a namespace, which is opened in this session if it is not yet."""
        ...


class OpenNamespaces:
    """The namespaces that one session has opened. Thread-safe: only ever added to, and the last one set at once."""

    def __init__(self) -> None:
        self._ids: dict[Namespace, bytes] = {}
        self._last: tuple[Namespace | None, bytes] = (None, b"")

    def ns_id(self, link: Link, namespace: Namespace) -> bytes:
        """The id of a namespace, which is opened over `link` if it is not yet."""
        last, last_id = self._last
        if last is not None and namespace is last:  # nearly always, and cheaper than to hash all its fields
            return last_id
        require_namespace(namespace)
        ns_id = self._ids.get(namespace)
        if ns_id is None:
            proof = b""
            if namespace.secret is not None:
                proof = secret_proof(namespace.secret, link.session.challenge, namespace)
            request = pb.OpenNamespaceRequest(
                session_id=link.session.session_id, namespace=convert.namespace_to_proto(namespace), proof=proof
            )
            answer = link.call(CACHE, "OpenNamespace", request, pb.OpenNamespaceResponse)
            _check_parts(namespace, answer)
            ns_id = self._ids[namespace] = answer.ns_id
        self._last = (namespace, ns_id)
        return ns_id


def _check_parts(namespace: Namespace, answer: pb.OpenNamespaceResponse) -> None:
    """Refuse a server that does not know fields of the layout, and so took it for another one."""
    layout = namespace.layout
    is_new = bool(layout.groups or layout.ranks)
    expected = [part.size_bytes for part in layout.parts]
    if is_new and list(answer.part_bytes) != expected:
        raise LayoutMismatchError(
            f"the server reckons with parts of {list(answer.part_bytes)} bytes, this layout has {expected}; "
            "it is of another version: upgrade it"
        )
