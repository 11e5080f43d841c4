"""The client for event loops: one connection for all tasks, nothing left by what is cancelled, nothing that hangs."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvstore
from kvstore.api import KvStore, Lease, Stage, StateLease, StateStage
from kvstore.errors import ClosedError, InvalidArgumentError, UnavailableError
from kvstore.testing.blocks import expected_rows, store_prompt
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.patience import ANSWER_SECONDS, SLACK_SECONDS, Stopwatch, until
from kvstore.testing.serving import ServedStore
from kvstore.testing.states import STATE_BYTES, STATE_LAYOUT, blob_of
from kvstore.transport.aio import AsyncClient
from kvstore.transport.aio_handles import AsyncLease, AsyncStage
from kvstore.transport.aio_states import AsyncStateLease, AsyncStateStage
from kvstore.transport.breaker import BreakerState
from kvstore.transport.link import flat_deadlines
from kvstore.types import Namespace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
STATES = Namespace(model="model", revision="revision", layout=STATE_LAYOUT)
STAGED = [7, *PROMPT]
DEADLINE_SECONDS = 0.1

SERVER_PROGRAM = """
import sys, kvstore
from kvstore.testing.serving import ServedStore
from kvstore.testing.states import STATE_BYTES, STATE_LAYOUT, blob_of
with kvstore.open(None, host_bytes=1 << 23) as store, ServedStore(store, [sys.argv[1]]) as served:
    print(served.addresses[0], flush=True)
    sys.stdin.read()
"""


class Gated:
    """A store whose leases and stages wait for a gate once they are asked for."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self.asked = threading.Event()
        self.opened = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def lease(self, *arguments: Any, **named: Any) -> Any:
        return self._waited(self._store.lease, *arguments, **named)

    def stage(self, *arguments: Any, **named: Any) -> Any:
        return self._waited(self._store.stage, *arguments, **named)

    def _waited(self, call: Any, *arguments: Any, **named: Any) -> Any:
        self.asked.set()
        assert self.gate.wait(ANSWER_SECONDS)
        held = call(*arguments, **named)
        self.opened.set()
        return held


@pytest.fixture
def store() -> Iterator[Gated]:
    with kvstore.open(None, host_bytes=64 * MIB) as store:
        yield Gated(store)


@pytest.fixture
def served(store: Gated, tmp_path: Path) -> Iterator[ServedStore]:
    with ServedStore(store, [f"unix://{tmp_path}/s"]) as served:
        yield served


def held(store: Any) -> tuple[int, int]:
    stats = store.stats()
    return stats.leases, stats.stages


