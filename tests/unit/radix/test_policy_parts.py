"""What eviction policies are made of, against naive models: runs, ghosts, queues of victims, life tables.

policy_parts.cpp is compiled here and answers each command with a line.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.testing.patience import ANSWER_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CSRC = ROOT / "radix" / "csrc"
GHOSTS_LEAST = 1024
GHOSTS_MAX = 1 << 16
NODES = 16
QUEUES = 4
SECOND = 1_000_000
BIN_EDGES = [0.0, *(1.5**power for power in range(31)), float("inf")]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
commands = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(0, 12), st.integers(0, 3)), max_size=30
)


class Parts:
    """The running program."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def ask(self, *command: object) -> list[str]:
        """The answer to one command, split at its bars."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, command)) + "\n")
        return self._process.stdout.readline().split("|")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert 0 == self._process.wait(ANSWER_SECONDS)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    program = tmp_path_factory.mktemp("parts") / "policy_parts"
    names = ("survival.cpp", "rehearsal.cpp", "rehearsal_saved.cpp")
    sources = [HERE / "policy_parts.cpp", *(CSRC / name for name in names)]
    includes = [f"-I{CSRC}", f"-I{ROOT / 'kvstore' / 'native'}"]
    subprocess.run(["g++", "-std=c++17", "-O0", *includes, *sources, "-o", program], check=True)
    running = Parts(program)
    yield running
    running.close()


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def compressed(begin: int, ticks: list[int]) -> list[int]:
    """(tick, end) of each run, flat."""
    flat: list[int] = []
    for tick, group in groupby(ticks):
        begin += len(list(group))
        flat += [tick, begin]
    return flat


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 9), commands)
def test_runs_are_a_list_of_one_history_for_each_block(parts: Parts, begin: int, ops: list[tuple[int, ...]]) -> None:
    parts.ask("runs", "new", begin)
    ticks: list[int] = []
    for op, at, length, tick in ops:
        end = begin + len(ticks)
        first = begin + at % (len(ticks) + 1)
        last = min(end, first + length)
        if op == 0 and length:
            ticks += [tick] * length
            answer = parts.ask("runs", "append", tick, begin + len(ticks))
        elif op == 1 and ticks:
            # Neighbours that become equal must become one run: half of each tick goes.
            ticks = [old // 2 + tick if first <= begin + i < last else old for i, old in enumerate(ticks)]
            answer = parts.ask("runs", "update", first, last, tick)
        elif op == 2 and first > begin and first < end:
            answer = parts.ask("runs", "split", first)
            head, tail = ticks[: first - begin], ticks[first - begin :]
            assert [compressed(begin, head), compressed(first, tail)] == [numbers(text) for text in answer[1:]]
            answer = parts.ask("runs", "merge")
        elif op == 3:
            ticks = ticks[: first - begin]
            answer = parts.ask("runs", "truncate", first)
        else:
            answer = parts.ask("runs", "each", first, last)
            words = iter(numbers(answer[0]))
            visited = [told for told, start, stop in zip(words, words, words, strict=True) for _ in range(start, stop)]
            assert ticks[first - begin : last - begin] == visited
        assert compressed(begin, ticks) == numbers(answer[1])
        for depth in range(begin, begin + len(ticks)):
            same = [d for d in range(begin, depth + 1) if len(set(ticks[d - begin : depth - begin + 1])) == 1]
            assert [ticks[depth - begin], same[0]] == numbers(parts.ask("runs", "at", depth)[0])


class NaiveGhosts:
    """A dict in the order of coming, of which only every 2^n-th fingerprint is kept once it was too large."""

    def __init__(self) -> None:
        self.ticks: dict[int, int] = {}
        self.mask = 0

    def is_thinned(self, fingerprint: int) -> bool:
        return (fingerprint >> 32) & self.mask != 0

    def add(self, fingerprint: int, tick: int, ghosts_max: int) -> list[int]:
        """Ticks of what is forgotten for it."""
        if self.is_thinned(fingerprint):
            return [tick]
        forgotten = [self.ticks.pop(fingerprint)] if fingerprint in self.ticks else []
        self.ticks[fingerprint] = tick
        while len(self.ticks) * (self.mask + 1) > max(ghosts_max, GHOSTS_LEAST):
            forgotten.append(self.ticks.pop(next(iter(self.ticks))))
        if len(self.ticks) > GHOSTS_MAX:
            self.mask = self.mask * 2 + 1
            thinned = [other for other in self.ticks if self.is_thinned(other)]
            forgotten += [self.ticks.pop(other) for other in thinned]
        return forgotten

    def take(self, fingerprint: int) -> list[int]:
        known = fingerprint in self.ticks and not self.is_thinned(fingerprint)
        return [self.ticks.pop(fingerprint)] if known else []


def compare_ghosts(parts: Parts, naive: NaiveGhosts, op: int, first: int, tick: int, count: int, limit: int) -> None:
    if op == 3:
        told = parts.ask("ghosts", "reload")
    elif op == 0:
        told = parts.ask("ghosts", "take", first << 32)
        assert naive.take(first << 32) == numbers(told[0])
    else:
        told = parts.ask("ghosts", "add", first << 32, tick, count, limit)
        forgotten = [gone for at in range(count) for gone in naive.add((first + at) << 32, tick + at, limit)]
        assert Counter(forgotten) == Counter(numbers(told[0]))
    assert [len(naive.ticks), 1] == numbers(told[1])


ghost_commands = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 3000), st.sampled_from([1, 2, 700]), st.sampled_from([0, 1024, 1500, 10**6])
    ),
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(ghost_commands)
def test_ghosts_are_a_dict_that_drops_the_oldest(parts: Parts, ops: list[tuple[int, int, int, int]]) -> None:
    parts.ask("ghosts", "new")
    naive = NaiveGhosts()
    for tick, (op, first, count, limit) in enumerate(ops):
        compare_ghosts(parts, naive, op, first, 10_000 * tick, count, limit)


def test_ghosts_beyond_their_number_are_thinned_so_that_they_reach_as_far_back(parts: Parts) -> None:
    parts.ask("ghosts", "new")
    naive = NaiveGhosts()
    for batch in range(12):
        compare_ghosts(parts, naive, 1, 20_000 * batch, 20_000 * batch, 20_000, 200_000)
        compare_ghosts(parts, naive, 0, 20_000 * batch + batch, 0, 0, 0)
        compare_ghosts(parts, naive, 3, 0, 0, 0, 0)
    assert naive.mask > 0
    assert min(naive.ticks.values()) < 240_000 - 180_000


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(-1, QUEUES - 1), st.integers(0, 5)), max_size=40))
def test_queues_know_their_lowest_and_highest(parts: Parts, ops: list[tuple[int, int, int]]) -> None:
    answer = parts.ask("queues", "new")
    entries: dict[int, tuple[int, int]] = {}
    before: list[list[int]] = [[0] for _ in range(QUEUES)]
    for node, queue, rank in ops:
        if queue < 0:
            entries.pop(node, None)
            answer = parts.ask("queues", "remove", node)
        else:
            entries[node] = (queue, rank)
            answer = parts.ask("queues", "set", node, queue, rank)
        assert [len(entries), 1] == numbers(answer[0])
        now = [numbers(text) for text in answer[1:]]
        for each in range(QUEUES):
            order = sorted((rank, node) for node, (entered, rank) in entries.items() if entered == each)
            ends = [1, order[0][1], order[0][0], order[-1][1], order[-1][0]] if order else [0]
            assert ends == now[each][:5]
            if order and ends != before[each][:5] and len(before[each]) > 1:
                assert before[each][5] < now[each][5]
        before = now


def exposure_of(lives: list[tuple[int, int | None, float]], now: int) -> list[float]:
    """Seconds that lives spent in each bin of age, weighted."""
    bins = [0.0] * 32
    for born, end, weight in lives:
        age = ((now if end is None else end) - born) / SECOND
        for index in range(32):
            bins[index] += weight * max(0.0, min(age, BIN_EDGES[index + 1]) - BIN_EDGES[index])
    return bins


def bin_of(seconds: float) -> int:
    return max(index for index in range(32) if BIN_EDGES[index] <= seconds)


class NaiveLives:
    """Every life, driven beside the program by a source of random numbers."""

    def __init__(self, parts: Parts, seed: int) -> None:
        self.parts = parts
        self.random = random.Random(seed)
        self.now = 0
        self.lives: list[tuple[int, int | None, float]] = []
        self.uses = [0.0] * 32
        parts.ask("lives", "new")

    def live(self, births: int) -> None:
        """Lives begin at different times, and about half of them end."""
        for _ in range(births):
            self.now += self.random.randrange(1, 20 * SECOND)
            weight = self.random.choice([0.5, 1.0, 2.0])
            self.parts.ask("lives", "begin", self.now, 0, weight)
            self.lives.append((self.now, None, weight))
            if self.random.random() < 0.5:
                self.end()

    def end(self) -> None:
        """One of them ends, used or not."""
        index = self.random.choice([i for i, (_, end, _) in enumerate(self.lives) if end is None])
        born, _, weight = self.lives[index]
        end = self.now + self.random.randrange(3 * SECOND)
        self.lives[index] = (born, end, weight)
        is_used = self.random.random() < 0.5
        self.parts.ask("lives", "use" if is_used else "unused", born, end, weight)
        if is_used:
            self.uses[bin_of((end - born) / SECOND)] += weight

    def told(self) -> tuple[list[float], list[float]]:
        """Uses and exposure as the program counts them."""
        self.now += 4 * SECOND
        values = [float(word) for word in self.parts.ask("lives", "sum", 0, self.now)[0].split()]
        return values[:32], values[32:]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 48))
def test_a_life_table_of_few_lives_is_exact(parts: Parts, seed: int, births: int) -> None:
    naive = NaiveLives(parts, seed)
    naive.live(births)
    uses, exposure = naive.told()
    assert naive.uses == uses
    assert pytest.approx(exposure_of(naive.lives, naive.now), abs=1e-3) == exposure


@pytest.mark.parametrize("seed", range(5))
def test_a_life_table_of_many_lives_is_nearly_exact(parts: Parts, seed: int) -> None:
    naive = NaiveLives(parts, seed)
    naive.live(1500)
    uses, exposure = naive.told()
    expected = exposure_of(naive.lives, naive.now)
    assert naive.uses == uses
    assert pytest.approx(sum(expected), rel=0.05) == sum(exposure)
    for index in range(32):
        assert pytest.approx(expected[index], rel=0.15, abs=0.01 * sum(expected)) == exposure[index]


def test_old_lives_count_less_than_new_ones(parts: Parts) -> None:
    parts.ask("lives", "new")
    for now in range(40):
        parts.ask("lives", "begin", now * SECOND, 0, 1000)
        parts.ask("lives", "use", now * SECOND, now * SECOND + (1 if now < 20 else 3) * SECOND, 1000)
    values = [float(word) for word in parts.ask("lives", "sum", 0, 100 * SECOND)[0].split()]
    assert values[bin_of(1.0)] < values[bin_of(3.0)]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-30, 3).map(lambda power: 2.0**power), min_size=32, max_size=32),
    st.sampled_from([0.01, 1.0, 7.0]),
)
def test_the_index_is_the_best_rate_over_all_ages_at_which_to_give_up(
    parts: Parts, hazards: list[float], risk: float
) -> None:
    expected = []
    widths = [end - begin for begin, end in pairwise([*BIN_EDGES[:-1], BIN_EDGES[-2] * 1.5])]
    for first in range(32):
        alive, used, seconds, best = 1.0, 0.0, 0.0, 0.0
        for index in range(first, 32):
            width = widths[index] / (2 if index == first else 1)
            share = 1 / (1 + hazards[index] * risk * width)
            used += alive * (1 - share)
            seconds += alive * share * width
            alive *= share
            best = max(best, used / seconds)
        expected.append(best)
    answer = parts.ask("lives", "index", risk, *hazards)[0]
    assert pytest.approx(expected, rel=1e-6) == [float(word) for word in answer.split()]


@given(st.integers(0, 10**10))
def test_ages_fall_into_the_bin_whose_edge_they_reached(parts: Parts, milliseconds: int) -> None:
    seconds = milliseconds / 1000
    if min(abs(seconds - edge) for edge in BIN_EDGES) > 1e-6:
        assert [bin_of(seconds)] == numbers(parts.ask("lives", "bin", milliseconds)[0])
