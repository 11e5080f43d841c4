"""The column to which the rows of a batch are brought costs least, and window layers hold what a naive one does."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from kvstore.connectors.huggingface_layers import Memory, StaticWindowLayer, WindowLayer
from kvstore.connectors.huggingface_rows import PASS_TOKENS_MIN, common_column

WINDOW, SLACK, PASS = 12, 5, 20
ROWS, HEADS, SIZE = 2, 1, 3


def naive_cost(levels, columns, column):
    alone = [max(column - level, PASS_TOKENS_MIN) for level in levels if level < column]
    return sum(alone) + max(len(levels) * (columns - column), PASS_TOKENS_MIN)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=8))
def test_no_other_column_costs_less(levels):
    column = common_column(levels, 1000, may_cut=True)
    assert min(naive_cost(levels, 1000, other) for other in levels) == naive_cost(levels, 1000, column)
    assert column in levels


@given(st.lists(st.integers(0, 999), min_size=1, max_size=8))
def test_where_nothing_may_be_cut_it_is_the_furthest_row(levels):
    assert max(levels) == common_column(levels, 1000, may_cut=False)


def test_one_cold_row_costs_its_own_pass_alone():
    assert 1984 == common_column([1984, 1984, 1984, 0], 2000, may_cut=True)


def states(start, count):
    """Columns that tell which they are."""
    columns = torch.arange(start, start + count, dtype=torch.float32)
    keys = columns[None, None, :, None].expand(ROWS, HEADS, count, SIZE).clone()
    return keys, -keys


steps = st.lists(st.sampled_from([1, 1, 1, 2, 7, 30]), min_size=1, max_size=12)


@given(steps, st.integers(0, 40), st.booleans())
def test_a_window_layer_shows_a_model_what_that_of_transformers_does(counts, restored, is_static):
    if is_static:
        layer, plain = StaticWindowLayer(200, WINDOW, Memory(SLACK, PASS)), StaticSlidingWindowLayer(200, WINDOW)
    else:
        layer, plain = WindowLayer(WINDOW, Memory(SLACK, PASS)), DynamicSlidingWindowLayer(WINDOW)
    if restored:
        plain.update(*states(0, restored))
        given_columns = min(restored, WINDOW + 3)
        layer.restore(*states(restored - given_columns, given_columns), restored)
    length = restored
    for count in counts:
        assert plain.get_mask_sizes(count) == layer.get_mask_sizes(count)
        expected, shown = plain.update(*states(length, count)), layer.update(*states(length, count))
        assert all(torch.equal(theirs, ours) for theirs, ours in zip(expected, shown, strict=True))
        length += count
        assert length == layer.get_seq_length() == plain.get_seq_length()


@given(steps, st.integers(0, 40), st.booleans())
def test_every_piece_holds_the_columns_that_it_says(counts, restored, is_static):
    layer = (
        StaticWindowLayer(200, WINDOW, Memory(SLACK, PASS)) if is_static else WindowLayer(WINDOW, Memory(SLACK, PASS))
    )
    if restored:
        layer.restore(*states(0, restored), restored)
    length = restored
    for count in counts:
        layer.update(*states(length, count))
        length += count
    pieces = layer.take_pieces()
    for piece in pieces:
        keys, values = states(piece.start, piece.end - piece.start)
        assert torch.equal(keys, piece.keys)
        assert torch.equal(values, piece.values)
    assert length == pieces[-1].end
    assert [pieces[-1].end] == [piece.end for piece in layer.take_pieces()]
