"""Keys for encryption at rest: which one writes, and which ones can still read."""

from __future__ import annotations

import logging
import os
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvstore.errors import ConfigError

logger = logging.getLogger(__name__)

KEY_ID_BYTES = 8
KEY_BYTES = 32
NO_KEY = bytes(KEY_ID_BYTES)
_FILE_BYTES_MAX = 1 << 16
_HEX_CHARACTERS = 2 * KEY_BYTES
_DROPPED = b"dropped"


@dataclass(frozen=True, slots=True)
class Key:
    """A secret of 32 bytes, and the name by which headers call it, in clear."""

    key_id: bytes
    secret: bytes = field(repr=False)


class KeyProvider(Protocol):
    """Where keys come from. Thread-safe, and quick: it is asked for each block, and may have to be for each read."""

    def current(self) -> Key:
        """The key that is written with from now on."""
        ...

    def find(self, key_id: bytes) -> Key | None:
        """The key of this name; None where there is none (any more), and what it wrote is lost."""
        ...

    def is_dropped(self, key_id: bytes) -> bool:
        """Whether what the key of this name wrote may go."""
        ...


@dataclass(frozen=True, slots=True)
class _Content:
    """What a file says: keys by name, in order, and names of those whose blocks may go."""

    keys: dict[bytes, Key]
    dropped: frozenset[bytes]


class FileKeys:
    """A KeyProvider over a file that only its owner may read: a line for each key, the newest first.

    A line is a name of 1 to 8 letters, digits, - or _, and 64 hexadecimal digits, with a space between them. In place
    of the digits `dropped` says that what the key of this name wrote may go. Empty lines and those that begin with # do
    not count. The first key writes, all of them read. The file is read again when it has changed; one that cannot be
    used then is left aside with a warning, and the keys stay as they were.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._path = Path(path)
        self._lock = threading.Lock()
        self._seen = self._state()
        self._content = self._read()

    def current(self) -> Key:
        """The first key of the file."""
        return next(iter(self._fresh().keys.values()))

    def find(self, key_id: bytes) -> Key | None:
        """A key of the file, by its name."""
        return self._fresh().keys.get(key_id)

    def is_dropped(self, key_id: bytes) -> bool:
        """Whether the file says so."""
        return key_id in self._fresh().dropped

    def reload(self) -> None:
        """Read the file again. Raises ConfigError, and nothing has changed, if it cannot be used."""
        with self._lock:
            seen = self._state()
            self._content = self._read()
            self._seen = seen

    def _fresh(self) -> _Content:
        with self._lock:
            seen = self._state()
            if seen != self._seen:
                self._seen = seen
                try:
                    self._content = self._read()
                except ConfigError as error:
                    logger.warning("key file is not used as it is now; the keys stay as they were: %s", error)
            return self._content

    def _state(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode)

    def _read(self) -> _Content:
        try:
            with self._path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read(_FILE_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(f"key file {self._path} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(mode) or mode & 0o077:
            raise ConfigError(
                f"key file {self._path} has mode {stat.S_IMODE(mode):04o}, expected a file that only its owner may "
                "read; chmod 600 it"
            )
        if len(content) > _FILE_BYTES_MAX:
            raise ConfigError(
                f"key file {self._path} has more than {_FILE_BYTES_MAX} bytes; expected a line for each key"
            )
        return _parse(content, self._path)


def _parse(content: bytes, path: Path) -> _Content:
    keys: dict[bytes, Key] = {}
    dropped: set[bytes] = set()
    for number, line in enumerate(content.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith(b"#"):
            continue
        name, secret = words if len(words) == 2 else (b"", b"")
        if not _is_name(name) or (secret != _DROPPED and len(secret) != _HEX_CHARACTERS):
            raise ConfigError(
                f"key file {path}, line {number}: expected a name of 1 to {KEY_ID_BYTES} letters, digits, - or _, a "
                f"space and {_HEX_CHARACTERS} hexadecimal digits, or 'dropped'"
            )
        key_id = name.ljust(KEY_ID_BYTES, b"\0")
        if key_id in keys or key_id in dropped:
            raise ConfigError(f"key file {path}, line {number}: key {name.decode()} is there twice; rename one of them")
        if secret == _DROPPED:
            dropped.add(key_id)
        else:
            keys[key_id] = Key(key_id, _from_hex(secret, path, number))
    if not keys:
        raise ConfigError(f"key file {path} has no key, expected a line for each one")
    return _Content(keys, frozenset(dropped))


def _is_name(name: bytes) -> bool:
    return 1 <= len(name) <= KEY_ID_BYTES and name.isascii() and name.replace(b"-", b"").replace(b"_", b"a").isalnum()


def _from_hex(secret: bytes, path: Path, number: int) -> bytes:
    try:
        return bytes.fromhex(secret.decode("ascii"))
    except ValueError as error:
        raise ConfigError(f"key file {path}, line {number}: the key is not written in hexadecimal digits") from error
