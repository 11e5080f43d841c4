"""Who wrote a block: the id of an engine's process, kept with each block so that what one bad engine wrote can go.

An id is a number of 64 bits, written as 16 hex digits. It is a name, no proof: who may store may claim any.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from kvstore.errors import ConfigError, InvalidArgumentError

WRITER_MAX = 2**64 - 1
# Of blocks from clients that tell no id, and of those that were stored before there were any.
UNKNOWN_WRITER = 0


@dataclass(frozen=True, slots=True)
class WriterRun:
    """Consecutive blocks of one writer."""

    writer: int
    blocks: int


@dataclass(frozen=True, slots=True)
class WriterPage:
    """What one step of dropping a writer's blocks dropped, those below them included, and how many are left to drop."""

    blocks: int
    remaining_blocks: int


def new_writer() -> int:
    """A random id for a process that was given none."""
    return secrets.randbelow(WRITER_MAX) + 1


def require_writer_id(writer: int) -> int:
    """Raises InvalidArgumentError for what is no id of a writer."""
    if not isinstance(writer, int) or isinstance(writer, bool) or not 0 <= writer <= WRITER_MAX:
        raise InvalidArgumentError(f"writer is {writer!r:.60}, expected a whole number, 0..2^64-1 (0: unknown)")
    return writer


def chosen_writer(writer: int | None) -> int:
    """A given id, or a new one."""
    return new_writer() if writer is None else require_writer_id(writer)


def writer_text(writer: int) -> str:
    """An id as people see it."""
    return f"{writer:016x}"


def parse_writer(text: str) -> int:
    """An id from what people see. Raises InvalidArgumentError."""
    try:
        return require_writer_id(int(text, 16))
    except ValueError:
        raise InvalidArgumentError(f"writer is {text!r:.60}, expected up to 16 hex digits") from None


def configured_writer(text: str | None) -> int | None:
    """The id in a setting, None for none. Raises ConfigError."""
    try:
        return None if text is None else parse_writer(text)
    except InvalidArgumentError as error:
        raise ConfigError(str(error)) from None
