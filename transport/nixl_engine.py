"""NIXL with UCX as an engine for remote memory: RDMA where there are adapters, else shared memory or TCP.

The extra `nixl` installs it. What is used is the Python API of https://github.com/ai-dynamo/nixl, version 1.5, with the
backend UCX (https://openucx.readthedocs.io), whose own variables (UCX_TLS, UCX_NET_DEVICES) choose among transports.

No progress thread: a process that has had one crashes when it ends, and it would take a whole core. So UCX moves bytes
in software, over TCP and shared memory, only while somebody waits for a transfer or polls.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
import uuid
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import BulkEngineError, ConfigError
from kvstore.transport.bulk import METADATA_BYTES_MAX, Move

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAME = "nixl"
_MODULES = ("nixl_cu13", "nixl_cu12")  # the same, built for one CUDA or the other; neither needs it
_MEMORY = "DRAM"
# Between two looks at a transfer. A fiftieth of what 16 MiB take at 10 GB/s; without it the interpreter would be busy.
_NAP_SECONDS = 50e-6
# How often it is asked whether anybody still wants the transfer: a system call.
_LOOKS_PER_QUESTION = 20
# What a peer that is let go gets, so that UCX closes what it had for it.
_FAREWELL_LOOKS = 200
# How long a transfer that nobody waits for may take to end by itself, as it does where its peer has died.
_GRACE_SECONDS = 0.25
logger = logging.getLogger(__name__)


def load_nixl() -> Any:  # noqa: ANN401  # a module without types
    """The API of NIXL. Raises ConfigError if it is not installed."""
    for module in _MODULES:
        try:
            api = importlib.import_module(f"{module}._api")
        except ModuleNotFoundError as err:
            if err.name != module:
                raise ConfigError(f"bulk engine {NAME!r}: {module} cannot be imported: {err}") from err
            continue
        except ImportError as err:
            raise ConfigError(f"bulk engine {NAME!r}: {module} cannot be imported: {err}") from err
        logging.getLogger(api.logger.name).setLevel(logging.WARNING)  # it would write to stdout
        return api
    raise ConfigError(f"bulk engine {NAME!r} is not installed; `pip install prefix-kvstore[nixl]`")


class NixlEngine:
    """A kvstore.transport.bulk.BulkEngine. Raises ConfigError where NIXL or its UCX cannot be had.

    A transfer that does not end cannot be taken back: NIXL lets go of its handle, and UCX goes on sending from the
    memory when the peer is well again. So the agent is ended then, with all its connections, and a new one begins with
    the same memory; transfers of others that were under way fail with it.

    `_lock` is held during each call of NIXL, which is not safe for threads as it is used here, and guards all below
    it. Where UCX moves bytes by copies, it does so in such a call: one at a time, as many bytes as one transfer has.
    """

    def __init__(self) -> None:
        self._api = load_nixl()
        self._name = f"{NAME}/{metadata.version(self._api.__name__.partition('.')[0])}"
        self._errors = _errors_of(self._api.nixlBind)
        self._lock = threading.Lock()
        self._peers: dict[bytes, NixlPeer] = {}
        self._regions: set[NixlRegion] = set()
        self._transfers: set[NixlTransfer] = set()
        self._restarts = 0
        self._agent: Any = self._start()  # None once closed

    @property
    def name(self) -> str:
        """With its version: what NIXL and UCX say of themselves is read without checks, so only the same ones meet."""
        return self._name

    @property
    def restarts(self) -> int:
        """How often a transfer that did not end has cost the agent."""
        with self._lock:
            return self._restarts

    def register(self, address: int, nbytes: int) -> NixlRegion:
        """Make memory known: for adapters it is pinned."""
        with self._lock, self._as_ours(f"register {nbytes} bytes"):
            region = NixlRegion(self, address, nbytes)
            region.descriptors = self._registered(self._open_agent(), region)
            self._regions.add(region)
            return region

    def metadata(self) -> bytes:
        """What a peer needs to reach this engine and all memory that is registered now."""
        with self._lock, self._as_ours("describe itself"):
            description: bytes = self._open_agent().get_agent_metadata()
            return description

    def connect(self, metadata: bytes) -> NixlPeer:
        """The peer that says this of itself; each call of it is ended by one disconnect().

        Native code reads it, and may end the process over bytes that no NIXL has made.
        """
        if not 0 < len(metadata) <= METADATA_BYTES_MAX:
            raise BulkEngineError(f"the peer's metadata has {len(metadata)} bytes, expected 1..{METADATA_BYTES_MAX}")
        with self._lock, self._as_ours("take the peer's metadata"):
            peer = self._peers.get(metadata)
            if peer is None:
                name = self._open_agent().add_remote_agent(metadata)
                peer = self._peers[metadata] = NixlPeer(self, metadata, name)
            peer.users += 1
            return peer

    def poll(self) -> None:
        """Do what is to be done for transfers that the peers have begun."""
        with self._lock, self._as_ours("poll"):
            if self._agent is not None:
                self._agent.get_new_notifs()

    def close(self) -> None:
        """End all connections; idempotent."""
        with self._lock:
            self._end_agent()
            self._regions.clear()

    def deregister(self, region: NixlRegion) -> None:
        """For NixlRegion."""
        with self._lock, suppress(*self._errors):
            if region in self._regions:
                self._regions.remove(region)
                if self._agent is not None:
                    self._agent.deregister_memory(region.descriptors)

    def begin(self, peer: NixlPeer, operation: str, moves: Sequence[Move]) -> NixlTransfer:
        """For NixlPeer."""
        local, remote = np.zeros((2, len(moves), 3), dtype=np.uint64)  # address, bytes, device
        local[:, 0], remote[:, 0] = [move.local for move in moves], [move.remote for move in moves]
        local[:, 1] = remote[:, 1] = [move.nbytes for move in moves]
        with self._lock, self._as_ours(f"begin to {operation} {len(moves)} pieces"):
            agent = self._open_agent()
            if peer.is_gone:
                raise BulkEngineError("the peer was let go")
            here, there = agent.get_xfer_descs(local, _MEMORY), agent.get_xfer_descs(remote, _MEMORY)
            transfer = NixlTransfer(self, peer, agent.initialize_xfer(operation, here, there, peer.agent_name))
            self._transfers.add(transfer)
            try:
                transfer.state = agent.transfer(transfer.handle)
            except self._errors as err:
                self._give_up(transfer, err)
                raise
            return transfer

    def look(self, transfer: NixlTransfer) -> bool:
        """For NixlTransfer: whether all has moved. It is over then, and if this raises because its peer is gone."""
        with self._lock, self._as_ours("go on with a transfer"):
            if transfer not in self._transfers:
                raise BulkEngineError("the engine was started again in the middle of a transfer")
            if transfer.state == "PROC":
                try:
                    transfer.state = self._agent.check_xfer_state(transfer.handle)
                except self._errors as err:
                    self._give_up(transfer, err)
                    raise
            if transfer.state == "PROC":
                return False
            if transfer.state != "DONE":
                raise BulkEngineError(f"a transfer ended as {transfer.state}")
            self._end_transfer(transfer)
            return True

    def break_off(self, transfer: NixlTransfer) -> None:
        """For NixlTransfer: see to it that it moves nothing any more, whatever that costs."""
        with self._lock:
            if transfer in self._transfers:
                self._restart()

    def leave(self, peer: NixlPeer) -> None:
        """For NixlPeer: one user less."""
        with self._lock:
            peer.users -= 1
            if not peer.users:
                self._let_go(peer)

    def _start(self) -> Any:  # noqa: ANN401  # as load_nixl()
        settings = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            agent = self._api.nixl_agent(f"kvstore-{uuid.uuid4().hex}", settings)
        except self._errors as err:
            raise ConfigError(f"bulk engine {NAME!r} does not start: {_said(err)}") from err
        if "UCX" not in agent.backends:
            raise ConfigError(f"bulk engine {NAME!r} comes without UCX here; look at the output of NIXL")
        return agent

    def _give_up(self, transfer: NixlTransfer, error: Exception) -> None:
        """End a transfer that failed. If its peer is gone nothing can reach that; else some of it may still move."""
        if isinstance(error, self._api.nixlBind.nixlRemoteDisconnectError):
            self._end_transfer(transfer)
            self._let_go(transfer.peer)
        else:
            self._restart()

    def _restart(self) -> None:
        """End the agent with all that it was doing, and begin another with the same memory. 0.1 s."""
        self._restarts += 1
        self._end_agent()
        failures: tuple[type[Exception], ...] = (*self._errors, ConfigError)
        try:
            self._agent = self._start()
            for region in self._regions:
                region.descriptors = self._registered(self._agent, region)
        except failures:
            self._agent = None
            logger.exception("an engine for bytes is lost, all bytes go over sockets: engine=%s", NAME)

    def _end_agent(self) -> None:
        for transfer in tuple(self._transfers):
            self._end_transfer(transfer)
        for peer in tuple(self._peers.values()):
            self._let_go(peer)
        self._agent = None  # the last reference: handles have theirs, and were let go

    def _end_transfer(self, transfer: NixlTransfer) -> None:
        self._transfers.discard(transfer)
        with suppress(*self._errors):
            transfer.handle.release()
        transfer.handle = None

    def _let_go(self, peer: NixlPeer) -> None:
        if peer.is_gone or self._agent is None:
            return
        peer.is_gone = True
        self._peers.pop(peer.metadata, None)
        with suppress(*self._errors):
            self._agent.remove_remote_agent(peer.agent_name)
            for _ in range(_FAREWELL_LOOKS):
                self._agent.get_new_notifs()

    def _registered(self, agent: Any, region: NixlRegion) -> object:  # noqa: ANN401  # as load_nixl()
        descriptors: object = agent.register_memory([(region.address, region.nbytes, 0, "")], _MEMORY)
        return descriptors

    def _open_agent(self) -> Any:  # noqa: ANN401  # as load_nixl()
        if self._agent is None:
            raise BulkEngineError("the engine is closed")
        return self._agent

    def _as_ours(self, what: str) -> _Translated:
        return _Translated(self._errors, what)


class NixlRegion:
    """Registered memory; `descriptors` are the engine's, under its lock."""

    def __init__(self, engine: NixlEngine, address: int, nbytes: int) -> None:
        self._engine = engine
        self.address = address
        self.nbytes = nbytes
        self.descriptors: object = None

    def deregister(self) -> None:
        """Let NIXL forget it; idempotent."""
        self._engine.deregister(self)


