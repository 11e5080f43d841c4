"""What a dashboard is made of, as values: no JSON here."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Unit(enum.StrEnum):
    """How Grafana writes a number; its own ids of units."""

    RATIO = "percentunit"
    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"
    PER_SECOND = "cps"
    SECONDS = "s"
    COUNT = "short"


class Form(enum.StrEnum):
    """How a panel shows its numbers; Grafana's names of panel types."""

    LINES = "timeseries"
    NUMBER = "stat"
    BARS = "bargauge"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression, and what its series are called: a text with {{label}}."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One question, and what answers it."""

    question: str
    queries: tuple[Query, ...]
    unit: Unit
    form: Form = Form.LINES
    stacked: bool = False
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. `uid` is its address in Grafana: never change it."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
