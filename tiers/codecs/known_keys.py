"""Which keys wrote what lies on disk.

To a start without one of them its blocks would be free room, and gone with the first store: it is refused, by name. The
superblock has, for each key that wrote, its name and a digest that tells it from another one of that name.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.tiers.superblock import KeyRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kvstore.tiers.codecs.keys import Key, KeyProvider
    from kvstore.tiers.superblock import SuperblockFile

_PERSON = b"kvstore.keycheck"


class KnownKeys:
    """Writes a key down before it writes its first block. Thread-safe: the superblock's lock serialises what counts."""

    def __init__(self, superblock: SuperblockFile) -> None:
        self._superblock = superblock
        self._noted: set[Key] = set()

    def note(self, key: Key) -> None:
        """Raises OSError if that cannot be written; then nothing may be encrypted with the key."""
        if key not in self._noted:
            self._superblock.note_key(key_record(key))
            self._noted.add(key)


def key_record(key: Key) -> KeyRecord:
    """What the superblock has of a key; nothing of its secret follows from it."""
    return KeyRecord(key.key_id, hashlib.blake2b(digest_size=16, key=key.secret, person=_PERSON).digest())


def require_keys(records: Iterable[KeyRecord], keys: KeyProvider | None, path: Path) -> None:
    """Raise ConfigError where a key that wrote is not there, or is another one, and was not given up."""
    missing = [record for record in records if not _is_there(record, keys)]
    if not missing:
        return
    names = ", ".join(sorted({_name(record) for record in missing}))
    if keys is None:
        raise ConfigError(
            f"{path} has blocks encrypted with the key {names}, but no key file is named; set tiers.disk.key_file, or "
            "choose another data directory"
        )
    others = [record for record in missing if keys.find(record.key_id) is not None]
    what = f"another key {_name(others[0])} than the one" if others else f"no key {names}"
    raise ConfigError(
        f"the key file has {what} that encrypted blocks in {path}; put it back, or give up what it wrote by a line "
        f"'{_name(missing[0])} dropped' in the key file"
    )


def still_needed(records: Sequence[KeyRecord], key_ids: Iterable[bytes]) -> tuple[KeyRecord, ...]:
    """Those of keys which encrypted a block that is there."""
    found = set(key_ids)
    return tuple(record for record in records if record.key_id in found)


def _is_there(record: KeyRecord, keys: KeyProvider | None) -> bool:
    if keys is None:
        return False
    key = keys.find(record.key_id)
    return keys.is_dropped(record.key_id) if key is None else record == key_record(key)


def _name(record: KeyRecord) -> str:
    return record.key_id.rstrip(b"\0").decode("ascii", "replace")
