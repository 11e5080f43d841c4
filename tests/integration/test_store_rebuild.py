"""What has left the disk stays away, however the process ended and whatever the index is rebuilt from."""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.store import Store, StoreSettings
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.faulty import FaultyIo, IoCall
from kvstore.tiers import disk_opening
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from kvstore.types import KvLayout, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
OTHER = Namespace(model="other", revision="revision", layout=LAYOUT)
MIB = 1 << 20
PROMPTS = [list(range(start, start + 160)) for start in range(0, 12 * 160, 160)]  # 40 blocks each
BLOCKS = 40
ALWAYS = 1 << 30


@dataclass
class Node:
    """A store in a directory that a test ends in some way and opens again."""

    path: Path
    io: FaultyIo = field(default_factory=FaultyIo)
    store: Store | None = None

    def open(self, *, host_bytes: int = 4 * MIB, disk_bytes: int = 32 * MIB) -> Store:
        self.io = FaultyIo()
        disk = DiskTier.open(self.path, capacity_bytes=disk_bytes, io=self.io, free_floor_bytes=0)
        self.store = Store(HostTier(host_bytes), disk, StoreSettings(), SystemClock())
        return self.store

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def evict(node: Node) -> dict[int, int]:
    store = node.open()
    fill(store, 3)
    store.evict(NAMESPACE, PROMPTS[0], from_block=5)
    store.evict(NAMESPACE, PROMPTS[1])
    return {0: 5, 1: 0, 2: BLOCKS}


def clear(node: Node) -> dict[int, int]:
    store = node.open()
    fill(store, 2)
    store_prompt(store, OTHER, PROMPTS[0])
    store.flush()
    store.clear(NAMESPACE)
    store_prompt(store, NAMESPACE, PROMPTS[2])
    store.flush()
    assert BLOCKS == verified_blocks(store, OTHER, PROMPTS[0])
    return {0: 0, 1: 0, 2: BLOCKS}


def store_twice(node: Node) -> dict[int, int]:
    """The second time in other slots, for those of the first are taken by other blocks meanwhile."""
    store = node.open()
    fill(store, 1)
    store.evict(NAMESPACE, PROMPTS[0], from_block=10)
    store_prompt(store, OTHER, PROMPTS[0])
    store_prompt(store, NAMESPACE, PROMPTS[1])
    fill(store, 2)
    store.evict(NAMESPACE, PROMPTS[0], from_block=30)
    return {0: 30, 1: BLOCKS}


def quarantine(node: Node) -> dict[int, int]:
    """The whole first prompt lies in slots that can be read and written no more."""
    store = node.open()
    fill(store, 2)
    node.close()
    store = node.open()
    node.io.fail(IoCall.READ, errno.EIO, times=ALWAYS)
    assert 0 == verified_blocks(store, NAMESPACE, PROMPTS[0])
    node.io.heal()
    assert store.stats().quarantined_slots > 0
    store.flush()
    return {0: 0, 1: BLOCKS}


def demote(node: Node) -> dict[int, int]:
    """Host memory has room for one prompt, so that the others go to disk; then some are evicted there."""
    store = node.open(host_bytes=160 << 10)
    fill(store, 4)
    for prompt in PROMPTS[:2]:
        store.evict(NAMESPACE, prompt, from_block=1)
    return {0: 1, 1: 1, 2: BLOCKS, 3: BLOCKS}


def shrink(node: Node) -> dict[int, int]:
    """Reopened with less room and filled anew: what gave way is not there when there is more room again."""
    fill(node.open(), 12)
    node.close()
    store = node.open(host_bytes=512 << 10, disk_bytes=2 * MIB)
    found = {index: verified_blocks(store, NAMESPACE, prompt) for index, prompt in enumerate(PROMPTS)}
    assert sum(found.values()) < len(PROMPTS) * BLOCKS
    store.flush()
    return found


def fill(store: Store, count: int) -> None:
    for prompt in PROMPTS[:count]:
        assert 0 == store_prompt(store, NAMESPACE, prompt).refused_blocks
    store.flush()


def stop_and_lose_index(node: Node, _: pytest.MonkeyPatch) -> None:
    node.close()
    shutil.rmtree(node.path / "index")


def stop_and_damage_index(node: Node, _: pytest.MonkeyPatch) -> None:
    node.close()
    index = node.path / "index" / "data.mdb"
    size = index.stat().st_size
    index.write_bytes(b"\0" * size)


def kill(node: Node, _: pytest.MonkeyPatch) -> None:
    """What a killed process leaves: the files as they are while it runs."""
    left = node.path.with_name("left")
    shutil.copytree(node.path, left)
    node.close()
    shutil.rmtree(node.path)
    left.rename(node.path)


def kill_and_lose_index(node: Node, patch: pytest.MonkeyPatch) -> None:
    kill(node, patch)
    shutil.rmtree(node.path / "index")


def cut_power(node: Node, patch: pytest.MonkeyPatch) -> None:
    node.io.cut_power()
    node.close()
    patch.setattr(disk_opening, "boot_id", lambda: b"another boot 123")


ENDS = (stop_and_lose_index, stop_and_damage_index, kill, kill_and_lose_index, cut_power)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("history", [evict, clear, store_twice, quarantine, demote, shrink], ids=lambda h: h.__name__)
def test_what_left_stays_away_and_what_was_flushed_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    history: Callable[[Node], dict[int, int]],
    end: Callable[[Node, pytest.MonkeyPatch], None],
) -> None:
    node = Node(tmp_path / "data")
    expected = history(node)
    end(node, monkeypatch)
    for _ in range(2):
        store = node.open()
        found = {index: verified_blocks(store, NAMESPACE, PROMPTS[index]) for index in expected}
        assert expected == found
        assert () == store.verify().problems
        disk = store.stats().tiers["disk"]
        assert disk.blocks >= sum(expected.values())
        node.close()
        shutil.rmtree(node.path / "index")
