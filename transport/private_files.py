"""Files with keys and tokens: read only where they are no one else's business, and noticed when they change."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FILE_BYTES_MAX = 2**20
_FOR_OTHERS = stat.S_IRWXO | stat.S_IWGRP

# What tells one content of files from another, cheaply.
Signature = tuple[tuple[int, int, int] | None, ...]


def read_private(path: Path, noun: str) -> bytes:
    """The bytes of a file that others can neither read nor change; raises ConfigError that says what to do."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as err:
        raise ConfigError(f"{noun} {path} cannot be read: {err.strerror}") from err
    if mode & _FOR_OTHERS:
        raise ConfigError(
            f"{noun} {path} has mode {stat.S_IMODE(mode):04o}, expected one that others cannot read nor its group "
            f"change: chmod 600 {path}"
        )
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{noun} {path} has more than {FILE_BYTES_MAX} bytes, expected less")
    return content


def signature(paths: Iterable[Path]) -> Signature:
    """Changes when one of the files is written, replaced, removed or made; no content is read."""
    return tuple(_signature_of(path) for path in paths)


def _signature_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
