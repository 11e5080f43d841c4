"""What a setting takes: its kind and rule, and how a value is read from a flag, the environment or a TOML file."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.quantities import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable


class Kind(enum.Enum):
    """What values a setting takes, and the unit they have inside the program."""

    SIZE = "bytes"
    DURATION = "seconds"
    COUNT = "count"
    RATIO = "ratio"
    FACTOR = "factor"
    SWITCH = "true or false"
    TEXT = "text"
    LIST = "list"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field of the tree takes; `auto` says in words what a value of None means."""

    kind: Kind
    sentence: str
    minimum: int = 0
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    auto: str = ""


def setting(default: object, kind: Kind, sentence: str, **limits: Any) -> Any:  # noqa: ANN401  # as dataclasses.field
    """A field of a section, with its default and its rule."""
    return field(default=default, metadata={"rule": Rule(kind, sentence, **limits)})


def _as_size(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return parse_size(_as_text(value, "a size such as 67108864, 64MiB or 1GB"))


def _as_duration(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return parse_duration(_as_text(value, "a duration such as 250ms, 2s or 5m"))


def _as_ratio(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    text = _as_text(value, "a number from 0 to 1")
    if not re.fullmatch(r"\d(\.\d+)?", text, re.ASCII):
        raise ValueError("expected a number from 0 to 1, such as 0.5")
    return float(text)


def _as_factor(value: object) -> float:
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value, re.ASCII):
        value = float(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError("expected a number above 0, such as 0.5 or 2")
    return float(value)


def _as_count(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = _as_text(value, "a whole number")
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise ValueError("expected a whole number")
    return int(text)


def _as_switch(value: object) -> bool:
    if isinstance(value, str) and value in ("true", "false"):
        return value == "true"
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _as_text(value: object, expected: str = "a text") -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected {expected}")
    if "\0" in value:
        raise ValueError("expected a text without NUL characters")
    return value


def _as_list(value: object) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError("expected a list of texts, or one text with commas")
    return tuple(_as_text(item).strip() for item in items)


PARSERS: dict[Kind, Callable[[object], object]] = {
    Kind.SIZE: _as_size,
    Kind.DURATION: _as_duration,
    Kind.COUNT: _as_count,
    Kind.SWITCH: _as_switch,
    Kind.RATIO: _as_ratio,
    Kind.FACTOR: _as_factor,
    Kind.TEXT: _as_text,
    Kind.LIST: _as_list,
}
