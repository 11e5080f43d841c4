import numpy as np
from numpy.typing import NDArray

PIECE_BYTES: int
TILE_BYTES: int

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
