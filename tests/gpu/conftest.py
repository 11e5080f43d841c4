from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kvstore.tiers.device import DeviceSettings, PagedKv, open_copier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.tiers.device import BlockCopier

DEVICE = "cuda:0"
BLOCKS = 40


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Every test of this folder needs a GPU, and says so where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, which torch does not see here")
    pytest.importorskip("cupy", reason="needs CuPy")


@pytest.fixture
def new_copier() -> Iterator[Callable[..., BlockCopier]]:
    opened: list[BlockCopier] = []

    def open_one(**settings: int) -> BlockCopier:
        opened.append(open_copier(DEVICE, DeviceSettings(**settings)))
        return opened[-1]

    yield open_one
    for copier in opened:
        copier.close()


@pytest.fixture
def random_tensor() -> Callable[..., torch.Tensor]:
    generator = torch.Generator(DEVICE if torch.cuda.is_available() else "cpu").manual_seed(3)

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        width = torch.empty(0, dtype=dtype).element_size()
        size = (*shape[:-1], shape[-1] * width)
        return torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE, generator=generator).view(dtype)

    return make


@pytest.fixture
def packed() -> Callable[[Sequence[Sequence[torch.Tensor]], Sequence[int]], np.ndarray]:
    """The model: blocks of tensors [blocks, ...], given by layer, as packed rows in host memory."""

    def pack(layers: Sequence[Sequence[torch.Tensor]], block_ids: Sequence[int]) -> np.ndarray:
        torch.cuda.synchronize()
        host = [tensor.cpu().contiguous() for layer in layers for tensor in layer]
        rows = [np.concatenate([t[i].reshape(-1).view(torch.uint8).numpy() for t in host]) for i in block_ids]
        return np.stack(rows)

    return pack


@pytest.fixture
def engine(random_tensor) -> tuple[PagedKv, list[tuple[torch.Tensor, ...]]]:
    layers = [random_tensor(2, BLOCKS, 16, 8, 128) for _ in range(8)]
    return PagedKv.planes_first(layers), [(layer[0], layer[1]) for layer in layers]
