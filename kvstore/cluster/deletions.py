"""Namespaces that were deleted: what every node of a cluster drops, also one that was away meanwhile.

A deletion is an epoch for a namespace, larger than all before it. It is written down here first, then told to the
directory, then applied: until a node has applied it, it says so, and nobody who knows of it takes blocks from there.

    delete -> known (file, synced) -> told (directory) -> blocks dropped, for good -> applied (file)

What a node knows and the directory does not, it tells again, so a directory that is lost forgets nothing while one such
node lives. A node that was away applies what it missed before it serves, or as soon as the directory answers.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from typing import TYPE_CHECKING, Protocol

from kvstore.cluster.directory import DELETIONS_MAX
from kvstore.errors import DirectoryUnavailableError, InvalidArgumentError, StorageError
from kvstore.hashing import KEY_BYTES
from kvstore.nodes import Deletion

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvstore.clock import Clock

logger = logging.getLogger(__name__)

_TABLES = ("known", "applied")
_RANDOM_BITS = 10  # so that two nodes that delete in one millisecond take two epochs


class DeletingStore(Protocol):
    """What is asked of the store."""

    def delete_namespace(self, ns_id: bytes) -> int:
        """Drop all of a namespace for good; how many blocks that were, as far as they were counted."""
        ...


class Burials(Protocol):
    """What is asked of the directory."""

    def bury(self, epochs: Mapping[bytes, int]) -> Mapping[bytes, int]:
        """Tell of deletions; those that anybody told of, the largest epoch of each namespace."""
        ...


class Deletions:
    """The one owner of what this node knows of deletions. Thread-safe: `_lock` guards the tables, and `_applying` is
    held, outside of it, while blocks are dropped."""

    def __init__(self, store: DeletingStore, directory: Burials, path: Path | None, clock: Clock) -> None:
        """`path` is where it is kept; None: there is no disk whose blocks could come back. Raises StorageError."""
        self._store = store
        self._directory = directory
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._applying = threading.Lock()
        self._known, self._applied = _read(path)

    def known(self, ns_id: bytes) -> int:
        """The epoch of the last deletion of a namespace that this node was told of; 0: none."""
        with self._lock:
            return self._known.get(ns_id, 0)

    def applied(self, ns_id: bytes) -> int:
        """That of the last one behind which nothing older can be read here."""
        with self._lock:
            return self._applied.get(ns_id, 0)

    @property
    def applied_epoch(self) -> int:
        """The largest epoch up to which everything known is applied."""
        with self._lock:
            waiting = [epoch for ns_id, epoch in self._known.items() if self._applied.get(ns_id, 0) < epoch]
            before = min(waiting, default=max(self._known.values(), default=0) + 1)
            return max((epoch for epoch in self._applied.values() if epoch < before), default=0)

    def delete(self, ns_id: bytes) -> Deletion:
        """Delete a namespace here, and have the others do so. Raises StorageError if a restart could bring it back."""
        if len(ns_id) != KEY_BYTES:
            raise InvalidArgumentError(f"ns_id has {len(ns_id)} bytes, expected {KEY_BYTES}")
        self._tell()  # so that it comes behind those that others made, whatever their clocks say
        with self._lock:
            latest = max(self._known.values(), default=0)
            now = int(self._clock.unix() * 1000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
            epoch = max(now, latest + 1)
        self._learn({ns_id: epoch})
        is_told = self._tell()
        return Deletion(epoch, self._apply(), is_told)

    def sync(self) -> None:
        """Learn what others deleted, tell what they do not know, and apply. What fails is tried again next time."""
        try:
            self._tell()
            self._apply()
        except StorageError as err:
            logger.error("a deleted namespace could not be dropped; it is tried again: cause=%s", err)

    def _tell(self) -> bool:
        """Whether the directory knows all that this node does."""
        try:
            told = self._directory.bury({})
            with self._lock:
                missing = {ns_id: epoch for ns_id, epoch in self._known.items() if told.get(ns_id, 0) < epoch}
            if missing:
                told = self._directory.bury(missing)
        except DirectoryUnavailableError as err:
            logger.info("the directory was not told of deletions, or not asked: cause=%s", err)
            return False
        self._learn(told)
        return True

    def _learn(self, told: Mapping[bytes, int]) -> None:
        with self._lock:
            news = {ns_id: epoch for ns_id, epoch in told.items() if self._known.get(ns_id, 0) < epoch}
            if news:
                self._known = _latest({**self._known, **news})
                self._save()

    def _apply(self) -> int:
        """Drop what is to be dropped; how many blocks that were."""
        blocks = 0
        with self._applying:
            with self._lock:
                waiting = {ns_id: epoch for ns_id, epoch in self._known.items() if self._applied.get(ns_id, 0) < epoch}
            for ns_id, epoch in waiting.items():
                blocks += self._store.delete_namespace(ns_id)
                logger.info("a namespace was deleted: ns=%s epoch=%d", ns_id.hex(), epoch)
                with self._lock:
                    self._applied[ns_id] = max(epoch, self._applied.get(ns_id, 0))
                    self._applied = {done: at for done, at in self._applied.items() if done in self._known}
                    self._save()
        return blocks

    def _save(self) -> None:
        """Write the tables down; `_lock` must be held."""
        if self._path is None:
            return
        tables = {
            name: {ns_id.hex(): epoch for ns_id, epoch in table.items()}
            for name, table in (("known", self._known), ("applied", self._applied))
        }
        fresh = self._path.with_suffix(".new")
        try:
            with fresh.open("w", encoding="utf-8") as file:
                json.dump(tables, file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as err:
            raise StorageError(f"{self._path} cannot be written: {err.strerror}; delete it again") from err


def _latest(table: dict[bytes, int]) -> dict[bytes, int]:
    """The deletions made last, as many as are remembered."""
    return dict(sorted(table.items(), key=lambda entry: -entry[1])[:DELETIONS_MAX])


def _read(path: Path | None) -> tuple[dict[bytes, int], dict[bytes, int]]:
    """What is known, and what is applied."""
    if path is None or not path.exists():
        return {}, {}
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
        known, applied = ({bytes.fromhex(ns_id): int(at) for ns_id, at in tables[name].items()} for name in _TABLES)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise StorageError(
            f"{path} cannot be used: {err}; it names the namespaces that were deleted, so restore it, or delete it "
            "together with the blocks on disk"
        ) from err
    return known, applied
