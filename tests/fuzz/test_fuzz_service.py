"""Every call of the API, fed with messages gone wrong: only errors of kvstore come out, and nothing is left behind."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
from collections import Counter
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf.message_factory import GetMessageClass

import kvstore
from kvstore.doctor import Report
from kvstore.errors import InvalidArgumentError, KvstoreError
from kvstore.nodes import Deletion, DrainOrder, DrainProgress
from kvstore.testing.blocks import store_prompt
from kvstore.testing.conformance import BLOCKS, LAYOUT, PROMPT
from kvstore.tokens import as_token_array
from kvstore.transport import calls, frames, service
from kvstore.transport.admin import AdminService
from kvstore.transport.convert import duration_seconds, namespace_to_proto, prompt_to_proto
from kvstore.transport.limits import ServiceLimits
from kvstore.transport.principal import Principal, enter
from kvstore.transport.roles import Role
from kvstore.transport.security import local_security
from kvstore.transport.state import ServiceState
from kvstore.types import Namespace
from kvstore.v1 import admin_service_pb2 as admin_pb
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    import pytest
    from conftest import Fuzz, Mutator
    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message

MIB = 1 << 20
KIB = 1 << 10
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
LIMITS = ServiceLimits(
    message_bytes=256 * KIB,
    frame_bytes=64 * KIB,
    bulk_buffer_bytes=256 * KIB,
    row_bytes=MIB,
    leases_per_session=8,
    stages_per_session=8,
    prefetches_per_session=8,
    namespaces_per_session=8,
)
SERVICES = (pb.DESCRIPTOR.services_by_name["CacheService"], admin_pb.DESCRIPTOR.services_by_name["AdminService"])
METHODS = [method for one in SERVICES for method in one.methods if method.name != "Session"]
# Those that hold or move something come more often.
OFTEN = ("OpenNamespace", "Match", "Lease", "Load", "Stage", "Write", "Commit", "Prefetch", "Pin")
OPENING = {"Lease": "lease_id", "Stage": "stage_id", "Prefetch": "prefetch_id"}
WEIGHTS = [4 if method.name in OFTEN else 1 for method in METHODS]
CALLS_PER_SESSION = 50
SESSIONS_PER_STORE = 40
# What waits is cut short; what takes longer than this hangs.
WAIT_NANOS = 100_000
CALL_SECONDS_MAX = 60.0
WATCHED_SECONDS = 0.001
IDS = 4
CALLS = 4_000


class Attacker:
    """One session on the services of a store; each call is made of the names that are good in it, and then damaged."""

    def __init__(self, state: ServiceState, mutator: Mutator, outcomes: Counter[str]) -> None:
        self.state = state
        self.cache = service.CacheService(state)
        self.admin = AdminService(state)
        self.mutator = mutator
        self.outcomes = outcomes
        self.session_id = b""
        self.ns_id = b""
        self.pins: list[int] = []
        self.held: dict[str, list[int]] = {"lease_id": [], "stage_id": [], "prefetch_id": []}
        self.ids = itertools.count(1)
        self.last = ""

    async def attack(self, count: int) -> None:
        """Open a session, make so many calls, and end it."""
        enter(Principal("someone", None, Role.ADMIN, "local"))
        end = asyncio.Event()
        greetings = self.cache.session(self._hellos(end))
        async with aclosing(greetings):
            self.session_id = (await anext(greetings)).session_id
            opened = await self.cache.open_namespace(
                pb.OpenNamespaceRequest(session_id=self.session_id, namespace=namespace_to_proto(NAMESPACE))
            )
            self.ns_id = opened.ns_id
            first = [method for method in METHODS if method.name in OPENING]
            for method in (*first, *self.mutator.random.choices(METHODS, WEIGHTS, k=count))[:count]:
                await self._call(method)
            end.set()
            assert [] == [one async for one in greetings]
        for pin_id in self.pins:
            await self.admin.unpin(admin_pb.UnpinRequest(pin_id=pin_id))

    async def _hellos(self, end: asyncio.Event) -> AsyncIterator[pb.SessionRequest]:
        with suppress(KvstoreError):
            raw = self.mutator.mutated([pb.SessionRequest(client_version="1", token="token").SerializeToString()])
            calls._decode(pb.SessionRequest, raw)
        yield pb.SessionRequest()
        await end.wait()

    async def _call(self, method: Any) -> None:
        raws = self._damaged(method)
        self.last = f"{method.name} {[raw.hex() for raw in raws]}"
        try:
            async with asyncio.timeout(CALL_SECONDS_MAX):
                outcome = await self._answer(method, raws)
        except KvstoreError as error:
            outcome = type(error).__name__
        self.outcomes[f"{method.name} {outcome}"] += 1

    async def _answer(self, method: Any, raws: list[bytes]) -> str:
        implementation = self.admin if method.containing_service is SERVICES[1] else self.cache
        answer = getattr(implementation, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower())
        kind = GetMessageClass(method.input_type)
        if method.client_streaming:
            frames.encode(await answer(calls._decode_all(kind, _stream(raws))))
        elif method.server_streaming:
            async with aclosing(answer(calls._decode(kind, raws[0]))) as pages:
                await _read(pages, WATCHED_SECONDS if method.name == "WatchEvents" else None)
        else:
            response = await answer(_cut_short(calls._decode(kind, raws[0])))
            frames.encode(response)
            if method.name == "Pin":
                self.pins.append(response.pin_id)
            elif method.name in OPENING:
                self.held[OPENING[method.name]].append(getattr(kind.FromString(raws[0]), OPENING[method.name]))
        return "OK"

    def _damaged(self, method: Any) -> list[bytes]:
        """The bytes of a request; of Write those of its frames as well."""
        message = self._good(method)
        pick = self.mutator.random.random()
        if pick < 0.4:
            for _ in range(self.mutator.random.randint(1, 3)):
                self._damage(message)
        raw = message.SerializeToString()
        raws = [self.mutator.mutated([raw]) if pick > 0.8 else raw]
        if method.client_streaming:
            row = pb.WriteRequest(frame=bytes(LAYOUT.block_bytes)).SerializeToString()
            good = self.mutator.random.random() < 0.6
            count = message.start.blocks if good else self.mutator.random.randrange(IDS)
            rows = [row] * min(count, BLOCKS)
            raws += rows if good else [self.mutator.mutated([row, raw]) for _ in rows]
        return raws

    def _good(self, method: Any) -> Any:
        """A request that may well be answered."""
        message: Any = GetMessageClass(method.input_type)()
        if method.client_streaming:
            message.start.SetInParent()
            self._fill(message.start, method.name)
        else:
            self._fill(message, method.name)
        return message

    def _fill(self, message: Any, method: str) -> None:
        random = self.mutator.random
        blocks = random.randint(1, BLOCKS)
        tokens = as_token_array(PROMPT)[: blocks * LAYOUT.block_tokens] + 1000 * random.choice((0, 0, 0, 1, 2))
        values: dict[str, Callable[[], Any]] = {
            "session_id": lambda: self.session_id,
            "ns_id": lambda: self.ns_id,
            "prompt": lambda: prompt_to_proto(self.ns_id, None, tokens),
            "namespace": lambda: namespace_to_proto(NAMESPACE),
            "blocks": lambda: random.randint(1, blocks),
            "from_block": lambda: 0,
            **{name: partial(self._id, name, method) for name in self.held},
            "pin_id": lambda: random.choice((*self.pins, 1)),
        }
        for field in message.DESCRIPTOR.fields:
            if field.name not in values:
                continue
            value = values[field.name]()
            if field.message_type is None:
                setattr(message, field.name, value)
            else:
                getattr(message, field.name).CopyFrom(value)

    def _id(self, name: str, method: str) -> int:
        """A new one for what opens something, else one of the last few that were opened."""
        known = self.held[name][-IDS:]
        return next(self.ids) if OPENING.get(method) == name or not known else self.mutator.random.choice(known)

    def _damage(self, message: Any) -> None:
        """Another value in one field, somewhere in the message."""
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self.mutator.random.choice(fields)
        held = getattr(message, field.name)
        if field.message_type is not None:
            inner = held.add() if hasattr(held, "extend") else held
            inner.SetInParent()
            self._damage(inner)
        elif hasattr(held, "extend"):
            held.extend(self._value(field, b"") for _ in range(self.mutator.random.randrange(4)))
        else:
            setattr(message, field.name, self._value(field, held))

    def _value(self, field: FieldDescriptor, held: Any) -> Any:
        mutator = self.mutator
        if field.type == field.TYPE_BYTES:
            return mutator.mutated([held or b"\0"])
        if field.type == field.TYPE_STRING:
            return mutator.noise(80).decode("latin-1")
        if field.type == field.TYPE_BOOL:
            return mutator.random.random() < 0.5
        bits = 64 if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) else 32
        number = mutator.number(bits)
        is_unsigned = field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64)
        return number if is_unsigned else number - (1 << bits if number >> (bits - 1) else 0)


async def _stream(raws: list[bytes]) -> AsyncIterator[bytes]:
    for raw in raws:
        yield raw


async def _read(pages: AsyncIterator[Message | bytes], seconds: float | None) -> None:
    """What a client reads before it goes: all, or what comes in so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for page in pages:
                frames.encode(page)


