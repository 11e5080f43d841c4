"""The engine of the fuzz targets: bytes that were right once, made wrong in a way that a seed repeats.

`make test` runs each target some thousand times from one fixed seed. KVSTORE_FUZZ_EXECUTIONS sets another number, and
then the seed is a new one each time; KVSTORE_FUZZ_SEED sets it, to see a failure again. KVSTORE_FUZZ_SECONDS ends a
target earlier. What was run is printed at the end, and kept where KVSTORE_RESULTS says.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

EXECUTIONS = os.environ.get("KVSTORE_FUZZ_EXECUTIONS")
SECONDS = float(os.environ.get("KVSTORE_FUZZ_SECONDS", "inf"))
SEED = os.environ.get("KVSTORE_FUZZ_SEED") or (os.urandom(8).hex() if EXECUTIONS else "1")
# Where limits, signs and lengths are gone wrong about.
NUMBERS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 127, 128, 255, 256, 4095, 4096, 65535, 65536)
EDGES = tuple(2**bits + near for bits in (31, 32, 40, 47, 48, 62, 63, 64) for near in (-1, 0, 1))
SPAN_BYTES_MAX = 64
RANDOM_BYTES_MAX = 300
MUTATIONS_MAX = 4
RUN: pytest.StashKey[list[dict[str, object]]] = pytest.StashKey()


class Mutator:
    """Makes input of one execution. All that it does follows from its seed."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def number(self, bits: int) -> int:
        """A number of so many bits, at a limit more often than not."""
        pick = self.random.random()
        if pick < 0.4:
            return self.random.choice(NUMBERS) % 2**bits
        return self.random.choice(EDGES) % 2**bits if pick < 0.7 else self.random.getrandbits(bits)

    def noise(self, limit: int = RANDOM_BYTES_MAX) -> bytes:
        """Bytes of no form."""
        return self.random.randbytes(self.random.randrange(limit))

    def mutated(self, seeds: Sequence[bytes]) -> bytes:
        """One of the seeds, changed in a few places; now and then as it was, or nothing but noise."""
        pick = self.random.random()
        if pick < 0.03:
            return self.noise()
        raw = bytearray(self.random.choice(seeds))
        if pick < 0.06:
            return bytes(raw)
        for _ in range(self.random.randint(1, MUTATIONS_MAX)):
            self.random.choice(_CHANGES)(self, raw, seeds)
        return bytes(raw)

    def flip_bit(self, raw: bytearray, _seeds: Sequence[bytes]) -> None:
        """Another bit somewhere."""
        if raw:
            raw[self.random.randrange(len(raw))] ^= 1 << self.random.randrange(8)

    def edit_number(self, raw: bytearray, _seeds: Sequence[bytes]) -> None:
        """Another number where one may be: a length, a count, a version."""
        size = self.random.choice((1, 2, 4, 8))
        if len(raw) >= size:
            place = self.random.randrange(len(raw) - size + 1)
            place -= place % size if self.random.random() < 0.7 else 0
            raw[place : place + size] = self.number(8 * size).to_bytes(size, "little")

    def cut(self, raw: bytearray, _seeds: Sequence[bytes]) -> None:
        """The end is missing."""
        if raw:
            del raw[self.random.randrange(len(raw)) :]

    def drop_span(self, raw: bytearray, _seeds: Sequence[bytes]) -> None:
        """Something in the middle is missing."""
        start = self.random.randrange(len(raw) + 1)
        del raw[start : start + self.random.randint(1, SPAN_BYTES_MAX)]

    def insert_noise(self, raw: bytearray, _seeds: Sequence[bytes]) -> None:
        """Something in the middle is too much."""
        start = self.random.randrange(len(raw) + 1)
        raw[start:start] = self.noise(SPAN_BYTES_MAX)

    def repeat_span(self, raw: bytearray, _seeds: Sequence[bytes]) -> None:
        """Something is there twice."""
        start = self.random.randrange(len(raw) + 1)
        raw[start:start] = raw[start : start + self.random.randint(1, SPAN_BYTES_MAX)]

    def splice(self, raw: bytearray, seeds: Sequence[bytes]) -> None:
        """It goes on as another seed does."""
        other = self.random.choice(seeds)
        place = self.random.randrange(min(len(raw), len(other)) + 1)
        raw[place:] = other[place:]


_CHANGES = (
    Mutator.flip_bit,
    Mutator.edit_number,
    Mutator.edit_number,
    Mutator.cut,
    Mutator.drop_span,
    Mutator.insert_noise,
    Mutator.repeat_span,
    Mutator.splice,
)


@dataclass
class Fuzz:
    """Runs one target, and counts what it ran."""

    name: str
    seed: str
    set_executions: int | None
    executions: int = 0
    crashes: int = 0
    seconds: float = 0.0

    def mutator(self, number: int) -> Mutator:
        """What makes the input of an execution."""
        return Mutator(f"{self.seed}/{number}")

    def batches(self, usual: int, size: int) -> Iterator[tuple[int, int]]:
        """The number of each batch of executions and its size, until all have run or the time is over."""
        wanted = usual if self.set_executions is None else self.set_executions
        began = time.monotonic()
        for number in range(-(-wanted // size)):
            if self.seconds >= SECONDS:
                return
            count = min(size, wanted - number * size)
            yield number, count
            self.executions += count
            self.seconds = time.monotonic() - began

    def tell(self, error: BaseException, where: str) -> None:
        """Whatever is raised is a bug: it is counted, and told with what repeats it."""
        self.crashes += isinstance(error, Exception)
        error.add_note(f"KVSTORE_FUZZ_SEED={self.seed}, {where}")

    def run(self, usual: int, make: Callable[[Mutator], T], target: Callable[[T], object]) -> None:
        """Give `target` what `make` makes."""
        for number, _ in self.batches(usual, 1):
            made = make(self.mutator(number))
            try:
                target(made)
            except BaseException as error:
                self.tell(error, f"execution {number}: {made!r}")
                raise

    def row(self) -> dict[str, object]:
        """What is said of the target at the end."""
        return {
            "target": self.name,
            "executions": self.executions,
            "crashes": self.crashes,
            "seconds": round(self.seconds, 1),
            "seed": self.seed,
        }


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: to open a file anew for each execution takes a disk milliseconds."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="kvstore-fuzz-", dir=shared) as folder:
        yield Path(folder)


@pytest.fixture
def fuzz(request: pytest.FixtureRequest, keep_result: Callable[[str, list[dict[str, object]]], None]) -> Iterator[Fuzz]:
    """The target of this test."""
    target = Fuzz(request.node.name, SEED, int(EXECUTIONS) if EXECUTIONS else None)
    yield target
    rows = request.config.stash.setdefault(RUN, [])
    rows.append(target.row())
    keep_result("fuzz.json", rows)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = terminalreporter.config.stash.get(RUN, [])
    if rows:
        terminalreporter.section("fuzz")
        for row in rows:
            terminalreporter.write_line(
                "{target}: {executions:,} executions, {crashes} crashes, seed {seed}".format(**row)
            )
