"""What a load or a write is to move: requests for bytes, checked against what their session holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvstore.errors import InvalidArgumentError, InvalidBufferError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.api import Lease, Stage
    from kvstore.transport.limits import ServiceLimits
    from kvstore.transport.session import Session
    from kvstore.types import KvLayout, StateSize
    from kvstore.v1 import cache_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks [from_block, end_block) of a lease, as rows of `row_bytes`."""

    lease: Lease
    part: int | None
    row_bytes: int
    from_block: int
    end_block: int


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Rows for `blocks` blocks from `from_block` on; the stage takes those that it wants."""

    stage: Stage
    part: int | None
    row_bytes: int
    from_block: int
    blocks: int
    is_sparse: bool


@runtime_checkable
class Lender(Protocol):
    """A lease or stage whose rows can be moved without a copy: flat pieces of memory, in order, while they are lent.

    A lease lends leading blocks only, as many as lie in memory, and no sparse parts; a stage lends dense parts alone,
    of all blocks, and counts them as written if the loan ends without an exception.
    """

    def lend(
        self, *, from_block: int, blocks: int, part: int | None
    ) -> AbstractContextManager[list[NDArray[np.uint8]]]:
        """Lend rows."""
        ...


@runtime_checkable
class SizedLease(Protocol):
    """A lease of the pieces of a sequence state."""

    @property
    def size(self) -> StateSize:
        """What the state is."""
        ...


def load_job(session: Session, request: pb.LoadRequest, limits: ServiceLimits) -> LoadJob:
    """Raises ClosedError for a lease the session does not hold, InvalidArgumentError for blocks beyond its end."""
    held = session.leases.get(request.lease_id)
    end_block = request.from_block + request.blocks
    if end_block > held.handle.blocks:
        raise InvalidArgumentError(f"the load ends at block {end_block}, the lease at {held.handle.blocks}")
    part = request.part if request.HasField("part") else None
    return LoadJob(held.handle, part, _row_bytes(held.layout, part, limits), request.from_block, end_block)


def write_job(session: Session, start: pb.WriteStart, limits: ServiceLimits) -> WriteJob:
    """Raises ClosedError for a stage the session does not hold."""
    held = session.stages.get(start.stage_id)
    part = start.part if start.HasField("part") else None
    row_bytes = _row_bytes(held.layout, part, limits)
    is_sparse = part is not None and held.layout.group_of(part) is not None
    return WriteJob(held.handle, part, row_bytes, start.from_block, start.blocks, is_sparse)


def _row_bytes(layout: KvLayout, part: int | None, limits: ServiceLimits) -> int:
    row_bytes = layout.block_bytes if part is None else layout.part_bytes(part)
    if row_bytes > limits.row_bytes:
        raise InvalidBufferError(
            f"a row has {row_bytes} bytes, this server takes {limits.row_bytes}; read and write by parts"
        )
    return row_bytes