def test_many_awaits_are_under_way_on_one_connection(store: Gated, served: ServedStore):
    async def look_up_beside_a_lease_that_waits() -> None:
        async with kvstore.connect_async(served.addresses[0]) as client:
            store_prompt(store._store, NAMESPACE, PROMPT)
            match = await client.match(NAMESPACE, PROMPT)
            store.gate.clear()
            waiting = asyncio.create_task(client.lease(match))
            await until(store.asked.is_set)
            found = await asyncio.gather(*(client.match(NAMESPACE, PROMPT[:end]) for end in range(41) for _ in "four"))
            assert [end // 4 for end in range(41) for _ in "four"] == [one.blocks for one in found]
            assert not waiting.done()
            assert 1 == served.server.connections["wire"]
            store.gate.set()
            assert BLOCKS == (await waiting).blocks

    asyncio.run(look_up_beside_a_lease_that_waits())


@pytest.mark.parametrize("lane", ["", "grpc+"])
@pytest.mark.parametrize("method", ["lease", "stage"])
def test_what_was_being_opened_for_a_cancelled_await_is_given_up(
    store: Gated, served: ServedStore, lane: str, method: str
):
    async def cancel() -> None:
        async with kvstore.connect_async(lane + served.addresses[0]) as client:
            store_prompt(store._store, NAMESPACE, PROMPT)
            match = await client.match(NAMESPACE, PROMPT)
            store.gate.clear()
            opening = client.lease(match) if method == "lease" else client.stage(NAMESPACE, STAGED)
            task = asyncio.create_task(opening)
            await until(store.asked.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            store.gate.set()
            await until(store.opened.is_set)
            await until(lambda: held(store) == (0, 0))
            assert BLOCKS == (await client.match(NAMESPACE, PROMPT)).blocks

    asyncio.run(cancel())


@pytest.mark.kill
def test_the_buffer_of_a_cancelled_transfer_is_free_when_its_await_returns(tmp_path: Path):
    process = start_server(f"unix://{tmp_path}/s")

    async def cancel(move: str) -> None:
        async with kvstore.connect_async(f"unix://{tmp_path}/s") as client:
            await store_and_check(client)
            lease = await client.lease(await client.match(NAMESPACE, PROMPT))
            stage = await client.stage(NAMESPACE, STAGED)
            buffer = np.zeros((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
            lease._held.link._arena.end()  # so that bytes travel
            await lease.load_into(buffer[:1])
            freeze(process)
            try:
                task = asyncio.create_task(lease.load_into(buffer) if move == "load" else stage.write_from(buffer))
                await until(lambda: bool(lease._held.link._pool._busy))
                task.cancel()
                watch = Stopwatch()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert watch.seconds < 10.0
                assert not lease._held.link._pool._busy
                buffer[:] = 1  # whoever is cancelled may use it for something else
            finally:
                process.send_signal(signal.SIGCONT)
            assert (buffer == 1).all()
            again = await client.lease(await client.match(NAMESPACE, PROMPT))
            assert BLOCKS == (await again.load_into(buffer)).blocks
            assert (expected_rows(NAMESPACE, PROMPT) == buffer).all()

    try:
        asyncio.run(cancel("load"))
        asyncio.run(cancel("write"))
    finally:
        process.kill()
        process.communicate()


async def store_and_check(client: AsyncClient) -> None:
    async with await client.stage(NAMESPACE, PROMPT) as stage:
        await stage.write_from(expected_rows(NAMESPACE, PROMPT))
    assert BLOCKS == (await client.match(NAMESPACE, PROMPT)).blocks


def start_server(address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", SERVER_PROGRAM, address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def freeze(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


class Held:
    """What calls need."""

    client: AsyncClient
    match: kvstore.PrefixMatch
    lease: AsyncLease
    stage: AsyncStage
    state_match: kvstore.PrefixMatch
    state_lease: AsyncStateLease
    state_stage: AsyncStateStage

    async def prepare(self, address: str) -> None:
        self.client = kvstore.connect_async(address)
        await store_and_check(self.client)
        self.match = await self.client.match(NAMESPACE, PROMPT)
        self.lease, self.stage = await self.client.lease(self.match), await self.client.stage(NAMESPACE, STAGED)
        async with await self.client.stage_state(STATES, PROMPT, state_bytes=STATE_BYTES) as storing:
            await storing.write_from(blob_of(STATES, PROMPT, STATE_BYTES))
        self.state_match = await self.client.match(STATES, PROMPT)
        self.state_lease = await self.client.lease_state(self.state_match)
        self.state_stage = await self.client.stage_state(STATES, STAGED, state_bytes=STATE_BYTES)
        self.client._deadlines = flat_deadlines(DEADLINE_SECONDS)
        for handle in (self.lease, self.stage, self.state_lease._rows, self.state_stage._rows):
            handle._held._deadlines = self.client._deadlines


OTHER = Namespace(model="other", revision="revision", layout=LAYOUT)
CALLS: dict[str, Callable[[Held], Awaitable[object]]] = {
    "KvStore.namespace_id": lambda held: held.client.namespace_id(OTHER),
    "KvStore.match": lambda held: held.client.match(NAMESPACE, PROMPT),
    "KvStore.prefetch": lambda held: held.client.prefetch(NAMESPACE, PROMPT),
    "KvStore.lease": lambda held: held.client.lease(held.match),
    "KvStore.stage": lambda held: held.client.stage(NAMESPACE, [8, *PROMPT]),
    "KvStore.lease_state": lambda held: held.client.lease_state(held.state_match),
    "KvStore.stage_state": lambda held: held.client.stage_state(STATES, [8, *PROMPT], state_bytes=1),
    "KvStore.pin": lambda held: held.client.pin(NAMESPACE, PROMPT),
    "KvStore.unpin": lambda held: held.client.unpin(1),
    "KvStore.hint_next_use": lambda held: held.client.hint_next_use(NAMESPACE, PROMPT, seconds=1),
    "KvStore.end_session": lambda held: held.client.end_session(NAMESPACE, PROMPT),
    "KvStore.evict": lambda held: held.client.evict(NAMESPACE, PROMPT),
    "KvStore.evict_writer": lambda held: held.client.evict_writer(7),
    "KvStore.writers_of": lambda held: held.client.writers_of(NAMESPACE, PROMPT),
    "KvStore.clear": lambda held: held.client.clear(NAMESPACE),
    "KvStore.stats": lambda held: held.client.stats(),
    "KvStore.verify": lambda held: held.client.verify(),
    "KvStore.scrub": lambda held: held.client.scrub(),
    "KvStore.events": lambda held: held.client.events(),
    "KvStore.flush": lambda held: held.client.flush(),
    "KvStore.status": lambda held: held.client.status(),
    "KvStore.nodes": lambda held: held.client.nodes(),
    "KvStore.drain": lambda held: held.client.drain(None),
    "KvStore.undrain": lambda held: held.client.undrain(),
    "KvStore.diagnosis": lambda held: held.client.diagnosis(),
    "KvStore.reset_diagnosis": lambda held: held.client.reset_diagnosis(),
    "KvStore.namespaces": lambda held: held.client.namespaces(),
    "KvStore.delete_namespace": lambda held: held.client.delete_namespace(bytes(16)),
    "KvStore.locate": lambda held: held.client.locate(NAMESPACE, PROMPT),
    "KvStore.within": lambda held: held.client.within(DEADLINE_SECONDS).match(NAMESPACE, np.arange(2**20)),
    "KvStore.close": lambda held: held.client.close(),
    "Lease.load_into": lambda held: held.lease.load_into(bytearray(BLOCKS * LAYOUT.block_bytes)),
    "Lease.read_in_place": lambda held: held.lease.read_in_place().__aenter__(),
    "Lease.release": lambda held: held.lease.release(),
    "Stage.write_from": lambda held: held.stage.write_from(expected_rows(NAMESPACE, STAGED)),
    "Stage.commit": lambda held: held.stage.commit(),
    "Stage.abort": lambda held: held.stage.abort(),
    "StateLease.load_into": lambda held: held.state_lease.load_into(bytearray(STATE_BYTES)),
    "StateLease.release": lambda held: held.state_lease.release(),
    "StateStage.write_from": lambda held: held.state_stage.write_from(bytes(STATE_BYTES)),
    "StateStage.commit": lambda held: held.state_stage.commit(),
    "StateStage.abort": lambda held: held.state_stage.abort(),
}
SHOWS_NOTHING = {"Lease.read_in_place"}
QUIET = {"KvStore.close", "Lease.release", "Stage.abort", "StateLease.release", "StateStage.abort"} | SHOWS_NOTHING
NOT_AWAITED = {"Stage.wanted"}


def public(kind: type, name: str) -> set[str]:
    return {f"{name}.{method}" for method, value in vars(kind).items() if callable(value) and method[0] != "_"}


def test_the_awaitable_methods_are_those_of_the_api_and_each_is_among_the_calls_that_must_not_hang():
    theirs = {"KvStore": KvStore, "Lease": Lease, "Stage": Stage, "StateLease": StateLease, "StateStage": StateStage}
    mine = {
        "KvStore": AsyncClient,
        "Lease": AsyncLease,
        "Stage": AsyncStage,
        "StateLease": AsyncStateLease,
        "StateStage": AsyncStateStage,
    }
    api = set().union(*(public(kind, name) for name, kind in theirs.items()))
    own = set().union(*(public(kind, name) for name, kind in mine.items()))
    assert own - {"Lease.open", "Stage.open"} - NOT_AWAITED == set(CALLS)
    own_names = (
        *("status", "within", "nodes", "locate", "drain", "undrain"),
        *("namespaces", "delete_namespace", "diagnosis", "reset_diagnosis"),
    )
    own_calls = {f"KvStore.{name}" for name in own_names}
    assert set(CALLS) - own_calls - SHOWS_NOTHING == api - NOT_AWAITED
    for name in api - {"KvStore.close"}:
        kind, method = name.split(".")
        assert inspect.iscoroutinefunction(getattr(mine[kind], method)) is (name not in NOT_AWAITED), name
        asked = list(inspect.signature(getattr(theirs[kind], method)).parameters)
        assert asked == list(inspect.signature(getattr(mine[kind], method)).parameters), name


@pytest.mark.kill
@pytest.mark.parametrize("lane", ["", pytest.param("grpc+", marks=pytest.mark.slow)])
def test_a_stopped_server_costs_an_await_at_most_twice_its_deadline(tmp_path: Path, lane: str):
    process = start_server(f"unix://{tmp_path}/s")

    async def outcome_of(name: str) -> tuple[str, float]:
        held = Held()
        await held.prepare(f"{lane}unix://{tmp_path}/s")
        freeze(process)
        watch = Stopwatch()
        try:
            await CALLS[name](held)
            outcome = "quiet"
        except UnavailableError:
            outcome = "unavailable"
        seconds = watch.seconds
        process.send_signal(signal.SIGCONT)
        await held.client.close()
        return outcome, seconds

    try:
        for name in CALLS:
            outcome, seconds = asyncio.run(outcome_of(name))
            assert ("quiet" if name in QUIET else "unavailable") == outcome, name
            assert seconds < 2 * DEADLINE_SECONDS + SLACK_SECONDS, name
    finally:
        process.kill()
        process.communicate()


@pytest.mark.kill
def test_a_client_goes_on_after_its_server_was_killed_and_the_breaker_opened(tmp_path: Path):
    address = f"unix://{tmp_path}/s"
    processes = [start_server(address)]

    async def live_on() -> None:
        async with kvstore.connect_async(address) as client:
            await store_and_check(client)
            lease = await client.lease(await client.match(NAMESPACE, PROMPT))
            processes[0].kill()
            processes[0].wait()
            for _ in range(5):
                with pytest.raises(UnavailableError):
                    await client.match(NAMESPACE, PROMPT)
            assert client.breaker.state is not BreakerState.CLOSED
            processes.append(await asyncio.to_thread(start_server, address))
            await until(lambda: client.breaker.state is BreakerState.CLOSED)
            await store_and_check(client)
            with pytest.raises(UnavailableError):
                await lease.load_into(bytearray(LAYOUT.block_bytes))
            await lease.release()

    try:
        asyncio.run(live_on())
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_long_prompts_are_read_and_bytes_moved_outside_the_loop(served: ServedStore, monkeypatch: pytest.MonkeyPatch):
    """Counted by what runs in the loop's thread, of calls with 128k tokens: no reading of tokens, no transfer."""
    in_loop: list[str] = []
    loops_thread = threading.get_ident()

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == loops_thread:
                in_loop.append(name)
            return function(*arguments, **named)

        return call

    from kvstore.transport import aio, wire_pool

    monkeypatch.setattr(aio, "as_prompt", watched("tokens", aio.as_prompt))
    monkeypatch.setattr(aio, "open_link", watched("probe", aio.open_link))
    for name in ("load", "write", "_open"):
        monkeypatch.setattr(wire_pool.BulkPool, name, watched(name, getattr(wire_pool.BulkPool, name)))

    async def use(tokens: Any) -> None:
        async with kvstore.connect_async(served.addresses[0]) as client:
            async with await client.stage(NAMESPACE, tokens) as stage:
                await stage.write_from(np.zeros((1000, LAYOUT.block_bytes), np.uint8))
            match = await client.match(NAMESPACE, tokens)
            async with await client.lease(match) as lease:
                await lease.load_into(np.zeros((1000, LAYOUT.block_bytes), np.uint8))
            assert 1000 == match.blocks

    asyncio.run(use(list(range(2**17))))
    asyncio.run(use(np.arange(2**17)))
    assert [] == in_loop
    asyncio.run(look_up_short(served.addresses[0]))
    assert ["tokens"] == in_loop


async def look_up_short(address: str) -> None:
    async with kvstore.connect_async(address) as client:
        await client.match(NAMESPACE, PROMPT)


def test_a_client_belongs_to_one_loop_and_is_of_no_use_when_closed(served: ServedStore):
    client = kvstore.connect_async(served.addresses[0])

    async def look_up() -> int:
        return (await client.match(NAMESPACE, PROMPT)).blocks

    async def look_up_and_close() -> None:
        assert 0 == await look_up()
        with pytest.raises(InvalidArgumentError, match="event loop"):
            await asyncio.to_thread(asyncio.run, look_up())
        await client.close()
        await client.close()
        with pytest.raises(ClosedError):
            await look_up()

    asyncio.run(look_up_and_close())


def test_a_cancelled_await_that_was_connecting_lets_the_others_connect(served: ServedStore):
    async def connect_twice() -> None:
        async with kvstore.connect_async(served.addresses[0]) as client:
            first = asyncio.create_task(client.match(NAMESPACE, PROMPT))
            second = asyncio.create_task(client.match(NAMESPACE, PROMPT))
            await asyncio.sleep(0)
            first.cancel()
            assert 0 == (await second).blocks
            with pytest.raises(asyncio.CancelledError):
                await first
            assert 1 == served.server.connections["wire"]

    asyncio.run(connect_twice())
