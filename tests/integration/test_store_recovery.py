"""What a store promises across restarts, against real files and a really killed process."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.testing.blocks import expected_rows, store_prompt, verified_blocks
from kvstore.types import KvLayout, Namespace, Root, Tier

HERE = Path(__file__).parent
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
PROMPT = list(range(40))
BLOCKS = 10
HOST_BYTES = 4 << 20
DISK_BYTES = 32 << 20


def reopened(path: Path, disk_bytes: int = DISK_BYTES) -> kvstore.KvStore:
    return kvstore.open(path, host_bytes=HOST_BYTES, disk_bytes=disk_bytes)


def slabs(path: Path) -> list[Path]:
    found = sorted((path / "slabs").iterdir())
    assert found
    return found


def test_what_was_flushed_is_found_on_disk_after_a_restart(tmp_path: Path) -> None:
    prompts = [[*range(8), *range(start, start + 30)] for start in range(100, 2000, 100)]
    with reopened(tmp_path) as store:
        for prompt in prompts:
            store_prompt(store, NAMESPACE, prompt)
            store_prompt(store, NAMESPACE, prompt, root=Root(salt="x"))
    with reopened(tmp_path) as store:
        for prompt in prompts:
            assert store.match(NAMESPACE, prompt).tiers[Tier.DISK] >= 7  # the first two blocks are everyone's
            assert verified_blocks(store, NAMESPACE, prompt) == 9
            assert store.match(NAMESPACE, prompt).tiers == {Tier.HOST: 9}
            assert verified_blocks(store, NAMESPACE, prompt, root=Root(salt="x")) == 9
            assert store.match(NAMESPACE, prompt, root=Root(salt="y")).blocks == 0
        assert store.stats().corrupt_blocks == 0


class JumpingClock:
    """Machine clocks of a node whose date is set, and which was restarted: each store has its own."""

    def __init__(self, monotonic: float, unix: float) -> None:
        self._monotonic = monotonic
        self._unix = unix

    def monotonic(self) -> float:
        return self._monotonic

    def unix(self) -> float:
        self._unix = -self._unix  # a jump at every look
        return self._unix


def test_jumps_of_the_clock_lose_nothing(tmp_path: Path) -> None:
    for seconds in (1e9, 5.0, 4e9, 0.0):
        clock = JumpingClock(seconds, 4e9 - seconds)
        with kvstore.open(tmp_path, host_bytes=HOST_BYTES, disk_bytes=DISK_BYTES, clock=clock) as store:
            prompt = [*PROMPT, *range(int(seconds) % 1000, int(seconds) % 1000 + 4)]
            store_prompt(store, NAMESPACE, prompt)
            assert verified_blocks(store, NAMESPACE, PROMPT) == BLOCKS
            assert verified_blocks(store, NAMESPACE, prompt) == BLOCKS + 1
            assert store.stats().stored_blocks == (BLOCKS + 1 if seconds == 1e9 else 1 if seconds == 5.0 else 0)
            assert store.verify().problems == ()


def test_another_namespace_does_not_find_them(tmp_path: Path) -> None:
    with reopened(tmp_path) as store:
        store_prompt(store, NAMESPACE, PROMPT)
    other = Namespace(model="model", revision="other", layout=LAYOUT)
    with reopened(tmp_path) as store:
        assert store.match(other, PROMPT).blocks == 0
        store_prompt(store, other, PROMPT)
        assert verified_blocks(store, other, PROMPT) == BLOCKS
        assert verified_blocks(store, NAMESPACE, PROMPT) == BLOCKS


def test_a_reader_finishes_from_disk_after_a_clear(tmp_path: Path) -> None:
    with reopened(tmp_path) as store:
        store_prompt(store, NAMESPACE, PROMPT)
    with reopened(tmp_path) as store:
        match = store.match(NAMESPACE, PROMPT)
        assert match.tiers == {Tier.DISK: BLOCKS}
        with store.lease(match) as lease:
            store.clear(NAMESPACE)
            rows = np.zeros((BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
            assert lease.load_into(rows).blocks == BLOCKS
        assert np.array_equal(expected_rows(NAMESPACE, PROMPT), rows)
        assert store.stats().corrupt_blocks == 0
        assert verified_blocks(store, NAMESPACE, PROMPT) == 0
    with reopened(tmp_path) as store:
        assert verified_blocks(store, NAMESPACE, PROMPT) == 0


@pytest.mark.parametrize("rebuild", [False, True], ids=["index", "rebuilt from headers"])
def test_cleared_and_evicted_blocks_stay_away(tmp_path: Path, *, rebuild: bool) -> None:
    kept = list(range(500, 540))
    with reopened(tmp_path) as store:
        for prompt in (PROMPT, kept):
            store_prompt(store, NAMESPACE, prompt)
        store.flush()
        store.evict(NAMESPACE, PROMPT, from_block=4)
        store_prompt(store, NAMESPACE, PROMPT, root=Root(salt="x"))
        other = Namespace(model="other", revision="revision", layout=LAYOUT)
        store_prompt(store, other, PROMPT)
        store.flush()
        store.clear(other)
    if rebuild:
        shutil.rmtree(tmp_path / "index")
    with reopened(tmp_path) as store:
        assert verified_blocks(store, NAMESPACE, PROMPT) == 4
        assert verified_blocks(store, NAMESPACE, kept) == BLOCKS
        assert verified_blocks(store, NAMESPACE, PROMPT, root=Root(salt="x")) == BLOCKS
        assert verified_blocks(store, other, PROMPT) == 0


def test_evicted_blocks_stay_away_after_a_kill(tmp_path: Path) -> None:
    """The directory as a killed process leaves it: copied while the store is open."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    with reopened(data) as store:
        store_prompt(store, NAMESPACE, PROMPT)
        store.flush()
        store.evict(NAMESPACE, PROMPT, from_block=4)
        store.clear(NAMESPACE)
        store_prompt(store, NAMESPACE, PROMPT[:8])
        store.flush()
        shutil.copytree(data, copy)
    with reopened(copy) as store:
        assert verified_blocks(store, NAMESPACE, PROMPT) == 2