class NixlPeer:
    """A peer; the counter and `is_gone` belong to the engine, under its lock."""

    def __init__(self, engine: NixlEngine, metadata: bytes, agent_name: object) -> None:
        self._engine = engine
        self.metadata = metadata
        self.agent_name = agent_name
        self.users = 0
        self.is_gone = False

    def write(self, moves: Sequence[Move]) -> NixlTransfer:
        """Begin to write to the peer's memory."""
        return self._engine.begin(self, "WRITE", moves)

    def read(self, moves: Sequence[Move]) -> NixlTransfer:
        """Begin to read the peer's memory."""
        return self._engine.begin(self, "READ", moves)

    def disconnect(self) -> None:
        """Let the peer go once its last user has. Whoever has a transfer under way is a user."""
        self._engine.leave(self)


class NixlTransfer:
    """A transfer; its fields belong to the engine, under its lock."""

    def __init__(self, engine: NixlEngine, peer: NixlPeer, handle: Any) -> None:  # noqa: ANN401  # as load_nixl()
        self._engine = engine
        self.peer = peer
        self.handle: Any = handle
        self.state = "PROC"

    def wait(self, ends_at: float, is_unwanted: Callable[[], bool]) -> None:
        """Return when all bytes have moved; see kvstore.transport.bulk.Transfer."""
        looks = 0
        given_up: str | None = None
        try:
            while not self._engine.look(self):
                looks += 1
                if given_up is None:
                    if time.monotonic() >= ends_at:
                        given_up = "the time of a transfer is over"
                    elif not looks % _LOOKS_PER_QUESTION and is_unwanted():
                        given_up = "nobody waits for a transfer any more"
                    if given_up is not None:
                        ends_at = time.monotonic() + _GRACE_SECONDS
                elif time.monotonic() >= ends_at:
                    break
                time.sleep(_NAP_SECONDS)
        except BaseException:
            self._engine.break_off(self)
            raise
        if given_up is not None:
            self._engine.break_off(self)
            raise BulkEngineError(given_up)


class _Translated:
    """NIXL's errors become ours, with what was to be done."""

    def __init__(self, errors: tuple[type[Exception], ...], what: str) -> None:
        self._errors = errors
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._errors):
            raise BulkEngineError(f"NIXL could not {self._what}: {_said(error)}") from error


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _errors_of(bindings: Any) -> tuple[type[Exception], ...]:  # noqa: ANN401  # as load_nixl()
    """The classes of NIXL's errors, which have no root of their own."""
    values = vars(bindings).values()
    return tuple(value for value in values if isinstance(value, type) and issubclass(value, Exception))
