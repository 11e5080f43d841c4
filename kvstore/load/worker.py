"""One client under load: does operations by its own dice until the time is over, and checks every byte it loads."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import kvstore
from kvstore.errors import KvstoreError
from kvstore.load.histogram import LatencyHistogram
from kvstore.load.plan import LoadPlan, Operation

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

_TALLY_BYTES = 8
_FAILED_PAUSE_SECONDS = 0.001


class WrongBytesError(KvstoreError):
    """The server gave back other bytes than were stored."""


@dataclass(slots=True)
class Tally:
    """What clients have done. `latencies` are those of operations that went well."""

    latencies: dict[Operation, LatencyHistogram] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    lookup_blocks: int = 0
    hit_blocks: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0

    def merge(self, other: Tally) -> None:
        """Add what others did."""
        for operation, latencies in other.latencies.items():
            self.latencies.setdefault(operation, LatencyHistogram()).merge(latencies)
        self.errors.update(other.errors)
        self.lookup_blocks += other.lookup_blocks
        self.hit_blocks += other.hit_blocks
        self.loaded_bytes += other.loaded_bytes
        self.stored_bytes += other.stored_bytes


class LoadClient:
    """A client and its dice. Used by one thread."""

    def __init__(self, plan: LoadPlan, index: int) -> None:
        self.tally = Tally()
        self._plan = plan
        self._namespace = plan.namespace
        self._dice = random.Random(plan.seed * 1_000_003 + index)
        self._actions: dict[Operation, Callable[[int], object]] = {
            Operation.MATCH: self._match,
            Operation.LOAD: self._load,
            Operation.STORE: self._store,
        }
        self._operations = [operation for operation, _ in plan.mix]
        self._shares = [share for _, share in plan.mix]
        self._next_own = index << 40
        self._rows = np.zeros((plan.prompt_blocks, plan.block_bytes), dtype=np.uint8)
        self._client = kvstore.connect(plan.address, **plan.files)

    def run_until(self, ends_at: float) -> None:
        """Do one operation after the other."""
        with self._client:
            with suppress(KvstoreError):  # whoever cannot connect is told so by its operations
                self._client.status()  # with more time than a lookup has, and not counted as one
            while time.monotonic() < ends_at:
                self._do(self._dice.choices(self._operations, self._shares)[0])

    def _do(self, operation: Operation) -> None:
        family = self._family()
        begin = time.perf_counter_ns()
        try:
            self._actions[operation](family)
        except KvstoreError as error:
            self.tally.errors[type(error).__name__] += 1
            time.sleep(_FAILED_PAUSE_SECONDS)  # a breaker that is open answers in no time
            return
        latencies = self.tally.latencies.setdefault(operation, LatencyHistogram())
        latencies.record(time.perf_counter_ns() - begin)

    def _family(self) -> int:
        """A prompt that others ask for too; the first ones much more often than the last."""
        return int(self._plan.prompts * self._dice.random() ** 3)

    def _match(self, family: int) -> kvstore.PrefixMatch:
        match = self._client.match(self._namespace, prompt_of(self._plan, family))
        self.tally.lookup_blocks += self._plan.prompt_blocks
        self.tally.hit_blocks += match.blocks
        return match

    def _load(self, family: int) -> None:
        """Load what is there of a prompt; store it if that is nothing, so that there is something the next time."""
        match = self._match(family)
        if not match.blocks:
            self._write(family)
            return
        with self._client.lease(match) as lease:
            done = lease.load_into(self._rows[: lease.blocks]) if lease.blocks else None
        blocks = 0 if done is None else done.blocks
        self.tally.loaded_bytes += blocks * self._plan.block_bytes
        if not (tallies_of(self._rows[:blocks]) == expected_tallies(family, blocks)).all():
            raise WrongBytesError(f"prompt {family} came back with other bytes than were stored")

    def _store(self, _family: int) -> None:
        """Store a prompt that nobody else has."""
        self._next_own += 1
        self._write(self._next_own)

    def _write(self, family: int) -> None:
        blocks = self._plan.prompt_blocks
        self._rows[:, :_TALLY_BYTES] = expected_tallies(family, blocks).view(np.uint8).reshape(blocks, _TALLY_BYTES)
        self._rows[:, -_TALLY_BYTES:] = self._rows[:, :_TALLY_BYTES]
        with self._client.stage(self._namespace, prompt_of(self._plan, family)) as stage:
            rows = stage.write_from(self._rows) if stage.blocks else 0
        self.tally.stored_bytes += rows * self._plan.block_bytes


def prompt_of(plan: LoadPlan, family: int) -> NDArray[np.uint32]:
    """The token ids of a prompt; different from the first block on."""
    tokens = np.arange(plan.prompt_tokens, dtype=np.uint32)
    low, high = family & 0xFFFF_FFFF, family >> 32
    tokens[:: plan.block_tokens] ^= np.uint32(low)
    if plan.block_tokens > 1:
        tokens[1 :: plan.block_tokens] ^= np.uint32(high)
    return tokens


def expected_tallies(family: int, blocks: int) -> NDArray[np.uint64]:
    """What each block of a prompt begins and ends with."""
    mixed = np.uint64(family * 0x9E3779B97F4A7C15 % 2**64)
    tallies: NDArray[np.uint64] = np.arange(blocks, dtype=np.uint64) ^ mixed
    return tallies


def tallies_of(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """What rows begin with, all ones where they end with something else."""
    first = np.ascontiguousarray(rows[:, :_TALLY_BYTES]).view(np.uint64).reshape(-1)
    last = np.ascontiguousarray(rows[:, -_TALLY_BYTES:]).view(np.uint64).reshape(-1)
    tallies: NDArray[np.uint64] = np.where(first == last, first, ~np.uint64(0))
    return tallies


def run_clients(plan: LoadPlan, indices: range, told: Connection) -> None:
    """Run some clients, each in a thread, and send their tally: what a process of the load does."""
    clients = [LoadClient(plan, index) for index in indices]
    ends_at = time.monotonic() + plan.seconds  # the first client has waited for all that is imported
    threads = [threading.Thread(target=client.run_until, args=(ends_at,)) for client in clients]
    for thread in threads:
        thread.start()
    whole = Tally()
    for thread, client in zip(threads, clients, strict=True):
        thread.join()
        whole.merge(client.tally)
    told.send(whole)
    told.close()