def _cut_short(message: Any) -> Any:
    """The same, with a wait that is allowed made short."""
    wait = getattr(message, "wait", None)
    if wait is not None and 0 < duration_seconds(wait) <= service.EVENT_WAIT_SECONDS_MAX:
        wait.Clear()
        wait.nanos = WAIT_NANOS
    return message


def test_only_errors_of_kvstore_come_out_and_nothing_is_left(
    fuzz: Fuzz, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_WATCH_SECONDS", WAIT_NANOS / 1e9)
    outcomes: Counter[str] = Counter()
    batches = fuzz.batches(CALLS, CALLS_PER_SESSION)
    for first in batches:
        path = memory_path / str(first[0])
        with kvstore.open(path, host_bytes=4 * MIB, disk_bytes=16 * MIB) as store:
            for number, count in itertools.chain((first,), itertools.islice(batches, SESSIONS_PER_STORE - 1)):
                store_prompt(store, NAMESPACE, PROMPT)
                try:
                    asyncio.run(attacked(store, fuzz.mutator(number), count, outcomes))
                    assert_nothing_is_left(store)
                except BaseException as error:
                    fuzz.tell(error, f"session {number}")
                    raise
        shutil.rmtree(path)
    never = [method.name for method in METHODS if not outcomes[f"{method.name} OK"]]
    assert fuzz.executions < CALLS or [] == never, outcomes


class Alone:
    """The cluster's side of a node that is alone: it drains as it is told, deletes what it has, and has a doctor."""

    def __init__(self, store: kvstore.KvStore) -> None:
        self.store = store
        self.progress = DrainProgress()

    def begin(self, order: DrainOrder) -> None:
        if order.targets:
            raise InvalidArgumentError("no such nodes")
        self.progress = DrainProgress(is_draining=True)

    def wait(self, _seconds: float) -> DrainProgress:
        return self.progress

    def undo(self) -> bool:
        drained, self.progress = self.progress.is_draining, DrainProgress()
        return drained

    def applied(self, _ns_id: bytes) -> int:
        return 0

    def report(self, _tenant: str | None) -> Report:
        return Report(1.0, 0, 0, {}, ())

    def reset(self) -> None:
        """Nothing was counted."""

    def delete(self, ns_id: bytes) -> Deletion:
        return Deletion(1, self.store.delete_namespace(ns_id), is_told=True)


async def attacked(store: kvstore.KvStore, mutator: Mutator, count: int, outcomes: Counter[str]) -> None:
    """One session of so many calls on services of their own."""
    security = local_security(Role.ADMIN)
    state = ServiceState(store, {"": [b"secret"]}, LIMITS, security.access, security.clock)
    state.draining = state.deletions = state.doctor = Alone(store)
    attacker = Attacker(state, mutator, outcomes)
    try:
        await attacker.attack(count)
    except BaseException as error:
        error.add_note(f"the last call: {attacker.last}")
        raise
    finally:
        await state.close()
    assert (0, 0, 0) == (len(state.sessions), state.unended_handles, len(asyncio.all_tasks()) - 1)


def assert_nothing_is_left(store: kvstore.KvStore) -> None:
    stats = store.stats()
    assert (0, 0, 0) == (stats.leases, stats.stages, stats.pins)
    assert () == store.verify().problems
