"""What one metric is, and how values become its samples; a part of kvstore.metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True)  # with slots Python 3.11 makes none of a generic alias
class SourceMetric(Generic[T]):
    """One metric read from whoever counts it: its name as scraped, labels, meaning, and how it is read."""

    name: str
    sentence: str
    read: Callable[[T], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def single(value: float) -> tuple[Sample, ...]:
    """One value without labels."""
    return (((), value),)


def by_label(values: dict[str, int]) -> Iterator[Sample]:
    """A value for each label."""
    return (((label,), value) for label, value in sorted(values.items()))
