"""How fast blocks move between an engine's paged memory and packed rows, beside plain copies of the same bytes.

    python bench/bench_device.py [--seconds 0.5] [--megabytes 256] [--json FILE]

With a GPU (torch with CUDA, and CuPy): host to device and back, by the copy kernel on some multiprocessors and by
the copy engines, beside one large copy of page-locked memory; device to device beside a device memcpy; and what copies
do to a matrix product on the same GPU. Without: the CPU launcher with one thread and with all, and indexing by torch,
beside one large memcpy. Every layout is verified before it is measured. Rates are GB/s (1e9 bytes copied once),
medians; `share` is that of the large copy, and what can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from machine import describe

from kvstore.tiers.device import BlockCopier, CopyOutcome, DeviceSettings, PagedKv, open_copier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.device_copies import Stream

LAYERS, TOKENS, HEADS, SIZE = 16, 16, 8, 128
MIB = 1 << 20
KERNEL_ALONE, BATCH_ALWAYS = 2**31 - 1, 1
MULTIPROCESSORS = (4, 8, 12, 24, 2**31 - 1)
ALL = MULTIPROCESSORS[-1]


@dataclass(frozen=True)
class Engine:
    """Paged memory of one layout, twice as many blocks as are copied, every other one of them."""

    layout: str
    pages: PagedKv
    tensors: list[tuple[torch.Tensor, ...]]
    block_ids: np.ndarray

    @property
    def bytes(self) -> int:
        return len(self.block_ids) * self.pages.block_bytes

    def packed(self, block: int) -> torch.Tensor:
        """What a block's row should be."""
        pieces = [tensor[block].contiguous().view(torch.uint8).reshape(-1) for some in self.tensors for tensor in some]
        return torch.cat(pieces).cpu()


def engines(device: str, megabytes: int) -> list[Engine]:
    """Runs of 32 KiB (keys and values apart), 18 KiB (one latent), 4 KiB (heads outside of blocks), and scales."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(-99, 99, shape, dtype=torch.int16, device=device).view(torch.bfloat16)

    def blocks(block_bytes: int) -> int:
        return 2 * max(1, megabytes * MIB // block_bytes)

    plain = blocks(LAYERS * 2 * TOKENS * HEADS * SIZE * 2)
    first = [random(2, plain, TOKENS, HEADS, SIZE) for _ in range(LAYERS)]
    inner = [random(plain, 2, TOKENS, HEADS, SIZE) for _ in range(LAYERS)]
    latent = [random(blocks(LAYERS * TOKENS * 576 * 2), TOKENS, 576) for _ in range(LAYERS)]
    dense = [random(2, HEADS, plain, TOKENS, SIZE).transpose(1, 2) for _ in range(LAYERS)]
    fp8_blocks = blocks(LAYERS * 2 * TOKENS * HEADS * (SIZE + 4))
    fp8 = [random(2, fp8_blocks, TOKENS, HEADS, SIZE // 2).view(torch.uint8) for _ in range(LAYERS)]
    scales = [tuple(random(2, fp8_blocks, TOKENS, HEADS * 2)) for _ in range(LAYERS)]
    described = {
        "[2, blocks, ...]": (PagedKv.planes_first(first), [tuple(layer) for layer in first]),
        "[blocks, 2, ...]": (PagedKv.blocks_first(inner), [(layer[:, 0], layer[:, 1]) for layer in inner]),
        "latent": (PagedKv.latent(latent), [(layer,) for layer in latent]),
        "heads outside": (PagedKv.planes_first(dense), [tuple(layer) for layer in dense]),
        "fp8 with scales": (
            PagedKv.planes_first(fp8, scales),
            [(*layer, *some) for layer, some in zip(fp8, scales, strict=True)],
        ),
    }
    order = np.random.default_rng(1)
    return [
        Engine(name, pages, tensors, order.permutation(pages.blocks)[: pages.blocks // 2])
        for name, (pages, tensors) in described.items()
    ]


class Bench:
    """Repeats each measurement for a while and keeps the rows."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.rows: list[dict[str, object]] = []

    def beside(
        self, copied_bytes: int, floor: Callable[[], object], calls: dict[str, Callable[[], object]], **row: object
    ) -> None:
        """Rates of calls and of the floor, taken in turns, each as a share of the floor."""
        every = {"one large copy": floor, **calls}
        times: dict[str, list[float]] = {name: [] for name in every}
        for call in every.values():
            call()
        until = time.perf_counter() + self._seconds * len(every)
        while time.perf_counter() < until or len(times["one large copy"]) < 5:
            for name, call in every.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        for name, seconds in medians.items():
            share = round(medians["one large copy"] / seconds, 3)
            self.keep(**row, way=name, gb_per_s=round(copied_bytes / seconds / 1e9, 3), share=share)

    def keep(self, **row: object) -> None:
        self.rows.append(row)
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)


