"""The gRPC server of a sidecar: binds addresses, serves a store on them, and stops in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.transport.address import parse_address
from kvstore.transport.admin import AdminService
from kvstore.transport.calls import CallRoot
from kvstore.transport.listen import BoundAddress, bind
from kvstore.transport.service import CacheService
from kvstore.transport.state import ServiceState
from kvstore.v1 import admin_service_pb2, cache_service_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.api import KvStore
    from kvstore.transport.limits import CallObserver, NamespaceSecrets, ServiceLimits

_SERVICES = (
    cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"],
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
)
_KEEPALIVE_TIME_MS = 20_000
_KEEPALIVE_TIMEOUT_MS = 10_000
_EXTRA_CALLS = 64


class GrpcServer:
    """Serves `store` on the addresses of `listen`. Lives in one event loop; start it once, stop it once.

    Stopping ends all sessions and leaves the store to its owner.
    """

    def __init__(
        self,
        store: KvStore,
        *,
        listen: Sequence[str],
        secrets: NamespaceSecrets,
        limits: ServiceLimits,
        observer: CallObserver | None,
    ) -> None:
        self._listen = [parse_address(text) for text in listen]
        self._limits = limits
        self._root = CallRoot(observer)
        self._state = ServiceState(store, secrets, limits)
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs are older
        self._server: Any = None
        self._bound: list[BoundAddress] = []

    @property
    def failures(self) -> int:
        """Calls, and ends of leases and stages, that failed with an error that is none of kvstore's own."""
        return self._root.failures + self._state.unended_handles

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
                self._bound.append(bind(self._server, address))
        except BaseException:
            await self.stop(0)
            raise
        await self._server.start()
        for service in ("", *(service.full_name for service in _SERVICES)):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return [str(bound.address) for bound in self._bound]

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, let open ones run for `grace_seconds`, end all sessions. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        await self._health.enter_graceful_shutdown()
        for bound in self._bound:
            bound.remove()
        self._bound.clear()
        stopped = asyncio.ensure_future(server.stop(grace_seconds))
        idle = asyncio.ensure_future(self._root.wait_idle())
        await asyncio.wait((stopped, idle), return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        self._state.stopping.set()
        await stopped
        await self._state.close()

    def _register(self) -> None:
        implementations = (CacheService(self._state), AdminService(self._state))
        for service, implementation in zip(_SERVICES, implementations, strict=True):
            self._server.add_generic_rpc_handlers((self._root.handler(service, implementation),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*(service.full_name for service in _SERVICES), "grpc.health.v1.Health", reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)


def _options(limits: ServiceLimits) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),  # else a taken port would be shared in silence
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),  # a client whose machine is gone loses its session
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_TIMEOUT_MS // 2),
    ]


def _concurrent_calls(limits: ServiceLimits) -> int:
    calls = limits.short_calls + limits.bulk_calls + limits.long_calls + limits.event_readers
    return limits.sessions + calls + _EXTRA_CALLS
