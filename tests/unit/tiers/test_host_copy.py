"""Copies between slots and rows, beside naive ones: slots in any order, any parts, rows at any distance."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers import host_copy
from kvstore.tiers.host import HostTier

NS = b"n" * 16
HERE = Path(__file__).parent
CSRC = Path(host_copy.__file__).parent / "csrc"


@given(
    parts=st.lists(st.integers(1, 5000), min_size=1, max_size=4).map(tuple),
    extent_slots=st.integers(1, 9),
    order=st.permutations(range(30)),
    count=st.integers(0, 30),
    gap=st.integers(0, 7),
    data=st.data(),
)
def test_any_slots_and_parts_are_copied_as_one_by_one(parts, extent_slots, order, count, gap, data) -> None:
    part = data.draw(st.one_of(st.none(), st.integers(0, len(parts) - 1)))
    block_bytes = sum(parts)
    chosen = range(len(parts)) if part is None else (part,)
    width = sum(parts[number] for number in chosen)
    with HostTier(30 * block_bytes, extent_bytes=extent_slots * block_bytes) as tier:
        pool = tier.pool(NS, parts)
        slots = pool.allocate(30)[list(order)][:count]
        wide = np.random.default_rng(width).integers(0, 256, (count, width + gap), dtype=np.uint8)
        rows = wide[:, :width]
        pool.write(slots, rows, part=part)
        for slot, row in zip(slots, rows, strict=True):
            views = pool.views(int(slot))
            assert row.tobytes() == b"".join(views[number].tobytes() for number in chosen)
        read = np.full((count, width + gap), 9, dtype=np.uint8)
        pool.read(slots, read[:, :width], part=part)
        np.testing.assert_array_equal(rows, read[:, :width])
        assert (read[:, width:] == 9).all()


@pytest.mark.parametrize("block_bytes", [(16 << 10) - 1, 48 << 10, 3 << 20])
def test_copies_that_go_around_the_caches_are_right(block_bytes: int) -> None:
    count = (20 << 20) // block_bytes
    rows = np.random.default_rng(block_bytes).integers(0, 256, (count, block_bytes), dtype=np.uint8)
    with HostTier(2 * rows.nbytes) as tier:
        pool = tier.pool(NS, (block_bytes,))
        slots = np.random.default_rng(1).permutation(pool.allocate(count))
        pool.write(slots, rows)
        read = np.zeros_like(rows)
        pool.read(slots, read)
    np.testing.assert_array_equal(rows, read)


def test_what_does_not_fit_is_a_programming_error_and_changes_nothing() -> None:
    with HostTier(1000) as tier:
        pool = tier.pool(NS, (100, 20))
        slots = pool.allocate(2)
        ones = np.ones((2, 120), dtype=np.uint8)
        for wrong in (ones[:1], ones[:, :100], ones.astype(np.int8), ones.T.copy().T):
            with pytest.raises(AssertionError):
                pool.write(slots, wrong)
        with pytest.raises(AssertionError, match="not of this pool"):
            pool.write(np.array([0, 8], dtype=np.uint32), ones)
        frozen = np.zeros((2, 120), dtype=np.uint8)
        frozen.flags.writeable = False
        with pytest.raises(AssertionError):
            pool.read(slots, frozen)
        read = np.ones((2, 120), dtype=np.uint8)
        pool.read(slots, read)
        assert not read.any()


def test_native_copies_and_checksums_are_right_under_sanitizers_and_without_wide_registers(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources = [CSRC / f"{name}.cpp" for name in ("block_copy", "slot_copy", "checksum")]
    program = tmp_path / "host_copies"
    said = []
    for flags in (
        ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
        ["-O0", "-DKVSTORE_PLAIN_CHECKSUM"],
    ):
        inputs = [HERE / "host_copies_on_odd_shapes.cpp", *sources]
        command = [compiler, "-std=c++17", "-pthread", *flags, f"-I{CSRC}", *inputs, "-o", program]
        subprocess.run(command, check=True)
        done = subprocess.run([program], capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stdout + done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]