def verify(engine: Engine, copier: BlockCopier, rows: object) -> None:
    """Store all blocks and compare some; then load them into other blocks and compare these."""
    assert copier.store(engine.pages, engine.block_ids, rows).wait() is CopyOutcome.COPIED
    chosen = range(0, len(engine.block_ids), max(1, len(engine.block_ids) // 7))
    host = torch.as_tensor(rows).cpu()
    expected = [engine.packed(int(engine.block_ids[i])) for i in chosen]
    assert all(torch.equal(block, host[i]) for i, block in zip(chosen, expected, strict=True)), engine.layout
    backwards = engine.block_ids[::-1].copy()
    assert copier.load(engine.pages, backwards, rows).wait() is CopyOutcome.COPIED
    assert all(
        torch.equal(block, engine.packed(int(backwards[i]))) for i, block in zip(chosen, expected, strict=True)
    ), engine.layout


def measure_cpu(bench: Bench, megabytes: int) -> None:
    """The CPU launcher, and torch, beside one large copy by one thread, which is as fast as this memory gets."""
    for engine in engines("cpu", megabytes):
        rows, other, target = (np.zeros((len(engine.block_ids), engine.pages.block_bytes), np.uint8) for _ in range(3))
        calls: dict[str, Callable[[], object]] = {"torch indexing, store": lambda e=engine, r=rows: index_blocks(e, r)}
        copiers = {count: open_copier("cpu", DeviceSettings(cpu_threads=count)) for count in {1, os.cpu_count() or 1}}
        for count, copier in copiers.items():
            verify(engine, copier, rows)
            calls |= {
                f"store, {count} threads": lambda e=engine, c=copier, r=rows: c.store(e.pages, e.block_ids, r).wait(),
                f"load, {count} threads": lambda e=engine, c=copier, r=rows: c.load(e.pages, e.block_ids, r).wait(),
            }
        bench.beside(engine.bytes, lambda to=target, of=other: np.copyto(to, of), calls, op="cpu", layout=engine.layout)
        for copier in copiers.values():
            copier.close()


def index_blocks(engine: Engine, rows: np.ndarray) -> None:
    """What an engine would do without us: one indexing call for each piece."""
    ids, packed, first = torch.from_numpy(engine.block_ids), torch.from_numpy(rows), 0
    for some in engine.tensors:
        for tensor in some:
            piece = tensor[ids].reshape(len(ids), -1).view(torch.uint8)
            packed[:, first : first + piece.shape[1]] = piece
            first += piece.shape[1]


def measure_gpu(bench: Bench, device: str, megabytes: int) -> None:
    """Host to device and back, device to device, and a matrix product beside a copy."""
    for engine in engines(device, megabytes):
        measure_host_copies(bench, device, engine)
        measure_device_copies(bench, device, engine)
    measure_overlap(bench, device, engines(device, megabytes)[0])


def measure_host_copies(bench: Bench, device: str, engine: Engine) -> None:
    """Copies to and from page-locked host memory, each way of making them, beside one large copy."""
    ways = {f"kernel on {count} multiprocessors": (count, KERNEL_ALONE) for count in MULTIPROCESSORS[:-1]}
    ways |= {"kernel on all": (ALL, KERNEL_ALONE), "copy engines": (ALL, BATCH_ALWAYS)}
    copiers = {
        way: open_copier(device, DeviceSettings(multiprocessors_max=count, batch_run_bytes_min=run_bytes))
        for way, (count, run_bytes) in ways.items()
    }
    rows = next(iter(copiers.values())).new_rows(len(engine.block_ids), engine.pages.block_bytes)
    for copier in copiers.values():
        verify(engine, copier, rows)
    pinned, flat = torch.from_numpy(rows), torch.empty(rows.shape, dtype=torch.uint8, device=device)
    stores = {w: lambda c=c: c.store(engine.pages, engine.block_ids, rows).wait() for w, c in copiers.items()}
    loads = {w: lambda c=c: c.load(engine.pages, engine.block_ids, rows).wait() for w, c in copiers.items()}
    bench.beside(engine.bytes, lambda: copied(pinned, flat), stores, op="device to host", layout=engine.layout)
    bench.beside(engine.bytes, lambda: copied(flat, pinned), loads, op="host to device", layout=engine.layout)
    for copier in copiers.values():
        copier.close()


def measure_device_copies(bench: Bench, device: str, engine: Engine) -> None:
    """Copies inside GPU memory on all multiprocessors, beside a device memcpy."""
    rows = torch.empty((len(engine.block_ids), engine.pages.block_bytes), dtype=torch.uint8, device=device)
    other = torch.empty_like(rows)
    with open_copier(device, DeviceSettings(multiprocessors_max=ALL)) as copier:
        verify(engine, copier, rows)
        calls = {
            "store": lambda: copier.store(engine.pages, engine.block_ids, rows).wait(),
            "load": lambda: copier.load(engine.pages, engine.block_ids, rows).wait(),
        }
        bench.beside(engine.bytes, lambda: copied(other, rows), calls, op="device to device", layout=engine.layout)


def copied(target: torch.Tensor, source: torch.Tensor) -> None:
    """One large copy, waited for."""
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


def measure_overlap(bench: Bench, device: str, engine: Engine) -> None:
    """What is left of a matrix product's speed, and of a load's, when both run at once."""
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    rows = None
    for way, count, run_bytes in (
        *((f"kernel on {count} multiprocessors", count, KERNEL_ALONE) for count in MULTIPROCESSORS[:-1]),
        ("copy engines", ALL, BATCH_ALWAYS),
    ):
        with open_copier(device, DeviceSettings(multiprocessors_max=count, batch_run_bytes_min=run_bytes)) as copier:
            rows = copier.new_rows(len(engine.block_ids), engine.pages.block_bytes) if rows is None else rows
            side = torch.cuda.Stream(device)  # an idle stream: the load is to run beside the product, not behind it
            alone = multiply_seconds(left, right)
            copy_alone = load_seconds(copier, engine, rows, side, 4)
            handles = [copier.load(engine.pages, engine.block_ids, rows, stream=side) for _ in range(16)]
            beside = multiply_seconds(left, right)
            still_copying = handles[-1].outcome is CopyOutcome.PENDING
            for handle in handles:
                handle.wait()
            bench.keep(
                op="matrix product beside loads",
                layout=engine.layout,
                way=way,
                share=round(alone / beside, 3),
                copy_gb_per_s_alone=round(4 * engine.bytes / copy_alone / 1e9, 3),
                copies_outlasted_it=still_copying,
            )


def multiply_seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    """Median seconds of a matrix product, by events of the GPU."""
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.mm(left, right)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def load_seconds(copier: BlockCopier, engine: Engine, rows: object, stream: Stream, times: int) -> float:
    """Seconds of some loads, one behind the other."""
    start = time.perf_counter()
    handles = [copier.load(engine.pages, engine.block_ids, rows, stream=stream) for _ in range(times)]
    for handle in handles:
        handle.wait()
    return time.perf_counter() - start


def main() -> None:
    """Measure what this machine has and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each way of each measurement")
    parser.add_argument("--megabytes", type=int, default=256, help="bytes copied at a time")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    bench = Bench(arguments.seconds)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    print(f"gpu={gpu}  torch={torch.__version__}", flush=True)
    if gpu is None:
        measure_cpu(bench, arguments.megabytes)
    else:
        measure_gpu(bench, "cuda:0", arguments.megabytes)
    if arguments.json:
        result = {"machine": describe() | {"gpu": gpu, "torch": torch.__version__}, "rows": bench.rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
