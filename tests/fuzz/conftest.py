"""The engine of the fuzz targets: bytes that were right once, made wrong in a way that a seed repeats.

`make test` runs each target some thousand times from one fixed seed. KVSTORE_FUZZ_EXECUTIONS sets another number, and
then the seed is a new one each time; KVSTORE_FUZZ_SEED sets it, to see a failure again. What was run is printed at the
end.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

EXECUTIONS = os.environ.get("KVSTORE_FUZZ_EXECUTIONS")
SEED = os.environ.get("KVSTORE_FUZZ_SEED") or (os.urandom(8).hex() if EXECUTIONS else "1")
# Where limits, signs and lengths are gone wrong about.
NUMBERS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 127, 128, 255, 256, 4095, 4096, 65535, 65536)
EDGES = tuple(2**bits + near for bits in (31, 32, 40, 47, 48, 62, 63, 64) for near in (-1, 0, 1))
SPAN_BYTES_MAX = 64
RANDOM_BYTES_MAX = 300
MUTATIONS_MAX = 4
RUN: pytest.StashKey[list[str]] = pytest.StashKey()


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


@dataclass(frozen=True)
class Fuzz:
    """Runs one target; `executions` is how often."""

    name: str
    seed: str
    reports: list[str]
    set_executions: int | None

    def executions(self, usual: int) -> int:
        """How often the target runs: as the environment says, else `usual`. It is reported."""
        count = self.set_executions if self.set_executions is not None else usual
        self.reports.append(f"{self.name}: {count:,} executions, seed {self.seed}")
        return count

    def mutator(self, number: int) -> Mutator:
        """What makes the input of an execution."""
        return Mutator(f"{self.seed}/{number}")

    def run(self, usual: int, make: Callable[[Mutator], T], target: Callable[[T], object]) -> None:
        """Give `target` what `make` makes; whatever it raises is a bug, and is told with what repeats it."""
        for number in range(self.executions(usual)):
            made = make(self.mutator(number))
            try:
                target(made)
            except BaseException as error:
                error.add_note(f"KVSTORE_FUZZ_SEED={self.seed}, execution {number}: {made!r}")
                raise


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    reports = request.config.stash.setdefault(RUN, [])
    return Fuzz(request.node.name, SEED, reports, int(EXECUTIONS) if EXECUTIONS else None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.config.stash.get(RUN, [])
    if reports:
        terminalreporter.section("fuzz")
        for line in reports:
            terminalreporter.write_line(line)
