"""Ctrl-C at any moment of a call to a store in this process: no lease, stage, pin or slot stays that nobody ends."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvstore
from kvstore.store import interrupts
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.states import STATE_LAYOUT, store_state
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4)
BLOCKS = Namespace(model="model", revision="revision", layout=LAYOUT)
STATES = Namespace(model="model", revision="revision", layout=STATE_LAYOUT)
PROMPT = list(range(40))
OTHER = [7, *range(39)]
STORE_FOLDER = str(Path(interrupts.__file__).parent)
PLACES_MAX = 5000


class Interrupter:
    """Sends SIGINT at one of the places at which Python would hear it while the store's code runs, the `place`-th.

    Those are where a function begins and where a call of native code has returned. The functions that exchange the
    handler of the signal are left out: who is interrupted there has not begun, or has ended, and a handle that was
    opened ends with its time.
    """

    def __init__(self, place: int) -> None:
        self._left = place
        self.hit = False

    def run(self, call: Callable[[], object]) -> None:
        sys.setprofile(self._step)
        try:
            with suppress(KeyboardInterrupt):
                call()
        finally:
            sys.setprofile(None)

    def _step(self, frame: FrameType, event: str, _argument: object) -> None:
        if event not in ("call", "c_return") or self.hit:
            return
        file = frame.f_code.co_filename
        if file.startswith(STORE_FOLDER) and Path(file).name not in UNTOUCHED:
            self._left -= 1
            if self._left < 0:
                self.hit = True
                signal.raise_signal(signal.SIGINT)


# The lock is made for interrupts by itself; it has tests of its own.
UNTOUCHED = {"interrupts.py", "turn_lock.py"}


@pytest.fixture
def store() -> Iterator[kvstore.KvStore]:
    with kvstore.open(None, host_bytes=1 << 20) as store:
        yield store


def hold_and_release(store: kvstore.KvStore) -> None:
    held = store.lease(store.match(BLOCKS, PROMPT))
    try:
        assert held.blocks in (0, 10)
    finally:
        held.release()


def commit_and_drop(store: kvstore.KvStore) -> None:
    store_prompt(store, BLOCKS, OTHER)
    store.evict(BLOCKS, OTHER)


def store_and_drop_state(store: kvstore.KvStore) -> None:
    store_state(store, STATES, OTHER)
    with store.lease_state(store.match(STATES, OTHER)):
        pass
    store.evict(STATES, OTHER)


def pin_and_unpin(store: kvstore.KvStore) -> None:
    store.unpin(store.pin(BLOCKS, PROMPT, ttl_seconds=3600.0).pin_id)


def stage_and_abort(store: kvstore.KvStore) -> None:
    store.stage(BLOCKS, OTHER).abort()


CALLS = [hold_and_release, commit_and_drop, store_and_drop_state, pin_and_unpin, stage_and_abort]


def end_what_is_open(store: Any) -> None:
    """What the caller was never given, or lost, ends as it would when its time is over."""
    for handle in [*store._leases]:
        handle.release()
    for handle in [*store._stages]:
        handle.abort()
    store._pins.end([*store._pins._held])


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_any_moment_leaves_nothing_that_nobody_ends(
    store: kvstore.KvStore, call: Callable[[kvstore.KvStore], None]
) -> None:
    for place in range(PLACES_MAX):
        store_prompt(store, BLOCKS, PROMPT)
        interrupter = Interrupter(place)
        interrupter.run(lambda: call(store))
        if not interrupter.hit:
            break
        end_what_is_open(store)
        stats = store.stats()
        assert (0, 0) == (stats.leases, stats.stages)
        assert 10 == verified_blocks(store, BLOCKS, PROMPT), place
        store.evict(BLOCKS, OTHER)
        store.evict(STATES, OTHER)
        store.evict(BLOCKS, PROMPT)  # nobody holds anything
        assert 0 == store.stats().tiers[Tier.HOST.name.lower()].used_bytes, place
    else:
        pytest.fail(f"{call.__name__} runs more than {PLACES_MAX} places")
    assert place > 10
