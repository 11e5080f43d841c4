"""Clients that show certificates and tokens: those for event loops get in as those for threads do, on both lanes."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.errors import ConfigError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from kvstore.testing.blocks import expected_rows, store_prompt
from kvstore.testing.conformance import BLOCKS, LAYOUT, MIB, PROMPT
from kvstore.testing.serving import ServedStore
from kvstore.transport import convert
from kvstore.transport.breaker import BreakerState
from kvstore.types import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.events import EventPage
    from kvstore.transport.aio import AsyncClient
    from kvstore.transport.breaker import BreakerStatus

pytest.importorskip("cryptography", reason="needs the extra certs")
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.securing import Keyring

NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT, tenant="ours")
LANES = {"wire": "", "grpc": "grpc+"}
PARALLEL = 16


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    keyring = Keyring(tmp_path / "keys")
    keyring.let_in("writer", "ours", "write")
    return keyring


@pytest.fixture
def served(keyring: Keyring) -> Iterator[ServedStore]:
    with (
        kvstore.open(None, host_bytes=8 * MIB) as store,
        ServedStore(store, ["tls://localhost:0"], security=keyring.security()) as served,
    ):
        yield served


@pytest.fixture(params=LANES)
def address(request: pytest.FixtureRequest, served: ServedStore) -> str:
    return LANES[request.param] + served.addresses[0]


def connected(address: str, keyring: Keyring, token: str = "writer") -> AsyncClient:
    return kvstore.connect_async(address, tls_ca=keyring.ca, token_file=keyring.path(f"{token}.token"))


async def store_and_load(client: AsyncClient, tokens: list[int]) -> None:
    rows = expected_rows(NAMESPACE, tokens)
    async with await client.stage(NAMESPACE, tokens) as stage:
        assert len(rows) == await stage.write_from(rows)
    loaded = np.zeros_like(rows)
    async with await client.lease(await client.match(NAMESPACE, tokens)) as lease:
        assert len(rows) == (await lease.load_into(loaded)).blocks
    assert np.array_equal(rows, loaded)


def test_many_tasks_move_their_own_bytes_over_one_session(address: str, keyring: Keyring):
    async def work() -> str:
        async with connected(address, keyring) as client:
            await asyncio.gather(*(store_and_load(client, [number, *PROMPT]) for number in range(PARALLEL)))
            return (await client.status()).lane

    assert address.startswith("grpc+") is (asyncio.run(work()) == "grpc")


def test_answers_longer_than_a_read_arrive_whole(served: ServedStore, keyring: Keyring):
    long_prompt = [*range(BLOCKS * LAYOUT.block_tokens * 64)]

    async def work() -> EventPage:
        async with connected(served.addresses[0], keyring) as client:
            for number in range(PARALLEL):
                await store_and_load(client, [number, *long_prompt])
            return await client.events(limit=10_000)

    page = asyncio.run(work())
    assert 2 * 64 * 1024 < convert.page_to_proto(page).ByteSize()
    threaded = kvstore.connect(served.addresses[0], tls_ca=keyring.ca, token_file=keyring.path("writer.token"))
    with threaded as client:
        assert client.events(limit=10_000) == page


def test_what_the_role_does_not_allow_is_refused_and_the_session_goes_on(address: str, keyring: Keyring):
    async def work() -> None:
        async with connected(address, keyring) as client:
            for attempt in (client.flush, client.verify, client.scrub):
                with pytest.raises(PermissionDeniedError, match="'writer' has write"):
                    await attempt()
            await store_and_load(client, PROMPT)

    asyncio.run(work())


def test_the_disk_of_all_tenants_is_read_by_no_operator_of_one(address: str, served: ServedStore, keyring: Keyring):
    for name, tenant in (("operator", "ours"), ("root", "*")):
        keyring.let_in(name, tenant, "admin")
    served.reload()

    async def work() -> int:
        async with connected(address, keyring, "operator") as client:
            with pytest.raises(PermissionDeniedError, match="all tenants"):
                await client.scrub()
        async with connected(address, keyring, "root") as client:
            return (await client.scrub()).blocks

    assert 0 == asyncio.run(work())


def test_a_stranger_is_told_so_and_no_breaker_opens(address: str, keyring: Keyring):
    async def work() -> BreakerState:
        async with kvstore.connect_async(address, tls_ca=keyring.ca) as client:
            for _ in range(5):
                with pytest.raises(UnauthenticatedError, match="name the file that has yours"):
                    await client.match(NAMESPACE, PROMPT)
            return client.breaker.state

    assert BreakerState.CLOSED is asyncio.run(work())


def test_a_server_of_another_authority_is_not_spoken_to(served: ServedStore, tmp_path: Path):
    other = Keyring(tmp_path / "other")
    other.let_in("writer", "ours", "write")

    async def work() -> None:
        async with connected(served.addresses[0], other) as client:
            with pytest.raises(UnauthenticatedError, match="not trusted"):
                await client.stats()

    asyncio.run(work())


def test_a_session_ends_with_its_token_and_a_new_token_opens_another(
    address: str, served: ServedStore, keyring: Keyring
):
    async def work() -> None:
        async with connected(address, keyring) as client:
            await store_and_load(client, PROMPT)
            lease = await client.lease(await client.match(NAMESPACE, PROMPT))
            keyring.keep_out("writer")
            await asyncio.to_thread(served.reload)
            for _ in range(5):
                with pytest.raises(UnauthenticatedError):
                    await client.match(NAMESPACE, PROMPT)
            await lease.release()
            keyring.let_in("writer", "ours", "write")
            await asyncio.to_thread(served.reload)
            assert BLOCKS == (await client.match(NAMESPACE, PROMPT)).blocks
            assert BreakerState.CLOSED is client.breaker.state

    asyncio.run(work())


def test_an_await_that_is_cancelled_in_the_handshake_leaves_no_connection(keyring: Keyring):
    async def give_up(address: str) -> None:
        async with kvstore.connect_async(address, tls_ca=keyring.ca) as client:
            asking = asyncio.create_task(client.match(NAMESPACE, PROMPT))
            accepted, _ = await asyncio.to_thread(listening.accept)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        with accepted:
            accepted.settimeout(ANSWER_SECONDS)
            while accepted.recv(4096):
                pass  # the hello of TLS, which nobody answers, and then the end

    with socket.create_server(("127.0.0.1", 0)) as listening:
        asyncio.run(give_up(f"tls://127.0.0.1:{listening.getsockname()[1]}"))


@pytest.mark.kill
def test_a_child_of_a_fork_opens_a_session_of_its_own_over_tls(served: ServedStore, keyring: Keyring):
    token_file = keyring.path("writer.token")
    with kvstore.connect(served.addresses[0], tls_ca=keyring.ca, token_file=token_file) as client:
        store_prompt(client, NAMESPACE, PROMPT)
        child = os.fork()
        if child == 0:
            os._exit(client.match(NAMESPACE, PROMPT).blocks)
        assert BLOCKS == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert BLOCKS == client.match(NAMESPACE, PROMPT).blocks


def test_a_server_that_comes_back_and_knows_us_no_more_says_so_itself(tmp_path: Path, keyring: Keyring):
    address = f"unix://{tmp_path}/s"
    closed = threading.Event()

    def changed(status: BreakerStatus) -> None:
        if status.state is BreakerState.CLOSED:
            closed.set()

    stranger = kvstore.connect(address, on_breaker_change=changed)
    with stranger as client, kvstore.open(None, host_bytes=MIB) as store:
        for _ in range(3):
            with pytest.raises(UnavailableError):
                client.stats()
        assert BreakerState.CLOSED is not client.breaker.state
        with ServedStore(store, [address], security=keyring.security()):
            assert closed.wait(ANSWER_SECONDS)
            with pytest.raises(UnauthenticatedError):
                client.stats()


@pytest.mark.parametrize("connect", [kvstore.connect, kvstore.connect_async])
def test_a_token_is_not_sent_in_the_clear_to_other_machines(connect, keyring: Keyring):
    with pytest.raises(ConfigError, match="for all to read"):
        connect("192.0.2.1:7070", token_file=keyring.path("writer.token"))
    with pytest.raises(ConfigError, match="no TLS"):
        connect("127.0.0.1:7070", tls_ca=keyring.ca)
