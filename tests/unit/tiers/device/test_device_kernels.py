"""The CUDA kernels' own text: right on a CPU, under sanitizers, and what the compilers make of it for each GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.tiers._core import _copy
from kvstore.tiers.device_cuda import KERNEL_THREADS, KERNELS, WARP_THREADS, kernel_source
from kvstore.tiers.device_pages import PIECE_DTYPE

SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
POISON = 0xA5
TILE = _copy.TILE_BYTES
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@dataclass
class Shape:
    """One piece: where its rows lie in a region of its own, which begins `misaligned` bytes off."""

    rows: int
    row_bytes: int
    row_gap: int = 0
    block_gap: int = 0
    misaligned: int = 0


@dataclass
class Case:
    shapes: list[Shape]
    blocks: int
    block_ids: list[int]
    row_ids: list[int]
    grid: int = 2
    threads: int = 64
    first_piece: int = 0
    pieces: int | None = None
    packed_gap: int = 0
    packed_misaligned: int = 0
    table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.table = np.zeros(len(self.shapes) + 1, dtype=PIECE_DTYPE)
        tiles = offset = 0
        for number, (row, shape) in enumerate(zip(self.table, self.shapes, strict=False)):
            row["address"] = number << 32
            row["row_stride"] = shape.row_bytes + shape.row_gap
            row["block_stride"] = shape.rows * (shape.row_bytes + shape.row_gap) + shape.block_gap
            row["packed_offset"], row["first_tile"] = offset, tiles
            row["rows"], row["row_bytes"] = shape.rows, shape.row_bytes
            offset += shape.rows * shape.row_bytes
            tiles += shape.rows * -(-shape.row_bytes // TILE)
        self.table[-1]["first_tile"] = tiles
        self.packed_stride = offset + self.packed_gap
        if self.pieces is None:
            self.pieces = len(self.shapes) - self.first_piece

    def run_indices(self, number: int, block: int, row: int) -> tuple[slice, slice]:
        """Where one row lies in its region, and in a packed block."""
        piece, shape = self.table[number], self.shapes[number]
        paged = int(block * piece["block_stride"] + row * piece["row_stride"])
        packed = int(piece["packed_offset"]) + row * shape.row_bytes
        return slice(paged, paged + shape.row_bytes), slice(packed, packed + shape.row_bytes)


def run_cases(program: Path, cases: list[tuple[int, Case]]) -> list[tuple[list[np.ndarray], np.ndarray, list, list]]:
    """What the kernels leave in memory (regions, packed), and what the model says they should, for each case."""
    random = np.random.default_rng(5)
    stdin = b""
    expected = []
    for direction, case in cases:
        sizes = [case.run_indices(n, case.blocks - 1, s.rows - 1)[0].stop for n, s in enumerate(case.shapes)]
        packed_bytes = max(case.row_ids, default=0) * case.packed_stride + case.packed_stride - case.packed_gap
        regions = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        packed = np.full(packed_bytes, POISON, dtype=np.uint8)
        if direction == 1:
            packed[:] = random.integers(0, 256, packed_bytes, dtype=np.uint8)
            for region in regions:
                region[:] = POISON
        numbers = [direction, case.grid, case.threads, case.pieces, case.first_piece, len(case.table)]
        numbers += [len(case.block_ids), packed_bytes, case.packed_misaligned, case.packed_stride, len(regions)]
        for size, shape in zip(sizes, case.shapes, strict=True):
            numbers += [size, shape.misaligned]
        ids = np.array([*case.block_ids, *case.row_ids], dtype=np.int64)
        memory = b"".join(part.tobytes() for part in (*regions, packed))
        stdin += np.array(numbers, dtype=np.uint64).tobytes() + case.table.tobytes() + ids.tobytes() + memory
        model(direction, case, regions, packed)
        expected.append((regions, packed))
    done = subprocess.run([program], input=stdin, capture_output=True, check=False, timeout=ANSWER_SECONDS)
    assert 0 == done.returncode, done.stderr.decode()[-4000:]
    return compared(done.stdout, expected)


def model(direction: int, case: Case, regions: list[np.ndarray], packed: np.ndarray) -> None:
    for number in range(case.first_piece, case.first_piece + (case.pieces or 0)):
        for block, row_id in zip(case.block_ids, case.row_ids, strict=True):
            for row in range(case.shapes[number].rows):
                paged, inside = case.run_indices(number, block, row)
                there = packed[row_id * case.packed_stride :][inside]
                if direction == 0:
                    there[:] = regions[number][paged]
                else:
                    regions[number][paged] = there


def compared(stdout: bytes, expected: list) -> list:
    at = 0
    answers = []
    for regions, packed in expected:
        got = []
        for part in (*regions, packed):
            got.append(np.frombuffer(stdout, dtype=np.uint8, count=len(part), offset=at))
            at += len(part)
        answers.append((got, [*regions, packed]))
    assert len(stdout) == at
    return answers


def assert_as_model(program: Path, cases: list[Case]) -> None:
    both = [(direction, case) for case in cases for direction in (0, 1)]
    for (direction, case), (got, expected) in zip(both, run_cases(program, both), strict=True):
        for number, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert np.array_equal(other, one), (direction, case, number)


@pytest.fixture(scope="module")
def program(built) -> Path:
    return built("kernels_on_host.cpp", "kernels_sanitized", *SANITIZED)


IDS, ROWS = [2, 0, 3], [1, 2, 0]


def test_every_length_of_a_row_is_copied_whole_and_alone(program):
    lengths = [*range(1, 70), 511, 512, 513, 2047, 2048, 2049, TILE - 1, TILE, TILE + 1, 2 * TILE + 17]
    assert_as_model(program, [Case([Shape(1, length)], 4, IDS, ROWS) for length in lengths])


@pytest.mark.parametrize("packed_misaligned", range(16))
def test_every_alignment_of_both_sides_is_right(program, packed_misaligned):
    cases = [
        Case([Shape(2, 97, 3, 1, misaligned)], 4, IDS, ROWS, packed_misaligned=packed_misaligned, packed_gap=gap)
        for misaligned in range(16)
        for gap in (0, 1, 16)
    ]
    assert_as_model(program, cases)


@pytest.mark.parametrize(("grid", "threads"), [(1, 32), (3, 96), (7, 32), (1, 1024), (64, 32)])
def test_any_grid_copies_the_same(program, grid, threads):
    shapes = [Shape(1, 2 * TILE + 5), Shape(3, 40, 8), Shape(5, 16, 16, 32), Shape(1, 1), Shape(2, TILE)]
    assert_as_model(program, [Case(shapes, 4, IDS, ROWS, grid=grid, threads=threads, packed_gap=7)])


def test_some_pieces_of_a_table_leave_the_others_alone(program):
    shapes = [Shape(1, 48), Shape(2, 100), Shape(1, TILE + 3), Shape(4, 20, 4)]
    spans = [(first, pieces) for first in range(4) for pieces in range(1, 5 - first)]
    assert_as_model(program, [Case(shapes, 4, IDS, ROWS, first_piece=first, pieces=pieces) for first, pieces in spans])


def test_random_shapes_are_copied_as_the_model_does(program):
    random = np.random.default_rng(11)
    cases = []
    for _ in range(60):
        count, blocks = int(random.integers(1, 6)), int(random.integers(1, 7))
        shapes = [
            Shape(*(int(n) for n in random.integers((1, 1, 0, 0, 0), (6, 700, 40, 40, 16)))) for _ in range(count)
        ]
        ids = random.permutation(blocks)[: int(random.integers(0, blocks + 1))].tolist()
        rows = random.permutation(blocks)[: len(ids)].tolist()
        gap, misaligned = (int(n) for n in random.integers(0, 16, 2))
        cases.append(Case(shapes, blocks, ids, rows, packed_gap=gap, packed_misaligned=misaligned))
    assert_as_model(program, cases)


def test_the_source_needs_no_other_file_and_names_its_kernels():
    source = kernel_source()
    assert [] == re.findall(r"#include.*", source)
    assert [True, True] == [f" {name}(" in source for name in KERNELS.values()]
    assert f"kThreads = {KERNEL_THREADS};" in source
    assert f"kWarpThreads = {WARP_THREADS};" in source


@pytest.fixture(scope="module")
def source_file(tmp_path_factory) -> Path:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed: the kernels are not compiled for GPUs here")
    path = tmp_path_factory.mktemp("nvcc") / "kernels.cu"
    path.write_text(kernel_source())
    return path


@dataclass(frozen=True)
class Compiled:
    report: str
    ptx: str
    cubin: Path


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request, source_file) -> Compiled:
    folder = source_file.parent / request.param
    folder.mkdir()
    cubin = folder / "kernels.cubin"
    keep = ["-keep", "-keep-dir", folder]
    command = [
        "nvcc",
        "-std=c++17",
        f"-arch={request.param}",
        "-cubin",
        "-Xptxas",
        "-v",
        *keep,
        "-o",
        cubin,
        source_file,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    return Compiled(done.stdout + done.stderr, (folder / "kernels.ptx").read_text(), cubin)


def test_the_kernels_compile_without_spills(compiled):
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", compiled.report)
    assert [("0", "0", "0")] * len(KERNELS) == found


def test_a_block_of_all_threads_fits_the_registers_of_a_multiprocessor(compiled):
    counts = [int(count) for count in re.findall(r"Used (\d+) registers", compiled.report)]
    assert len(KERNELS) == len(counts)
    assert max(counts) * KERNEL_THREADS <= 65536


def test_the_kernels_load_four_times_128_bits_before_they_store(compiled):
    kernels = compiled.ptx.split(".visible .entry")[1:]
    assert len(KERNELS) == len(kernels)
    for kernel in kernels:
        accesses = re.findall(r"\b(ld|st)\.global\.cs\.v4\.[ub]32", kernel)
        assert "ld ld ld ld st st st st" in " ".join(accesses)
        assert ".local" not in kernel


def test_the_machine_code_has_128_bit_accesses(compiled):
    disassembler = shutil.which("nvdisasm")
    if disassembler is None:
        pytest.skip("nvdisasm is not installed: the machine code is not looked at here")
    listing = subprocess.run([disassembler, compiled.cubin], capture_output=True, text=True, check=True).stdout
    assert re.search(r"LDG\.\S*128", listing)
    assert re.search(r"STG\.\S*128", listing)
