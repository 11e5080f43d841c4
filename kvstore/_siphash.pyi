import numpy as np
from numpy.typing import NDArray

def siphash128(key: bytes, message: bytes) -> bytes: ...
def chain_keys(
    ns_key: bytes, parent: bytes, tokens: NDArray[np.uint32], block_tokens: int, out: NDArray[np.uint8]
) -> None: ...
