"""Charts drawn as SVG: no library, no script, and a table of the same numbers for whoever cannot see them.

Colours come from the page's style sheet (`series-0` ...), so that they follow light and dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

from kvstore.page.wording import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

WIDTH = 640
HEIGHT = 220
_LEFT = 64
_RIGHT = 12
_TOP = 10
_BOTTOM = 30
_PLOT_WIDTH = WIDTH - _LEFT - _RIGHT
_PLOT_HEIGHT = HEIGHT - _TOP - _BOTTOM
_GRID_LINES = 4
_TABLE_ROWS_MAX = 12


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: a value for each place on the horizontal axis; None: nothing is known there."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Axes:
    """What a chart shows: its title, the places (with their names) from left to right, and how values are written."""

    title: str
    places: Sequence[float]
    place_name: Callable[[float], str]
    value_name: Callable[[float], str]
    top: float | None = None  # of the vertical axis; None: the highest value


def stacked_areas(axes: Axes, series: Sequence[Series]) -> str:
    """Each series on top of those before it: shares of one whole."""
    below = [0.0] * len(axes.places)
    stacked: list[tuple[list[float | None], list[float | None]]] = []
    for one in series:
        above = [None if value is None else base + value for base, value in zip(below, one.values, strict=True)]
        stacked.append(([None if value is None else base for base, value in zip(below, above, strict=True)], above))
        below = [base if value is None else value for base, value in zip(below, above, strict=True)]
    frame = _Frame.of(axes, [value for _, above in stacked for value in above])
    marks = [
        f'<path class="area series-{number}" d="{frame.area(lower, upper)}"/>'
        for number, (lower, upper) in enumerate(stacked)
    ]
    return _figure(axes, series, frame, marks)


def lines(axes: Axes, series: Sequence[Series], *, marked: float | None = None) -> str:
    """A line for each series; `marked` is the place to point at."""
    frame = _Frame.of(axes, [value for one in series for value in one.values])
    marks = [f'<path class="line series-{number}" d="{frame.line(one.values)}"/>' for number, one in enumerate(series)]
    if marked is not None:
        at = frame.x(marked)
        marks.append(f'<line class="marked" x1="{at}" x2="{at}" y1="{_TOP}" y2="{_TOP + _PLOT_HEIGHT}"/>')
        for number, one in enumerate(series):
            value = one.values[list(axes.places).index(marked)]
            if value is not None:
                marks.append(f'<circle class="dot series-{number}" cx="{at}" cy="{frame.y(value)}" r="5"/>')
    return _figure(axes, series, frame, marks)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where values lie in the picture."""

    places: Sequence[float]
    top: float

    @classmethod
    def of(cls, axes: Axes, values: Iterable[float | None]) -> _Frame:
        highest = max((value for value in values if value is not None), default=0.0)
        return cls(axes.places, axes.top or highest or 1.0)

    def x(self, place: float) -> float:
        first, last = self.places[0], self.places[-1]
        share = (place - first) / (last - first) if last > first else 0.5
        return round(_LEFT + share * _PLOT_WIDTH, 1)

    def y(self, value: float) -> float:
        return round(_TOP + (1 - min(1.0, value / self.top)) * _PLOT_HEIGHT, 1)

    def line(self, values: Sequence[float | None]) -> str:
        return " ".join(_polyline(run, "M") for run in self._runs(values))

    def area(self, lower: Sequence[float | None], upper: Sequence[float | None]) -> str:
        edges = zip(self._runs(upper), self._runs(lower), strict=True)
        return " ".join(f"{_polyline(above, 'M')} {_polyline(below[::-1], 'L')} Z" for above, below in edges)

    def _runs(self, values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
        """The points of each stretch in which something is known."""
        runs: list[list[tuple[float, float]]] = [[]]
        for place, value in zip(self.places, values, strict=True):
            if value is not None:
                runs[-1].append((self.x(place), self.y(value)))
            elif runs[-1]:
                runs.append([])
        return [run for run in runs if run]


def _polyline(points: Sequence[tuple[float, float]], first: str) -> str:
    return first + " L".join(f"{x} {y}" for x, y in points)


def _figure(axes: Axes, series: Sequence[Series], frame: _Frame, marks: Iterable[str]) -> str:
    label = quoteattr(f"{axes.title}; the numbers are in the table below it")
    picture = "".join((*_grid(axes, frame), *marks))
    legend = "".join(
        f'<li><span class="swatch series-{number}"></span>{escape(one.name)}</li>' for number, one in enumerate(series)
    )
    return (
        f'<figure><figcaption>{escape(axes.title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label={label}>{picture}</svg><ul class="legend">{legend}</ul>{_table(axes, series)}</figure>'
    )


def _grid(axes: Axes, frame: _Frame) -> Iterable[str]:
    for number in range(_GRID_LINES + 1):
        value = frame.top * number / _GRID_LINES
        at = frame.y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{escape(axes.value_name(value))}</text>'
    for place, anchor in ((axes.places[0], "start"), (axes.places[-1], "end")):
        text = escape(axes.place_name(place))
        yield f'<text x="{frame.x(place)}" y="{HEIGHT - 8}" text-anchor="{anchor}">{text}</text>'


def _table(axes: Axes, series: Sequence[Series]) -> str:
    """The numbers of a chart; of many places, as many as fit a page, the last among them."""
    stride = -(-len(axes.places) // _TABLE_ROWS_MAX)
    shown = range((len(axes.places) - 1) % stride, len(axes.places), stride)
    head = "".join(f'<th scope="col">{escape(one.name)}</th>' for one in series)
    rows = "".join(
        f'<tr><th scope="row">{escape(axes.place_name(axes.places[at]))}</th>'
        + "".join(f"<td>{_written(axes, one.values[at])}</td>" for one in series)
        + "</tr>"
        for at in shown
    )
    return (
        f"<details><summary>The same as a table</summary><table><thead><tr><td></td>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></details>"
    )


def _written(axes: Axes, value: float | None) -> str:
    return UNKNOWN if value is None else escape(axes.value_name(value))
