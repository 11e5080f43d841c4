"""How deep a match is, and where sparse parts are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.layer_groups import Recurrent, SlidingWindow
from kvstore.store.match_rules import kept_blocks, kept_points, runs_of, usable_blocks

BLOCK_TOKENS = 4
WINDOW = SlidingWindow(layers=1, window=10, kv_heads=1, head_dim=1, dtype="int8")  # spans 3 blocks of 4
STATE = Recurrent(layers=1, state_bytes=1)


def mask(text: str) -> np.ndarray:
    return np.array([letter == "x" for letter in text], dtype=np.bool_)


@pytest.mark.parametrize(
    ("groups", "held", "usable"),
    [
        ((), (), 6),
        ((STATE,), ("......",), 0),
        ((STATE,), ("..x...",), 3),
        ((STATE,), ("x.x..x",), 6),
        ((STATE,), ("x.x...",), 3),
        ((WINDOW,), ("......",), 0),
        ((WINDOW,), ("...xxx",), 6),
        ((WINDOW,), (".xxx.x",), 4),
        ((WINDOW,), (".xx.xx",), 0),
        ((WINDOW,), ("xx.xx.",), 2),  # a short prefix is all within the window
        ((WINDOW,), ("x.....",), 1),
        ((STATE, WINDOW), (".....x", "...xxx"), 6),
        ((STATE, WINDOW), ("..x..x", "xxx.xx"), 3),
        ((STATE, WINDOW), ("..x..x", ".xx.xx"), 0),
        ((STATE, STATE), ("x.x..x", "xx.xx."), 1),
    ],
)
def test_a_match_ends_where_every_rule_holds(groups: tuple, held: tuple[str, ...], usable: int) -> None:
    assert usable == usable_blocks(6, groups, BLOCK_TOKENS, [mask(text) for text in held])


def test_nothing_stored_is_no_match_whatever_the_groups() -> None:
    assert 0 == usable_blocks(0, (STATE, WINDOW), BLOCK_TOKENS, [mask(""), mask("")])


masks = st.lists(st.booleans(), min_size=9, max_size=9).map(np.array)


@given(held=st.tuples(masks, masks), dense=st.integers(0, 9))
def test_a_match_is_the_deepest_point_that_a_naive_search_finds(held: tuple, dense: int) -> None:
    def fits(point: int) -> bool:
        return all(
            all(mask[block] for block in range(max(0, point - back), point))
            for mask, back in zip(held, (1, 3), strict=True)
        )

    naive = max(point for point in range(dense + 1) if fits(point))
    assert naive == usable_blocks(dense, (STATE, WINDOW), BLOCK_TOKENS, held)


@given(held=st.tuples(masks, masks), group=st.integers(0, 1), lost=st.integers(0, 8))
def test_losing_one_part_never_makes_a_match_deeper(held: tuple, group: int, lost: int) -> None:
    before = usable_blocks(9, (STATE, WINDOW), BLOCK_TOKENS, held)
    held[group][lost] = False
    assert usable_blocks(9, (STATE, WINDOW), BLOCK_TOKENS, held) <= before


@pytest.mark.parametrize(
    ("tokens", "present", "turn_ends", "points"),
    [
        (0, 0, (), []),
        (15, 0, (), []),
        (16, 0, (), [1]),
        (33, 0, (), [2]),
        (64, 0, (), [3, 4]),  # the prompt again leaves one token to compute, so it can match no more than 3 blocks
        (65, 0, (), [4]),
        (100, 2, (), [2, 6]),
        (100, 9, (), [6]),  # blocks of a longer prompt that are there already
        (100, 0, (40, 41, 100, 5), [2, 6]),
        (100, 0, (-1, 101), [6]),
        (5000, 0, (), [128, 256, 312]),
        (4096, 0, (), [128, 255, 256]),
    ],
)
def test_parts_are_kept_where_prompts_are_likely_to_part(
    tokens: int, present: int, turn_ends: tuple[int, ...], points: list[int]
) -> None:
    assert points == kept_points(tokens, 16, present, turn_ends)


def test_blocks_longer_than_the_distance_of_points_all_have_one() -> None:
    assert [1, 2, 3] == kept_points(3 * 4096 + 1, 4096, 0, ())


def test_a_window_is_kept_before_each_point_and_a_state_at_it() -> None:
    assert "x.xxxxxx.." == "".join(".x"[int(kept)] for kept in kept_blocks(WINDOW, BLOCK_TOKENS, 10, [1, 5, 8]))
    assert "x...x..x.." == "".join(".x"[int(kept)] for kept in kept_blocks(STATE, BLOCK_TOKENS, 10, [1, 5, 8]))


@pytest.mark.parametrize(
    ("text", "runs"),
    [("", ()), ("...", ()), ("xxx", (range(3),)), ("x.xx.", (range(1), range(2, 4))), ("..x", (range(2, 3),))],
)
def test_runs_are_those_of_true_entries(text: str, runs: tuple[range, ...]) -> None:
    assert runs == runs_of(mask(text))
