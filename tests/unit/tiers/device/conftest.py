from __future__ import annotations

import shutil
import subprocess
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.tiers.device import DeviceSettings, open_copier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HERE = Path(__file__).parent
CSRC = HERE.parents[3] / "tiers" / "csrc"


class FifoStream:
    """A stream whose work runs on a thread of its own, in order; implements kvstore.tiers.device_copies.Stream."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._given = self._done = 0
        self._open = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def give(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._queue.append(work)
            self._given += 1
            self._changed.notify_all()

    def record_event(self) -> FifoEvent:
        with self._changed:
            return FifoEvent(self, self._given)

    def wait_event(self, event) -> None:
        self.give(event.synchronize)

    def is_done(self, count: int) -> bool:
        return self._done >= count

    def wait_done(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._done >= count, 60)

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._thread.join(ANSWER_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or not self._open)
                if not self._queue:
                    return
                work = self._queue.popleft()
            work()
            del work
            with self._changed:
                self._done += 1
                self._changed.notify_all()


class FifoEvent:
    def __init__(self, stream: FifoStream, count: int) -> None:
        self._stream, self._count = stream, count

    def query(self) -> bool:
        return self._stream.is_done(self._count)

    def synchronize(self) -> None:
        self._stream.wait_done(self._count)


@pytest.fixture
def streams() -> Iterator[Callable[[], FifoStream]]:
    made: list[FifoStream] = []

    def new_stream() -> FifoStream:
        made.append(FifoStream())
        return made[-1]

    yield new_stream
    for stream in made:
        stream.close()


@pytest.fixture
def copier():
    with open_copier("cpu", DeviceSettings(copies_max=8)) as opened:
        yield opened


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor's values in row-major order, whatever its strides."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@pytest.fixture
def packed() -> Callable[[Sequence[Sequence[torch.Tensor]], Sequence[int]], np.ndarray]:
    """The model: blocks of tensors [blocks, ...], given by layer, as packed rows."""

    def pack(layers: Sequence[Sequence[torch.Tensor]], block_ids: Sequence[int]) -> np.ndarray:
        rows = [np.concatenate([bytes_of(tensor[i]) for layer in layers for tensor in layer]) for i in block_ids]
        return np.stack(rows) if rows else np.empty((0, 0), dtype=np.uint8)

    return pack


@pytest.fixture
def random_tensor() -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random bytes; compared as bytes, so that no value is special."""
        width = torch.empty(0, dtype=dtype).element_size()
        filled = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8, generator=generator)
        return filled.view(dtype)

    return make


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles a program of this folder with the kernels' sources."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("built")

    def build(source: str, name: str, *flags: str | Path) -> Path:
        program = folder / name
        if not program.exists():
            common = ["-std=c++17", "-Wall", "-Werror", "-Wno-unknown-pragmas", f"-I{CSRC}"]
            subprocess.run(["g++", *common, HERE / source, *flags, "-o", program], check=True)
        return program

    return build
