"""Device blocks on a GPU: a way through them changes nothing, and another process on the GPU sees the same bytes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvstore.errors import InvalidArgumentError, NoSpaceError
from kvstore.tiers.device import CopyOutcome
from kvstore.tiers.device_blocks import DeviceBlocks, MappedBlocks

pytestmark = pytest.mark.gpu

IDS = [5, 1, 39]
IMPORTER = """
import json, sys
from kvstore.tiers.device_blocks import DeviceExport, MappedBlocks
fields = json.loads(sys.stdin.readline())
for name in ("gpu_uuid", "handle"):
    fields[name] = bytes.fromhex(fields[name])
mapped = MappedBlocks(DeviceExport(**fields), "cuda:0")
sums = mapped.rows.long().sum(dim=1).tolist()
mapped.rows[0].fill_(9)
import torch
torch.cuda.synchronize()
mapped.close()
mapped.close()
print(json.dumps(sums))
"""


def test_blocks_survive_the_way_through_device_memory(engine, new_copier, packed):
    pages, tensors = engine
    copier = new_copier()
    blocks = DeviceBlocks(8 * pages.block_bytes, pages.block_bytes, "cuda:0")
    expected = packed(tensors, IDS)
    slots = blocks.allocate(3)
    stored = copier.store(pages, IDS, blocks.rows, row_ids=slots)
    stored.record(copier.current_stream())
    loaded = copier.load(pages, [10, 11, 12], blocks.rows, row_ids=slots, holds=[blocks.hold(slots)])
    assert CopyOutcome.COPIED is loaded.wait(60)
    assert np.array_equal(expected, packed(tensors, [10, 11, 12]))
    assert (8, True) == (blocks.free_slots, blocks.close())


def test_another_process_maps_the_same_bytes():
    # Another allocation first, so that the blocks need not begin where CUDA's own allocation does.
    other = torch.zeros(1000, dtype=torch.uint8, device="cuda:0")
    blocks = DeviceBlocks(5 * 1000, 1000, "cuda:0")
    blocks.rows.copy_(torch.randint(0, 256, (5, 1000), dtype=torch.uint8))
    torch.cuda.synchronize()
    export = blocks.export()
    fields = {name: getattr(export, name) for name in (item.name for item in dataclasses.fields(export))}
    sent = {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}
    expected = blocks.rows.long().sum(dim=1).tolist()
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTER],
        input=json.dumps(sent) + "\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    assert expected == json.loads(done.stdout)
    assert [9 * 1000, *expected[1:]] == blocks.rows.long().sum(dim=1).tolist()
    assert not blocks.close()
    blocks.retire()
    assert blocks.close()
    assert not other.any()


def test_an_export_of_another_gpu_is_refused():
    blocks = DeviceBlocks(1000, 1000, "cuda:0")
    export = dataclasses.replace(blocks.export(), gpu_uuid=b"another")
    with pytest.raises(InvalidArgumentError, match="lies on another GPU than cuda:0"):
        MappedBlocks(export, "cuda:0")
    blocks.retire()


def test_more_than_the_gpu_has_is_refused():
    with pytest.raises(NoSpaceError, match="cuda:0 has no"):
        DeviceBlocks(1 << 50, 1 << 20, "cuda:0")
