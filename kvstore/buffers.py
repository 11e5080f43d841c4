"""Callers' buffers, seen as rows of bytes without a copy.

A buffer is anything with the buffer protocol, DLPack, or a torch tensor on the CPU. It must be C-contiguous; its own
shape and dtype do not matter, only its bytes: they are cut into rows of `row_bytes`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import InvalidBufferError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.api import BlockBuffer


def readable_rows(buffer: BlockBuffer, row_bytes: int) -> NDArray[np.uint8]:
    """A view of `buffer` as uint8 [rows, row_bytes]. Raises InvalidBufferError where that cannot be."""
    return _rows(_as_bytes(buffer), row_bytes)


def writable_rows(buffer: BlockBuffer, row_bytes: int) -> NDArray[np.uint8]:
    """Like `readable_rows`, for a buffer that will be written."""
    flat = _as_bytes(buffer)
    if not flat.flags.writeable:
        raise InvalidBufferError(f"the {type(buffer).__name__} is read-only, expected a buffer that can be written")
    return _rows(flat, row_bytes)


def _rows(flat: NDArray[np.uint8], row_bytes: int) -> NDArray[np.uint8]:
    rows, rest = divmod(flat.size, row_bytes)
    if rest:
        raise InvalidBufferError(f"the buffer has {flat.size} bytes, expected a multiple of {row_bytes} (one block)")
    return flat.reshape(rows, row_bytes)


def _as_bytes(buffer: BlockBuffer) -> NDArray[np.uint8]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _tensor_bytes(buffer, torch)
    if isinstance(buffer, np.ndarray):
        return _array_bytes(buffer)
    try:
        return np.frombuffer(buffer, dtype=np.uint8)
    except (TypeError, ValueError, BufferError) as err:
        if not hasattr(buffer, "__dlpack__"):
            raise InvalidBufferError(
                f"a {type(buffer).__name__} cannot be read as contiguous bytes ({err}); "
                "expected a C-contiguous buffer, DLPack object or CPU tensor"
            ) from err
    return _array_bytes(_from_dlpack(buffer))


def _tensor_bytes(tensor: Any, torch: Any) -> NDArray[np.uint8]:  # noqa: ANN401  # torch is no dependency of the core
    if tensor.device.type != "cpu":
        raise InvalidBufferError(
            f"the tensor lies on {tensor.device}, expected a CPU tensor; copy it with .cpu() first"
        )
    if not tensor.is_contiguous():
        raise InvalidBufferError(f"the tensor of strides {tuple(tensor.stride())} is not contiguous")
    try:
        flat: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    except RuntimeError as err:  # a lazy conjugate or negation: its bytes are not its values
        raise InvalidBufferError(f"the tensor cannot be seen as bytes: {str(err).splitlines()[0]}") from err
    return flat


def _array_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    if not array.flags.c_contiguous:
        raise InvalidBufferError(f"the array of strides {array.strides} is not C-contiguous")
    if array.dtype.hasobject:
        raise InvalidBufferError(f"the array of {array.dtype} holds references, expected numbers")
    return array.reshape(-1).view(np.uint8)


def _from_dlpack(buffer: BlockBuffer) -> NDArray[Any]:
    try:
        return np.from_dlpack(buffer)
    except (TypeError, ValueError, RuntimeError, BufferError) as err:
        raise InvalidBufferError(f"a {type(buffer).__name__} gives no CPU memory through DLPack: {err}") from err
