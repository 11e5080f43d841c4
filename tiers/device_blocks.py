"""Blocks in GPU memory that an engine's process owns, and that other engines on that GPU may map.

Off unless an engine's connector makes one: no other part of kvstore allocates GPU memory or opens a CUDA context.
Without a GPU the same blocks lie in CPU tensors, and cannot be exported.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidArgumentError, NoSpaceError, UnavailableError
from kvstore.tiers.device_cuda import import_cuda_torch, import_cupy
from kvstore.tiers.device_driver import CudaDriver
from kvstore.tiers.device_memory import CPU
from kvstore.tiers.slots import SlotMap, as_slots

if TYPE_CHECKING:
    from kvstore.tiers.base import SlotRange
    from kvstore.types import Slots


@dataclass(frozen=True, slots=True)
class DeviceExport:
    """What another process on the same GPU needs to map device blocks; every field is plain, for any carrier."""

    gpu_uuid: bytes
    handle: bytes = field(repr=False)
    offset_bytes: int
    slots: int
    block_bytes: int


class DeviceBlocks:
    """Slots of one size in one torch allocation; implements kvstore.tiers.base.Pool. Thread-safe.

    `rows` is the whole memory, [slots, block_bytes]: a copier takes it as rows, with the slots as row_ids.
    """

    def __init__(self, capacity_bytes: int, block_bytes: int, device: str = CPU) -> None:
        """Allocate `capacity_bytes` in whole blocks now.

        Raises NoSpaceError if the device has not as much, UnavailableError without torch or CUDA.
        """
        if not 1 <= block_bytes <= capacity_bytes:
            raise InvalidArgumentError(
                f"{capacity_bytes} bytes hold no block of {block_bytes} bytes; raise the capacity"
            )
        self._device = device
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._slots = SlotMap()
        self._exports = 0
        self.rows = _allocate(capacity_bytes // block_bytes, block_bytes, device)
        self._range: SlotRange | None = self._slots.add(capacity_bytes // block_bytes)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """One part: that of the rank whose process this is."""
        return (self._block_bytes,)

    @property
    def free_slots(self) -> int:
        """Slots that allocate() can hand out."""
        with self._lock:
            return self._slots.free_slots

    @property
    def used_slots(self) -> int:
        """Slots handed out and not freed."""
        with self._lock:
            return self._slots.used_slots

    def allocate(self, count: int) -> Slots:
        """Up to `count` slots, the lowest free ones; fewer or none when the memory is full. Never waits."""
        with self._lock:
            return self._slots.take(count)

    def free(self, slots: Slots) -> None:
        """Give slots back. While a copy touches them, give it `hold(slots)` instead."""
        with self._lock:
            self._slots.release(as_slots(slots))

    def hold(self, slots: Slots) -> SlotHold:
        """Something for the `holds` of a copy: it frees the slots when the copy has really ended."""
        return SlotHold(self, as_slots(slots))

    def ranges(self) -> tuple[SlotRange, ...]:
        """The one range there is, until it is given back."""
        with self._lock:
            return self._slots.ranges()

    def give_back(self, slot_range: SlotRange) -> bool:
        """Let the memory go if all slots are free and no export is out; false and unchanged otherwise."""
        with self._lock:
            if self._exports or not self._slots.remove(slot_range):
                return False
            self._range = None
            self.rows = self.rows[:0].clone()
            return True

    def close(self) -> bool:
        """Give everything back; false while slots are in use or exports are out. Idempotent."""
        return self._range is None or self.give_back(self._range)

    def export(self) -> DeviceExport:
        """A ticket with which an engine in another process maps the same memory; it holds the memory until retire().

        Whoever maps it sees a block's bytes once the copy into it has ended (CopyHandle.wait), and can write them too:
        engines that share a GPU's blocks trust each other. Raises UnavailableError without CUDA.
        """
        if self._device == CPU:
            raise UnavailableError("device blocks in CPU memory cannot be exported; CUDA IPC needs a GPU")
        cupy, index = import_cupy(), self.rows.device.index
        address = self.rows.data_ptr()
        try:
            with cupy.cuda.Device(index):
                base = CudaDriver().allocation_base(address)
                handle = bytes(cupy.cuda.runtime.ipcGetMemHandle(base))
        except RuntimeError as err:
            raise UnavailableError(
                f"CUDA cannot share this memory ({err}); torch's expandable_segments setting rules that out"
            ) from err
        with self._lock:
            self._exports += 1
        return DeviceExport(_gpu_uuid(cupy, index), handle, address - base, *self.rows.shape)

    def retire(self) -> None:
        """One export is not used any more: its importer has closed it, or its process is gone."""
        with self._lock:
            assert self._exports, "an export was retired twice"
            self._exports -= 1


@dataclass(frozen=True, slots=True)
class SlotHold:
    """Slots that go back to their pool when a copy ends."""

    blocks: DeviceBlocks
    slots: Slots = field(repr=False)

    def release(self) -> None:
        """Free the slots."""
        self.blocks.free(self.slots)


class MappedBlocks:
    """Device blocks of another process, mapped into this one until close(); `rows` is [slots, block_bytes]."""

    def __init__(self, export: DeviceExport, device: str) -> None:
        """Raises UnavailableError if CUDA is missing or refuses, InvalidArgumentError for another GPU's export."""
        torch = import_cuda_torch(device)
        self._cupy = import_cupy()
        self._index = torch.device(device).index
        if _gpu_uuid(self._cupy, self._index) != export.gpu_uuid:
            raise InvalidArgumentError(f"the export lies on another GPU than {device}; only engines of one GPU share")
        try:
            with self._cupy.cuda.Device(self._index):
                self._base: int | None = self._cupy.cuda.runtime.ipcOpenMemHandle(export.handle)
        except RuntimeError as err:
            raise UnavailableError(f"CUDA cannot map the exported blocks: {err}") from err
        self.rows = torch.as_tensor(_ForeignMemory(self._base + export.offset_bytes, export), device=device)

    def close(self) -> None:
        """Unmap; no copy may be under way. Then the exporter may retire the export. Idempotent."""
        base, self._base = self._base, None
        self.rows = None
        if base is not None:
            with self._cupy.cuda.Device(self._index):
                self._cupy.cuda.runtime.ipcCloseMemHandle(base)


class _ForeignMemory:
    """Mapped memory in the form in which torch takes foreign arrays (CUDA array interface, version 3)."""

    def __init__(self, address: int, export: DeviceExport) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (export.slots, export.block_bytes),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


def _allocate(slots: int, block_bytes: int, device: str) -> Any:  # noqa: ANN401  # a torch tensor
    try:
        import torch
    except ImportError as err:
        raise UnavailableError("device blocks need torch, which is not installed") from err
    if device != CPU:
        import_cuda_torch(device)
    try:
        return torch.empty((slots, block_bytes), dtype=torch.uint8, device=device)
    except RuntimeError as err:  # torch reports lack of memory as one
        raise NoSpaceError(f"{device} has no {slots * block_bytes} bytes for device blocks: {err}") from err


def _gpu_uuid(cupy: Any, index: int) -> bytes:  # noqa: ANN401  # CuPy is no dependency of the core
    return bytes(cupy.cuda.runtime.getDeviceProperties(index)["uuid"])
