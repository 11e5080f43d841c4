"""AdminService: the calls of operators and warm-up jobs, over any store. Messages in, messages out; no gRPC in here."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from kvstore.api import SCRUB_BYTES
from kvstore.errors import InvalidArgumentError, NoSpaceError, PermissionDeniedError
from kvstore.nodes import NodeState
from kvstore.transport import convert, convert_doctor, convert_nodes
from kvstore.transport.cluster_view import ListingStore
from kvstore.transport.principal import caller
from kvstore.types import Verification
from kvstore.v1 import admin_service_pb2 as pb

if TYPE_CHECKING:
    from kvstore.transport.cluster_view import Diagnosing, Draining
    from kvstore.transport.state import ServiceState
    from kvstore.types import Namespace


_SCRUB_BYTES_MAX = 64 << 20
_DRAIN_WAIT_SECONDS_MAX = 10.0


class AdminService:
    """Answers kvstore.v1.AdminService; each method is the call of the same name."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._store = state.store

    async def pin(self, request: pb.PinRequest) -> pb.PinResponse:
        """Protect a prefix."""
        namespace = self._namespace(request.session_id, request.prompt.ns_id)
        tokens = convert.tokens_from_proto(request.prompt.tokens)
        if len(tokens) > self._state.limits.pin_tokens:
            raise NoSpaceError(f"the prompt has {len(tokens)} tokens, one pin takes {self._state.limits.pin_tokens}")
        root = convert.root_from_proto(request.prompt.root)
        ttl_seconds = convert.duration_seconds(request.ttl) if request.HasField("ttl") else None
        pin = await self._state.short.run(
            partial(self._store.pin, namespace, tokens, root=root, ttl_seconds=ttl_seconds),
            undo=lambda done: self._store.unpin(done.pin_id),
        )
        self._state.pins.add(pin.pin_id, namespace.tenant)
        return convert.pin_to_proto(pin)

    async def unpin(self, request: pb.UnpinRequest) -> pb.UnpinResponse:
        """End a pin; that of another tenant is not known."""
        tenant = caller().tenant
        if tenant is not None and not self._state.pins.is_of(request.pin_id, tenant):
            return pb.UnpinResponse(found=False)
        found = await self._state.short.run(partial(self._store.unpin, request.pin_id))
        self._state.pins.remove(request.pin_id)
        return pb.UnpinResponse(found=found)

    async def evict(self, request: pb.EvictRequest) -> pb.EvictResponse:
        """Drop a prefix."""
        namespace = self._namespace(request.session_id, request.prompt.ns_id)
        tokens = convert.tokens_from_proto(request.prompt.tokens)
        root = convert.root_from_proto(request.prompt.root)
        evict = partial(self._store.evict, namespace, tokens, root=root, from_block=request.from_block)
        return pb.EvictResponse(blocks=await self._state.long.run(evict))

    async def evict_writer(self, request: pb.EvictWriterRequest) -> pb.EvictWriterResponse:
        """Drop some of what a writer wrote."""
        page = await self._state.long.run(partial(self._store.evict_writer, request.writer))
        return pb.EvictWriterResponse(blocks=page.blocks, remaining_blocks=page.remaining_blocks)

    async def find_writers(self, request: pb.FindWritersRequest) -> pb.FindWritersResponse:
        """Say who wrote a prefix."""
        namespace = self._namespace(request.session_id, request.prompt.ns_id)
        tokens = convert.tokens_from_proto(request.prompt.tokens)
        root = convert.root_from_proto(request.prompt.root)
        found = await self._state.short.run(partial(self._store.writers_of, namespace, tokens, root=root))
        return pb.FindWritersResponse(runs=[pb.WriterRun(writer=run.writer, blocks=run.blocks) for run in found])

    async def clear(self, request: pb.ClearRequest) -> pb.ClearResponse:
        """Drop the blocks of a namespace."""
        namespace = self._namespace(request.session_id, request.ns_id)
        return pb.ClearResponse(blocks=await self._state.long.run(partial(self._store.clear, namespace)))

    async def flush(self, _request: pb.FlushRequest) -> pb.FlushResponse:
        """Wait for the disk."""
        await self._state.long.run(self._store.flush)
        return pb.FlushResponse()

    async def verify(self, _request: pb.VerifyRequest) -> pb.VerifyResponse:
        """Check the index; to a tenant tell what was found in its own namespaces."""
        found = await self._state.long.run(self._store.verify)
        tenant = caller().tenant
        if tenant is not None:
            found = _of_namespaces(found, [bytes(owned).hex() for owned in self._state.namespaces.of(tenant)])
        return pb.VerifyResponse(namespaces=found.namespaces, blocks=found.blocks, problems=found.problems)

    async def scrub(self, request: pb.ScrubRequest) -> pb.ScrubResponse:
        """Read some of what lies on disk."""
        limit_bytes = min(request.limit_bytes or SCRUB_BYTES, _SCRUB_BYTES_MAX)
        page = await self._state.long.run(partial(self._store.scrub, after=request.after, limit_bytes=limit_bytes))
        return pb.ScrubResponse(**asdict(page))

    async def list_nodes(self, _request: pb.ListNodesRequest) -> pb.ListNodesResponse:
        """The living nodes; none of a server that knows no cluster."""
        cluster = self._state.cluster
        if cluster is None:
            return pb.ListNodesResponse()
        nodes = await self._state.short.run(cluster.nodes)
        answer = pb.ListNodesResponse(node_name=cluster.node_name)
        for node in nodes:
            told = answer.gone if node.state is NodeState.GONE else answer.nodes
            told.append(convert_nodes.node_to_proto(node))
        return answer

    async def locate(self, request: pb.LocateRequest) -> pb.LocateResponse:
        """What each node holds of a prompt."""
        namespace = self._namespace(request.session_id, request.prompt.ns_id)
        tokens = convert.tokens_from_proto(request.prompt.tokens)
        root = convert.root_from_proto(request.prompt.root)
        cluster = self._state.cluster
        if cluster is None:
            return pb.LocateResponse()
        found = await self._state.short.run(partial(cluster.locate, namespace, tokens, root))
        return pb.LocateResponse(matches=[convert_nodes.node_match_to_proto(match) for match in found])

    async def drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        """Have this node drain, and say how far that is."""
        draining = self._draining()
        wait_seconds = convert.duration_seconds(request.wait)
        if not 0 <= wait_seconds <= _DRAIN_WAIT_SECONDS_MAX:
            raise InvalidArgumentError(f"wait is {wait_seconds} s, expected 0..{_DRAIN_WAIT_SECONDS_MAX}")
        if request.HasField("order"):
            await self._state.short.run(partial(draining.begin, convert_nodes.drain_order_from_proto(request.order)))
        progress = draining.progress
        if wait_seconds and not progress.is_done:
            progress = await self._state.prefetch.run(partial(draining.wait, wait_seconds))
        return convert_nodes.drain_progress_to_proto(progress)

    async def undrain(self, _request: pb.UndrainRequest) -> pb.UndrainResponse:
        """Have it take part again."""
        return pb.UndrainResponse(drained=await self._state.short.run(self._draining().undo))

    async def list_namespaces(self, _request: pb.ListNamespacesRequest) -> pb.ListNamespacesResponse:
        """The namespaces of this node; to a tenant its own."""
        store = self._namespaces_of_store()
        found = await self._state.short.run(store.namespaces)
        tenant = caller().tenant
        told = [convert_nodes.namespace_to_proto(one) for one in found if tenant is None or one.tenant == tenant]
        return pb.ListNamespacesResponse(namespaces=told)

    async def delete_namespace(self, request: pb.DeleteNamespaceRequest) -> pb.DeleteNamespaceResponse:
        """Delete a namespace, here and everywhere; one of another tenant is not known."""
        tenant, deletions = caller().tenant, self._state.deletions
        if tenant is not None and not self._state.namespaces.is_of(request.ns_id, tenant):
            raise PermissionDeniedError(
                f"namespace {request.ns_id.hex()[:32]} was not opened by tenant {tenant!r}; prove its secret first"
            )
        if deletions is None:
            raise InvalidArgumentError("this server deletes no namespaces; clear it in its store")
        done = await self._state.long.run(partial(deletions.delete, request.ns_id))
        return pb.DeleteNamespaceResponse(epoch=done.epoch, blocks=done.blocks, told=done.is_told)

    async def get_diagnosis(self, _request: pb.GetDiagnosisRequest) -> pb.GetDiagnosisResponse:
        """Why prompts were not found; to a tenant what is its own."""
        report = await self._state.short.run(partial(self._doctor().report, caller().tenant))
        return convert_doctor.report_to_proto(report)

    async def reset_diagnosis(self, _request: pb.ResetDiagnosisRequest) -> pb.ResetDiagnosisResponse:
        """Count anew."""
        await self._state.short.run(self._doctor().reset)
        return pb.ResetDiagnosisResponse()

    def _namespaces_of_store(self) -> ListingStore:
        if not isinstance(self._store, ListingStore):
            raise InvalidArgumentError("the store of this server does not list its namespaces")
        return self._store

    def _doctor(self) -> Diagnosing:
        if self._state.doctor is None:
            raise InvalidArgumentError("the doctor of this server is off; start it with doctor.enabled=true")
        return self._state.doctor

    def _draining(self) -> Draining:
        if self._state.draining is None:
            raise InvalidArgumentError(
                "this node is alone (cluster.directory is empty), so there is nobody to hand over to; stop it as it is"
            )
        return self._state.draining

    def _namespace(self, session_id: bytes, ns_id: bytes) -> Namespace:
        return self._state.sessions.get(session_id).namespace(ns_id)


def _of_namespaces(found: Verification, ns_ids: list[str]) -> Verification:
    """What concerns these namespaces: the problems by their names, and no number of blocks, which is of all."""
    problems = tuple(text for text in found.problems if any(ns_id in text for ns_id in ns_ids))
    return Verification(len(ns_ids), 0, problems)
