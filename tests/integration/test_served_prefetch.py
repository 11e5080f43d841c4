"""Prefetches of clients: they end with their session, and too many of anything are refused at once."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.errors import NoSpaceError, UnavailableError
from kvstore.store import StoreSettings, open_store
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore
from kvstore.tiers.disk_pool import DiskPool
from kvstore.transport.limits import ServiceLimits
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.store import Store

MIB = 1 << 20
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8192, dtype="int8", block_tokens=4)  # 64 KiB a block
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)
PROMPT_BLOCKS = 4
PROMPTS = 40  # a fifth more than host memory holds


def prompt_of(name: int) -> list[int]:
    return list(range(name * 10_000, name * 10_000 + PROMPT_BLOCKS * LAYOUT.block_tokens))


class Served:
    """A server over a full store whose reads from disk wait until they are let go."""

    def __init__(self, stack: ExitStack, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.reached = threading.Semaphore(0)
        stack.callback(self.gate.set)
        settings = StoreSettings(eviction_policy="lru", prefetch_ratio=1.0)
        self.store: Store = stack.enter_context(
            open_store(path, host_bytes=8 * MIB, disk_bytes=64 * MIB, settings=settings)
        )
        for name in range(PROMPTS):
            store_prompt(self.store, NAMESPACE, prompt_of(name))
        for name in range(8):
            assert self.store.match(NAMESPACE, prompt_of(name)).host_blocks == 0
        limits = ServiceLimits(prefetches_per_session=3, prefetch_waiters=2)
        self.served = ServedStore(self.store, [f"unix://{path}/socket"], limits=limits)
        stack.callback(self.served.stop)
        stack.callback(self.gate.set)
        self.addresses = {"wire": self.served.addresses[0], "grpc": "grpc+" + self.served.addresses[0]}
        read = DiskPool.read

        def gated(pool, *arguments, **named):  # type: ignore[no-untyped-def]
            self.reached.release()
            self.gate.wait()
            return read(pool, *arguments, **named)

        monkeypatch.setattr(DiskPool, "read", gated)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(stack, tmp_path, monkeypatch)


@pytest.fixture(params=["wire", "grpc"])
def client(served: Served, request: pytest.FixtureRequest) -> Iterator[kvstore.KvStore]:
    with kvstore.connect(served.addresses[request.param]) as client:
        assert request.param == client.status().lane
        yield client


def test_prefetches_of_a_session_end_with_it(served: Served, client: kvstore.KvStore) -> None:
    prefetches = [client.prefetch(NAMESPACE, prompt_of(name)) for name in range(3)]
    assert [False] * 3 == [prefetch.done for prefetch in prefetches]
    for _ in range(2):
        assert served.reached.acquire(timeout=ANSWER_SECONDS)
    client.close()
    # The third one waits for a thread, so it can end only by being cancelled.
    while served.store.stats().prefetches.get("cancelled", 0) < 1:
        pass
    served.gate.set()
    while served.store.stats().moves:
        pass
    assert {"cancelled": 3} == served.store.stats().prefetches
    with pytest.raises((UnavailableError, kvstore.ClosedError)):
        prefetches[0].wait()
    for prefetch in prefetches:
        prefetch.cancel()


def test_a_cancelled_prefetch_frees_its_place(served: Served, client: kvstore.KvStore) -> None:
    prefetches = [client.prefetch(NAMESPACE, prompt_of(name)) for name in range(3)]
    with pytest.raises(NoSpaceError, match="3 prefetches"):
        client.prefetch(NAMESPACE, prompt_of(3))
    prefetches[2].cancel()
    prefetches[2].cancel()
    while served.store.stats().prefetches.get("cancelled", 0) < 1:
        pass
    another = client.prefetch(NAMESPACE, prompt_of(3))
    served.gate.set()
    assert PROMPT_BLOCKS == another.wait()
    assert [PROMPT_BLOCKS] * 2 == [prefetch.wait() for prefetch in prefetches[:2]]
    assert PROMPT_BLOCKS == verified_blocks(client, NAMESPACE, prompt_of(3))
    assert {"done": 3, "cancelled": 1} == client.stats().prefetches


def test_what_has_ended_takes_no_place(served: Served, client: kvstore.KvStore) -> None:
    served.gate.set()
    for name in range(8):
        prefetch = client.prefetch(NAMESPACE, prompt_of(name))
        prefetch.wait()
        assert prefetch.done
    for _ in range(8):
        client.prefetch(NAMESPACE, prompt_of(0))


def test_callers_beyond_those_who_may_wait_are_refused_at_once(served: Served, client: kvstore.KvStore) -> None:
    outcomes: list[object] = []

    def wait(name: int) -> None:
        try:
            outcomes.append(client.prefetch(NAMESPACE, prompt_of(name), wait_seconds=None).host_blocks)
        except NoSpaceError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=wait, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    while not outcomes:
        threads[0].join(0.01)
    assert "2 prefetch calls are running already" in str(outcomes[0])
    served.gate.set()
    for thread in threads:
        thread.join()
    assert [PROMPT_BLOCKS] * 2 == outcomes[1:]


def test_lookups_go_on_while_others_wait_for_the_disk(served: Served, client: kvstore.KvStore) -> None:
    waiting = threading.Thread(target=lambda: client.prefetch(NAMESPACE, prompt_of(0), wait_seconds=None))
    waiting.start()
    assert served.reached.acquire(timeout=ANSWER_SECONDS)
    assert PROMPT_BLOCKS == client.match(NAMESPACE, prompt_of(PROMPTS - 1)).host_blocks
    assert PROMPT_BLOCKS == verified_blocks(client, NAMESPACE, prompt_of(PROMPTS - 1))
    served.gate.set()
    waiting.join()
