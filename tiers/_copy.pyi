import numpy as np
from numpy.typing import NDArray

PIECE_BYTES: int
TILE_BYTES: int
DIGEST_BYTES_MIN: int

def gather(
    pieces: NDArray[np.uint8],
    block_ids: NDArray[np.int64],
    row_ids: NDArray[np.int64],
    packed_address: int,
    packed_stride: int,
    threads: int,
) -> None: ...
def scatter(
    pieces: NDArray[np.uint8],
    block_ids: NDArray[np.int64],
    row_ids: NDArray[np.int64],
    packed_address: int,
    packed_stride: int,
    threads: int,
) -> None: ...
def copy_and_digest(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> int: ...
def digest(data: NDArray[np.uint8]) -> int: ...
def seal_headers(parts: NDArray[np.uint64], headers: NDArray[np.uint8], page_bytes: int) -> None: ...
def check_headers(
    parts: NDArray[np.uint64], headers: NDArray[np.uint8], page_bytes: int, verdicts: NDArray[np.uint8]
) -> None: ...
def quantise(
    elements: NDArray[np.uint8],
    packed: NDArray[np.uint8],
    element: int,
    byte: int,
    groups: int,
    tokens: int,
    channels: int,
) -> tuple[float, float, float] | None: ...
def dequantise(
    packed: NDArray[np.uint8],
    elements: NDArray[np.uint8],
    element: int,
    byte: int,
    groups: int,
    tokens: int,
    channels: int,
) -> None: ...
def map_shared(fd: int, nbytes: int, alignment: int) -> NDArray[np.uint8]: ...
def map_read_only(fd: int, nbytes: int, alignment: int) -> NDArray[np.uint8]: ...
def advise_huge(address: int, nbytes: int) -> int: ...
def populate(address: int, nbytes: int) -> int: ...
def touch(address: int, nbytes: int) -> None: ...
def lock_pages(address: int, nbytes: int) -> int: ...
def unlock_pages(address: int, nbytes: int) -> int: ...

class SlotTable:
    def __init__(
        self,
        firsts: NDArray[np.int64],
        counts: NDArray[np.int64],
        starts: NDArray[np.uint64],
        part_bytes: NDArray[np.uint64],
    ) -> None: ...
    def write(self, slots: NDArray[np.uint32], address: int, stride: int, first_part: int, end_part: int) -> None: ...
    def read(self, slots: NDArray[np.uint32], address: int, stride: int, first_part: int, end_part: int) -> None: ...
