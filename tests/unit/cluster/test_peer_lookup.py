"""What the directory says of a prompt: the same as reading all of it at once, in a few reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cluster.peer_address import peer_address
from kvstore.cluster.peer_lookup import boundary_blocks, deepest_boundaries
from kvstore.cluster.peer_paths import PeerPaths
from kvstore.cluster.plan import Path
from kvstore.testing.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Sequence


class CountedDirectory:
    """The holders of keys that are numbers, and how often they were asked for."""

    def __init__(self, held: Sequence[frozenset[int]]) -> None:
        self._held = held
        self.reads: list[int] = []

    def holders(self, keys: Sequence[bytes]) -> Sequence[frozenset[int]]:
        self.reads.append(len(keys))
        return [self._held[int.from_bytes(key)] for key in keys]


def deepest_of(held: Sequence[frozenset[int]], own_slots: frozenset[int]) -> dict[int, int]:
    """The same, from all entries at once."""
    deepest: dict[int, int] = {}
    for count, slots in enumerate(held, 1):
        if not slots - own_slots:
            break
        deepest |= dict.fromkeys(slots - own_slots, count)
    return deepest


@given(st.lists(st.frozensets(st.integers(0, 5)), max_size=600), st.frozensets(st.integers(0, 5), max_size=2))
def test_reads_that_double_find_what_one_read_of_all_finds(held: list[frozenset[int]], own: frozenset[int]) -> None:
    directory = CountedDirectory(held)
    keys = [index.to_bytes(16) for index in range(len(held))]
    assert deepest_of(held, own) == deepest_boundaries(directory, keys, own)  # type: ignore[arg-type]


def test_a_long_prompt_that_somebody_has_takes_a_few_reads():
    directory = CountedDirectory([frozenset({1})] * 250)  # 128k tokens
    deepest_boundaries(directory, [index.to_bytes(16) for index in range(250)])  # type: ignore[arg-type]
    assert [4, 8, 16, 32, 64, 126] == directory.reads


def test_a_prompt_that_nobody_has_takes_one_read():
    directory = CountedDirectory([frozenset()] * 250)
    deepest_boundaries(directory, [index.to_bytes(16) for index in range(250)])  # type: ignore[arg-type]
    assert [4] == directory.reads


@pytest.mark.parametrize(
    ("expected", "block_tokens", "blocks"),
    [([32, 64], 16, 70), ([], 16, 31), ([32], 16, 32), ([4, 8], 128, 9), ([1, 2], 4096, 2), ([11], 48, 12)],
)
def test_boundaries_are_whole_blocks(expected: list[int], block_tokens: int, blocks: int) -> None:
    assert expected == list(boundary_blocks(block_tokens, 512, blocks))


@pytest.mark.parametrize(
    ("expected", "addresses"),
    [
        (None, ()),
        ("unix:///run/a", ("unix:///run/a",)),
        ("10.0.0.1:7070", ("unix:///run/a", "10.0.0.1:7070", "tls://a:7071")),
        ("tls://a:7071", ("127.0.0.1:7070", "unix:///run/a", "tls://a:7071")),
        ("[::1]:7070", ("unix:///run/a", "[::1]:7070", "[::1]:7071")),
        ("tls://[fd00::1]:7071", ("nothing", "tls://0.0.0.0:7070", "tls://[fd00::1]:7071")),
    ],
)
def test_peers_are_asked_where_other_machines_reach_them(expected: str | None, addresses: tuple[str, ...]) -> None:
    assert expected == peer_address(addresses)


def test_a_path_moves_towards_what_was_measured():
    paths = PeerPaths(Path(0.002, 1e9), ManualClock())
    for _ in range(50):
        paths.count_answer("n", 0.1)
        paths.count_transfer("n", 1 << 20, (1 << 20) / 5e9)
    known = paths.path("n")
    assert (0.1, 5e9) == (pytest.approx(known.latency_seconds), pytest.approx(known.bytes_per_second))
    assert Path(0.002, 1e9) == paths.path("another")


def test_a_few_bytes_tell_nothing_of_the_bandwidth():
    paths = PeerPaths(Path(0.002, 1e9), ManualClock())
    paths.count_transfer("n", 1000, 10.0)
    assert Path(0.002, 1e9) == paths.path("n")


def test_paths_of_many_peers_are_bounded():
    paths = PeerPaths(Path(0.002, 1e9), ManualClock())
    for name in range(5000):
        paths.count_answer(str(name), 1.0)
    assert Path(0.002, 1e9) == paths.path("0")
    assert Path(0.002, 1e9) != paths.path("4999")


def test_a_peer_that_was_slow_is_tried_again_some_minutes_later():
    clock = ManualClock()
    paths = PeerPaths(Path(0.002, 1e9), clock)
    for _ in range(50):
        paths.count_transfer("n", 1 << 20, 1.0)
    assert paths.path("n").bytes_per_second < 2e6
    clock.advance(60.0)
    assert pytest.approx(0.5e9, rel=0.01) == paths.path("n").bytes_per_second
    clock.advance(600.0)
    assert pytest.approx(1e9, rel=0.01) == paths.path("n").bytes_per_second
