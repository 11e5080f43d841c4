"""What leases, stages and the client need of a connection, whichever lane it uses, and how long each call may take."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from kvstore.errors import ConfigError, LayoutMismatchError
from kvstore.hashing import secret_proof
from kvstore.transport import convert
from kvstore.types import Symbols, require_namespace
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
    from google.protobuf.message import Message
    from numpy.typing import NDArray

    from kvstore.types import Namespace, Root, TierRun, TokenArray

R = TypeVar("R", bound="Message")
CACHE = "kvstore.v1.CacheService"
ADMIN = "kvstore.v1.AdminService"
_SECONDS_MAX = 1e6


class Wait(enum.Enum):
    """Which deadline a call has."""

    LOOKUP = "lookup_seconds"
    CONTROL = "control_seconds"
    BULK = "bulk_seconds"
    LONG = "long_seconds"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Longest time of one call. Raises ConfigError for a time that cannot be.

    `lookup_seconds`: what an engine waits for before it can compute: match, lease, release, namespace ids, hints.
    `control_seconds`: what people and monitors ask: stats, events, status, pins.
    `bulk_seconds`: begin and end of a store; and of one load or write the time that comes on top of its bytes at
    `floor_bytes_per_second`, which is slower than any lane or disk that would be worth it.
    `long_seconds`: flush, evict, clear, verify, scrub.
    """

    lookup_seconds: float = 0.1
    control_seconds: float = 5.0
    bulk_seconds: float = 1.0
    long_seconds: float = 60.0
    floor_bytes_per_second: float = 1e8

    def __post_init__(self) -> None:
        for wait in Wait:
            seconds = self.of(wait)
            if not 0 < seconds < _SECONDS_MAX:
                raise ConfigError(f"{wait.value} is {seconds!r}, expected more than 0 and less than {_SECONDS_MAX:g}")
        if not self.floor_bytes_per_second > 0:
            raise ConfigError(f"floor_bytes_per_second is {self.floor_bytes_per_second!r}, expected more than 0")

    def of(self, wait: Wait) -> float:
        """Seconds of a call that moves no bytes."""
        seconds: float = getattr(self, wait.value)
        return seconds

    def moving(self, moved_bytes: int) -> float:
        """Seconds of a load or write."""
        return self.bulk_seconds + moved_bytes / self.floor_bytes_per_second


def flat_deadlines(seconds: float) -> Deadlines:
    """The same time for every call, however many bytes it moves."""
    return Deadlines(seconds, seconds, seconds, seconds, float("inf"))


class Rpc(NamedTuple, Generic[R]):
    """A call of the API that is no stream."""

    service: str
    method: str
    response: type[R]


class Lookup(NamedTuple):
    """What a match asks."""

    namespace: Namespace
    root: Root | None
    prompt: TokenArray
    peek: bool
    request_id: str

    def repeated(self) -> Lookup:
        """How to ask again when nobody knows whether the first was counted: by its id, or else without counting."""
        return self if self.request_id else self._replace(peek=True)


class Matched(NamedTuple):
    """What a match answers."""

    blocks: int
    runs: tuple[TierRun, ...]


@dataclass(frozen=True, slots=True)
class ArenaStatus:
    """Whether a client reads blocks where they lie in the memory of a server on the same host.

    `off` says why it does not, and is empty before the first load and while it does. `extents` and `mapped_bytes` are
    what is mapped now; `loaded_bytes` were copied from there, and of `fallbacks` loads some bytes travelled.
    """

    off: str = ""
    extents: int = 0
    mapped_bytes: int = 0
    loaded_bytes: int = 0
    fallbacks: int = 0


class Link(Protocol):
    """A connection and the session that lives on it. Thread-safe. Once ended it stays so: make another one.

    `ends_at` is the moment, of time.monotonic(), by which a call must have ended; it raises UnavailableError then.
    """

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
        """End the session; idempotent, and waits for nobody. The server releases what it held."""
        ...

    def call(self, rpc: Rpc[R], request: Message, ends_at: float) -> R:
        """One call."""
        ...

    def match(self, lookup: Lookup, ends_at: float) -> Matched:
        """A lookup."""
        ...

    def new_id(self) -> int:
        """An id that names one lease or stage of this session."""
        ...

    def give_up(self, rpc: Rpc[R], request: Message, seconds: float) -> None:
        """Send a call that ends what we may or may not hold, without waiting. If it fails, the session is ended."""
        ...

    def load(self, request: pb.LoadRequest, target: NDArray[np.uint8], ends_at: float) -> int:
        """Receive leased blocks into the flat `target`; returns how many leading blocks are right."""
        ...

    def write(self, start: pb.WriteStart, source: NDArray[np.uint8], ends_at: float) -> int:
        """Send the flat `source` to a stage; returns how many rows were taken."""
        ...

    def ns_id(self, namespace: Namespace, ends_at: float) -> bytes:
        """The id of a namespace, which is opened in this session if it is not yet."""
        ...

    def read_in_place(self, request: pb.LoadRequest, ends_at: float) -> AbstractContextManager[list[NDArray[np.uint8]]]:
        """The bytes of leading blocks where they lie, while the block runs; none where that cannot be."""
        ...

    @property
    def arena(self) -> ArenaStatus:
        """Whether blocks are read where they lie."""
        ...


OPEN_NAMESPACE = Rpc(CACHE, "OpenNamespace", pb.OpenNamespaceResponse)


class OpenNamespaces:
    """The namespaces that one session has opened. Thread-safe: only ever added to, and the last one set at once."""

    def __init__(self) -> None:
        self._ids: dict[Namespace, bytes] = {}
        self._last: tuple[Namespace | None, bytes] = (None, b"")

    def ns_id(self, link: Link, namespace: Namespace, ends_at: float) -> bytes:
        """The id of a namespace, which is opened over `link` if it is not yet."""
        ns_id = self.known(namespace)
        if ns_id is None:
            request = open_request(link.session, namespace)
            ns_id = self.add(namespace, link.call(OPEN_NAMESPACE, request, ends_at))
        return ns_id

    def known(self, namespace: Namespace) -> bytes | None:
        """The id of a namespace that is open. Raises InvalidNamespaceError for what is none."""
        last, last_id = self._last
        if last is not None and namespace is last:  # nearly always, and cheaper than to hash all its fields
            return last_id
        require_namespace(namespace)
        ns_id = self._ids.get(namespace)
        if ns_id is not None:
            self._last = (namespace, ns_id)
        return ns_id

    def add(self, namespace: Namespace, answer: pb.OpenNamespaceResponse) -> bytes:
        """A namespace was opened; returns its id. Raises LayoutMismatchError if the server took it for another one."""
        _check_parts(namespace, answer)
        self._ids[namespace] = answer.ns_id
        self._last = (namespace, answer.ns_id)
        return answer.ns_id


def open_request(session: pb.SessionResponse, namespace: Namespace) -> pb.OpenNamespaceRequest:
    """Names a namespace to a session, and proves its secret."""
    proof = b""
    if namespace.secret is not None:
        proof = secret_proof(namespace.secret, session.challenge, namespace)
    return pb.OpenNamespaceRequest(
        session_id=session.session_id, namespace=convert.namespace_to_proto(namespace), proof=proof
    )


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
    if layout.symbols == Symbols.DIGESTS and answer.block_symbols != layout.block_symbols:
        raise LayoutMismatchError("the server knows no namespaces of digests; it is of another version: upgrade it")
