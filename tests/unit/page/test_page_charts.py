"""Charts: what is drawn where, and that the numbers are there for whoever cannot see them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.page.charts import HEIGHT, WIDTH, Axes, Series, lines, stacked_areas
from kvstore.page.wording import percent

VALUES = st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=40)


def axes(places: int, **changes: float) -> Axes:
    return Axes(
        "Hit <rate>", [float(place) for place in range(places)], lambda place: f"at {place:g}", percent, **changes
    )


def points(figure: str) -> list[tuple[float, float]]:
    paths = re.findall(r'<path class="[^"]+" d="([^"]*)"/>', figure)
    return [(float(x), float(y)) for path in paths for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]


@given(VALUES, VALUES)
def test_every_chart_is_well_formed_and_keeps_inside_its_frame(one, other):
    size = min(len(one), len(other))
    series = [Series("host", one[:size]), Series("disk", other[:size])]
    for figure in (lines(axes(size), series), stacked_areas(axes(size, top=1.0), series)):
        ET.fromstring(figure)
        assert [] == [(x, y) for x, y in points(figure) if not (0 <= x <= WIDTH and 0 <= y <= HEIGHT)]


def test_areas_stand_on_top_of_each_other():
    figure = stacked_areas(axes(2, top=1.0), [Series("host", [0.25, 0.25]), Series("disk", [0.5, 0.5])])
    heights = sorted({y for _, y in points(figure)}, reverse=True)
    ground, host, disk = heights
    assert pytest.approx((disk - ground) / (host - ground), rel=0.01) == 3


def test_where_nothing_is_known_nothing_is_drawn():
    gap = lines(axes(5), [Series("host", [0.1, None, 0.2, 0.3, None])])
    whole = lines(axes(5), [Series("host", [0.1, 0.1, 0.2, 0.3, 0.3])])
    assert (2, 1) == (len(re.findall(r"M[\d.]", gap)), len(re.findall(r"M[\d.]", whole)))


def test_the_numbers_are_in_a_table_of_few_rows_and_the_last_is_among_them():
    figure = lines(axes(100), [Series("host", [place / 100 for place in range(100)])])
    rows = re.findall(r'<th scope="row">at (\d+)</th><td>([\d.]+)%</td>', figure)
    assert ("99", "99.0") == rows[-1]
    assert len(rows) <= 12
    assert [] == [row for row in rows if row[0] != f"{float(row[1]):.0f}"]


def test_names_from_outside_are_text():
    figure = lines(axes(2), [Series("<script>", [0, 1])])
    assert "<script>" not in figure
    assert "Hit &lt;rate&gt;" in figure


def test_the_marked_place_is_pointed_at():
    figure = lines(axes(3), [Series("host", [0.1, 0.2, 0.3])], marked=1.0)
    marked = re.search(r'<circle class="dot series-0" cx="([\d.]+)" cy="([\d.]+)"', figure)
    assert marked is not None
    assert (float(marked[1]), float(marked[2])) == points(figure)[1]
