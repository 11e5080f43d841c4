"""What leases and stages of blocks and of states have in common: how they end."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from kvstore.errors import ClosedError, InvalidArgumentError
from kvstore.store.interrupts import uninterrupted

if TYPE_CHECKING:
    from types import TracebackType

    from kvstore.types import CommitResult


class OpenLease(ABC):
    """A lease that ends once. `_lock` is held during a load, so that an end waits until the copy has ended."""

    def __init__(self, expires_at: float) -> None:
        self._lock = threading.Lock()
        self._open = True
        self.expires_at = expires_at

    @uninterrupted
    def release(self) -> None:
        """End the lease; idempotent."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._tell_end()
        self._let_go()

    def leave_to_parent(self) -> None:
        """In the child of a fork: the lease stays the parent's, and is over here."""
        self._lock = threading.Lock()
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError(
                "the lease has ended: it was released, its time was over, the store is closed, or this process forked"
            )

    def _tell_end(self) -> None:  # noqa: B027  # not every lease is watched
        """Tell who watches the lease, before anything that it holds can be used again; `_lock` is held."""

    @abstractmethod
    def _let_go(self) -> None:
        """End the holds, and have the store forget the lease."""


class OpenStage(ABC):
    """A stage that ends once. `_lock` guards what changes, so that an abort waits for a copy in progress."""

    def __init__(self, expires_at: float) -> None:
        self._lock = threading.Lock()
        self._open = True
        self._lent = 0  # writers that fill slots in place
        self.expires_at = expires_at

    @uninterrupted
    def commit(self) -> CommitResult:
        """Make what was written visible; see kvstore.api.Stage."""
        try:
            with self._lock:
                self.check_open()
                if self._lent:
                    raise InvalidArgumentError("the stage is being written; commit it when the writes have returned")
                result = self._commit()
        except BaseException:
            # A stage that stayed behind would keep others from storing the same.
            self.abort()
            raise
        self._be_forgotten()
        return result

    @uninterrupted
    def abort(self) -> None:
        """Drop everything written; idempotent, and a no-op after commit."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            if not self._lent:
                self._drop()
        self._be_forgotten()

    def leave_to_parent(self) -> None:
        """In the child of a fork: the stage stays the parent's, and is over here."""
        self._lock = threading.Lock()
        self._open = False

    def check_open(self) -> None:
        """Raise ClosedError if the stage has ended."""
        if not self._open:
            raise ClosedError(
                "the stage has ended: it was committed or aborted, its time was over, its store closed, or this "
                "process forked"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.commit()

    @abstractmethod
    def _commit(self) -> CommitResult:
        """Clear `_open` and place what was written; `_lock` is held. What fails before that leaves the stage open."""

    @abstractmethod
    def _drop(self) -> None:
        """Give back the slots and all holds; `_lock` is held."""

    @abstractmethod
    def _be_forgotten(self) -> None:
        """Have the store forget the stage."""
