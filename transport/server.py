"""The server of a sidecar: binds addresses, serves a store on them over both lanes, and stops in order."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.transport.address import ARENA_CHOICES, parse_address
from kvstore.transport.admin import AdminService
from kvstore.transport.admission import Admission
from kvstore.transport.calls import CallRoot
from kvstore.transport.left_over import sweep_beside
from kvstore.transport.listen import BoundAddress, Door, SocketServer, bind, is_for_grpc_itself
from kvstore.transport.reload import Reloader
from kvstore.transport.security import local_security
from kvstore.transport.service import CacheService
from kvstore.transport.state import ServiceState
from kvstore.transport.wire_lane import WireLane
from kvstore.transport.wire_listen import Lanes, Listener
from kvstore.transport.wire_splice import Passages
from kvstore.v1 import admin_service_pb2, cache_service_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.api import KvStore
    from kvstore.transport.address import TcpAddress, UnixAddress
    from kvstore.transport.arena_service import ArenaUse
    from kvstore.transport.bulk_rows import BulkEngineHost
    from kvstore.transport.cluster_view import ClusterView, Deleting, Diagnosing, Draining
    from kvstore.transport.limits import CallObserver, NamespaceSecrets, ServiceLimits
    from kvstore.transport.listen import PortServer
    from kvstore.transport.security import Security

SERVICES = (
    cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"],
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
)
_KEEPALIVE_TIME_MS = 20_000
_KEEPALIVE_TIMEOUT_MS = 10_000
_EXTRA_CALLS = 64
_FOLDER_PREFIX = "kvstore-"
_SOCKET_NAME = "grpc"
_METADATA_BYTES = 16 * 1024  # a token, and what proxies add
# How soon a changed file is noticed, and whose token has expired is sent away.
_LOOK_SECONDS = 1.0


class TransportServer:
    """Serves `store` on the addresses of `listen`. Lives in one event loop; start it once, stop it once.

    An address carries the fast lane and gRPC, unless its scheme asks for gRPC alone. What comes to a shared address and
    is gRPC's goes on to a private socket of gRPC, which has no name that anybody else could connect to. So does gRPC
    over TLS: TLS is ended here, the same for both lanes.

    Stopping ends all sessions, and `bulk_engine`, and leaves the store to its owner.
    """

    def __init__(
        self,
        store: KvStore,
        *,
        listen: Sequence[str],
        secrets: NamespaceSecrets,
        limits: ServiceLimits,
        observer: CallObserver | None,
        security: Security | None = None,
        bulk_engine: BulkEngineHost | None = None,
        arena: str = ARENA_CHOICES[0],
        cluster: ClusterView | None = None,
        draining: Draining | None = None,
        deletions: Deleting | None = None,
        doctor: Diagnosing | None = None,
    ) -> None:
        self._listen = [parse_address(text) for text in listen]
        self._limits = limits
        self._security = security if security is not None else local_security()
        access, clock = self._security.access, self._security.clock
        self._state = ServiceState(store, secrets, limits, access, clock)
        self._state.bulk_engine = bulk_engine
        self._state.lends_memory = arena == "map"
        self._state.cluster = cluster
        self._state.draining = draining
        self._state.deletions = deletions
        self._state.doctor = doctor
        self._admission = Admission(access, self._state.tenants)
        self._root = CallRoot(observer, self._admission)
        self._reloader = Reloader(self._security.reloadables(), clock)
        self._looking: asyncio.Task[None] | None = None
        self._cache = CacheService(self._state)
        self._admin = AdminService(self._state)
        self._lane = WireLane(self._state, self._root, self._cache, self._admin)
        self._shared = SocketServer()
        self._doors: list[Door] = []
        self._passages: Passages | None = None
        self._listener: Listener | None = None
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs are older
        self._server: Any = None
        self._bound: list[BoundAddress] = []

    @property
    def unready(self) -> str | None:
        """Why calls are not taken now; None: they are."""
        if self._lane.stopping:
            return "stopping"
        return None if self._bound and self._looking is not None else "starting"

    @property
    def dead_threads(self) -> list[str]:
        """Threads that serve calls and have ended though nobody stopped them."""
        passages = self._passages
        return [] if passages is None or passages.alive else [passages.thread_name]

    @property
    def failures(self) -> int:
        """Calls, and ends of leases and stages, that failed with an error that is none of kvstore's own."""
        passages = 0 if self._passages is None else self._passages.failures
        return self._root.failures + self._state.unended_handles + passages

    async def start(self) -> list[str]:
        """Bind and serve; returns the addresses with their real ports.

        Raises ConfigError if an address cannot be bound; nothing is served then.
        """
        self._server = grpc.aio.server(
            options=_options(self._limits), maximum_concurrent_rpcs=_concurrent_calls(self._limits)
        )
        self._register()
        try:
            for address in self._listen:
                self._bound.append(self._bind(address))
            if self._shared.sockets:
                self._passages = Passages(_private_listener(self._server), self._admission.origins)
        except BaseException:
            await self.stop(0)
            raise
        await self._server.start()
        for service in ("", *(service.full_name for service in SERVICES)):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        if self._passages is not None:
            self._lane.start()
            lanes = Lanes(self._lane, self._passages, self._security.tls)
            self._listener = Listener(self._doors, lanes, self._limits.connections)
            self._listener.start()
        self._looking = asyncio.create_task(self._look_after_files())
        return [str(bound.address) for bound in self._bound]

    async def reload(self) -> None:
        """Read certificates, access file and keys again, changed or not; what has become bad stays as it was."""
        if await self._reloader.load_all():
            self._state.dismiss_strangers()

    async def _look_after_files(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._reloader.look()
                self._state.dismiss_strangers()
            except Exception as error:  # noqa: BLE001  # the root of the task
                # Who has expired must be sent away next time, whatever went wrong with a file this time.
                self._root.count_failure("look after files", error)

    def _bind(self, address: UnixAddress | TcpAddress) -> BoundAddress:
        rules = self._security.rules
        if is_for_grpc_itself(address, rules):
            return bind(self._server, address, rules)
        first = len(self._shared.sockets)
        bound = bind(self._shared, address, rules)
        self._doors += self._shared.doors(address, first)
        return bound

    @property
    def connections(self) -> dict[str, int]:
        """Connections to shared addresses that are open now, by lane."""
        passages, listener = self._passages, self._listener
        return {
            "wire": self._lane.connections,
            "grpc": passages.count if passages is not None else 0,
            "undecided": listener.undecided if listener is not None else 0,
        }

    @property
    def transfers(self) -> int:
        """Loads and writes of bytes that are under way on the fast lane."""
        return self._lane.bulk.depth

    @property
    def refused_connections(self) -> dict[str, int]:
        """Connections to shared addresses that were refused, or ended for what came on them, by reason."""
        return dict(self._lane.refused_connections)

    @property
    def refused_by_tenant_limits(self) -> dict[str, int]:
        """Calls refused for what their tenant has open already, or how fast it asks, by limit."""
        return dict(self._state.tenants.refused)

    @property
    def reloads(self) -> dict[tuple[str, str], int]:
        """Loads of files that changed, by what was loaded and whether it was taken."""
        return dict(self._reloader.outcomes)

    @property
    def resent_prompts(self) -> int:
        """Prompts that a client of the fast lane had to send whole since their beginning was not known here."""
        return self._lane.resent_prompts

    @property
    def arena_use(self) -> ArenaUse:
        """What processes on this host map of host memory."""
        return self._lane.arena_use

    @property
    def bulk_engine_bytes(self) -> dict[str, int]:
        """Bytes that the engine for remote memory has moved, by direction."""
        return {} if self._state.bulk_engine is None else self._state.bulk_engine.moved_bytes

    @property
    def bulk_engine_failures(self) -> dict[str, int]:
        """What the engine for remote memory could not do."""
        return {} if self._state.bulk_engine is None else self._state.bulk_engine.failures

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, let open ones run for `grace_seconds`, end all sessions. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        await self._health.enter_graceful_shutdown()
        self._lane.stopping = True
        if self._looking is not None:
            self._looking.cancel()
        if self._listener is not None:
            await self._listener.stop()
        for bound in self._bound:
            bound.remove()
        self._bound.clear()
        self._shared.close()
        stopped = asyncio.ensure_future(server.stop(grace_seconds))
        idle = asyncio.ensure_future(self._root.wait_idle())
        await asyncio.wait((idle,), timeout=grace_seconds)  # gRPC's own stop knows nothing of calls on the fast lane
        idle.cancel()
        self._state.stopping.set()
        await self._lane.stop()
        await stopped
        if self._passages is not None:
            await asyncio.to_thread(self._passages.stop)
        if self._security.tls is not None:
            self._security.tls.close()
        await self._state.close()

    def _register(self) -> None:
        for service, implementation in zip(SERVICES, (self._cache, self._admin), strict=True):
            self._server.add_generic_rpc_handlers((self._root.handler(service, implementation),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*(service.full_name for service in SERVICES), "grpc.health.v1.Health", reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)


def _private_listener(server: PortServer) -> int:
    """Let gRPC listen on a socket whose name is gone at once; returns a descriptor of it, by which one can connect."""
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX) as directory:
        sweep_beside(Path(directory), _FOLDER_PREFIX, _SOCKET_NAME)
        path = f"{directory}/{_SOCKET_NAME}"
        server.add_insecure_port(f"unix:{path}")
        inner = os.open(path, os.O_PATH | os.O_CLOEXEC)
        os.unlink(path)
    return inner


def _options(limits: ServiceLimits) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),  # else a taken port would be shared in silence
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * _METADATA_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),  # a client whose machine is gone loses its session
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_TIMEOUT_MS // 2),
    ]


def _concurrent_calls(limits: ServiceLimits) -> int:
    calls = limits.short_calls + limits.bulk_calls + limits.long_calls + limits.event_readers
    return limits.sessions + calls + _EXTRA_CALLS