def _flip(slab: Path, random_source: random.Random) -> None:
    data = bytearray(slab.read_bytes())
    for _ in range(200):
        data[random_source.randrange(4096, len(data))] ^= 1 << random_source.randrange(8)
    slab.write_bytes(data)


def _truncate(slab: Path, random_source: random.Random) -> None:
    os.truncate(slab, random_source.randrange(slab.stat().st_size))


def _delete(slab: Path, random_source: random.Random) -> None:
    slab.unlink()


def _swap(slab: Path, random_source: random.Random) -> None:
    """Another slab's bytes under this one's name."""
    other = random_source.choice([path for path in slab.parent.iterdir() if path != slab])
    shutil.copyfile(other, slab)


@pytest.mark.parametrize("damage", [_flip, _truncate, _delete, _swap])
@pytest.mark.parametrize("when", ["while open", "while closed", "before a rebuild"])
def test_damaged_slabs_are_misses_never_other_bytes(tmp_path: Path, damage: object, when: str) -> None:
    random_source = random.Random(f"{damage}{when}")
    prompts = [list(range(start, start + 400)) for start in range(0, 20 * 400, 400)]
    with reopened(tmp_path) as store:
        for prompt in prompts:
            store_prompt(store, NAMESPACE, prompt)
        store.flush()
        if when == "while open":
            damage(slabs(tmp_path)[0], random_source)  # type: ignore[operator]
            found = [verified_blocks(store, NAMESPACE, prompt) for prompt in prompts]
    if when != "while open":
        damage(slabs(tmp_path)[0], random_source)  # type: ignore[operator]
        if when == "before a rebuild":
            shutil.rmtree(tmp_path / "index")
        with reopened(tmp_path) as store:
            found = [verified_blocks(store, NAMESPACE, prompt) for prompt in prompts]
            for prompt in prompts:
                store_prompt(store, NAMESPACE, prompt)
                assert verified_blocks(store, NAMESPACE, prompt) == 100
        assert sum(found) < 100 * len(prompts)
    assert sum(found) > 0


def test_a_smaller_cap_holds_at_once_and_keeps_answers_right(tmp_path: Path) -> None:
    prompts = [list(range(start, start + 400)) for start in range(0, 20 * 400, 400)]
    with reopened(tmp_path) as store:
        for prompt in prompts:
            store_prompt(store, NAMESPACE, prompt)
    with reopened(tmp_path, disk_bytes=8 << 20) as store:
        assert store.stats().tiers["disk"].used_bytes <= 8 << 20
        assert sum(path.stat().st_blocks * 512 for path in slabs(tmp_path)) <= 8 << 20
        for prompt in prompts:
            verified_blocks(store, NAMESPACE, prompt)
            store_prompt(store, NAMESPACE, prompt)
            assert verified_blocks(store, NAMESPACE, prompt) == 100


def test_what_nobody_asks_for_after_a_restart_makes_room(tmp_path: Path) -> None:
    prompts = [list(range(start, start + 400)) for start in range(0, 40 * 400, 400)]
    with reopened(tmp_path, disk_bytes=8 << 20) as store:
        for prompt in prompts:
            store_prompt(store, NAMESPACE, prompt)
    other = Namespace(model="other", revision="revision", layout=LAYOUT)
    with reopened(tmp_path, disk_bytes=8 << 20) as store:
        for prompt in prompts[:4]:
            store_prompt(store, other, prompt)
        store.flush()
        assert store.stats().tiers["disk"].blocks == 400


@pytest.mark.kill
@pytest.mark.parametrize("round_index", range(4))
def test_after_kill_every_block_is_right_or_absent(tmp_path: Path, round_index: int) -> None:
    """Kill -9 at a random moment, three times over in one directory; what was flushed is there."""
    random_source = random.Random(round_index)
    writer = _load_writer()
    flushed: dict[int, int] = {}
    for seed in (0, 10_000, 20_000):
        flushed[seed] = _write_and_kill(tmp_path, seed, lines=random_source.randrange(1, 12))
        with kvstore.open(tmp_path, host_bytes=writer.HOST_BYTES, disk_bytes=writer.DISK_BYTES) as store:
            for index in range(flushed[seed] + 30):
                prompt = writer.prompt_at(index, seed)
                found = verified_blocks(store, writer.NAMESPACE, prompt)
                if index < flushed[seed]:
                    assert found == len(prompt) // 4, (seed, index)
            assert store.stats().corrupt_blocks == 0


def _load_writer():
    import importlib.util

    spec = importlib.util.spec_from_file_location("writer_process", HERE / "writer_process.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write_and_kill(path: Path, seed: int, lines: int) -> int:
    """Run the writer until it has said `lines` lines, kill it, and return how many prompts it had flushed."""
    command = [sys.executable, str(HERE / "writer_process.py"), str(path), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        flushed = 0
        for line, _ in zip(process.stdout, range(lines), strict=False):
            word, number = line.split()
            flushed = int(number) if word == "flushed" else flushed
        process.send_signal(signal.SIGKILL)
    return flushed
