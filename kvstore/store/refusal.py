"""A stage of which nothing is wanted: for what is refused before the index has seen it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from kvstore.buffers import readable_rows
from kvstore.errors import ClosedError
from kvstore.types import CommitResult

if TYPE_CHECKING:
    from types import TracebackType

    from kvstore.api import BlockBuffer
    from kvstore.types import KvLayout


class RefusedStage:
    """A kvstore.api.Stage that takes no block. It holds nothing, so it counts as none of the open ones."""

    def __init__(self, layout: KvLayout, *, from_block: int, refused_blocks: int, present_blocks: int = 0) -> None:
        self._layout = layout
        self._from_block = from_block
        self._refused_blocks = refused_blocks
        self._present_blocks = present_blocks
        self._lock = threading.Lock()
        self._open = True

    @property
    def from_block(self) -> int:
        """First block that was offered."""
        return self._from_block

    @property
    def blocks(self) -> int:
        """None is wanted."""
        return 0

    def wanted(self, part: int) -> tuple[range, ...]:  # noqa: ARG002
        """None is wanted, of any part."""
        return ()

    def write_from(self, buffer: BlockBuffer, *, from_block: int | None = None, part: int | None = None) -> int:  # noqa: ARG002
        """Take no row."""
        readable_rows(buffer, self._layout.block_bytes if part is None else self._layout.part_bytes(part))
        if not self._open:
            raise ClosedError("the stage has ended: it was committed or aborted")
        return 0

    def commit(self) -> CommitResult:
        """Say what was refused."""
        with self._lock:
            was_open, self._open = self._open, False
        if not was_open:
            raise ClosedError("the stage has ended: it was committed or aborted")
        return CommitResult(0, self._present_blocks, self._refused_blocks)

    def abort(self) -> None:
        """End it; idempotent."""
        with self._lock:
            self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.commit()
