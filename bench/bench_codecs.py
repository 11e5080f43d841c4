"""What codecs save on disk and what they cost, beside a memcpy of the same bytes in the same run.

    python bench/bench_codecs.py [--dir FOLDER] [--megabytes 32] [--rounds 5] [--json FILE]

Blocks are 256 KiB of bf16 (4 layers, keys and values of 8 heads of 128, 16 tokens) of three kinds:

- `normal`: normal values, each channel of its own size, log-normal with sigma 1;
- `offset`: the same around a mean of three times its size, as the keys of many models are;
- `coarse`: the same with four bits of mantissa, as where an engine computed in 8 bits and stores 16.

`codec` rows are one thread in memory: GB/s of raw bytes to encode and to decode, and as shares of memcpy; ratio is raw
bytes over encoded ones. `disk` rows go through a pool with four threads: GB/s of raw bytes, and the bytes of a slot for
each block, header included, beside plain slots (`plain`). Medians; ways take turns. Errors are those of the header.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from machine import describe

from kvstore.server import keep_freed_memory
from kvstore.tiers.base import BlockIdentity
from kvstore.tiers.buffers import aligned_bytes
from kvstore.tiers.codecs.aes_gcm import BlockCipher, sealed_bytes
from kvstore.tiers.codecs.base import PartForm
from kvstore.tiers.codecs.coding import PoolCoding
from kvstore.tiers.codecs.keys import FileKeys
from kvstore.tiers.codecs.registry import CODECS, Pipeline, make_codec
from kvstore.tiers.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.tiers.codecs.base import Codec, Encoded

MIB = 1 << 20
GROUPS, TOKENS, CHANNELS = 4 * 2 * 8, 16, 128
BLOCK_BYTES = GROUPS * TOKENS * CHANNELS * 2
FORM = PartForm("bfloat16", TOKENS, CHANNELS)
NS_ID = b"n" * 16
MEASURED = [(name, False) for name in CODECS if name != "none"] + [("none", True), ("blosc2", True), ("fp8", True)]


def rounded(values: np.ndarray, mantissa_bits: int) -> np.ndarray:
    """Values as bf16 with so many bits of mantissa, as bytes."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    cut = 23 - mantissa_bits
    bits = (bits + (1 << (cut - 1))) >> cut << cut
    return (bits >> 16).astype(np.uint16).reshape(-1).view(np.uint8)


def make_blocks(kind: str, count: int) -> np.ndarray:
    """[count, BLOCK_BYTES]."""
    generator = np.random.default_rng(1)
    size = np.exp(generator.normal(size=(1, GROUPS, 1, CHANNELS)))
    values = generator.normal(size=(count, GROUPS, TOKENS, CHANNELS)) * size
    if kind == "offset":
        values += 3 * size * np.sign(generator.normal(size=size.shape))
    rows = aligned_bytes(count * BLOCK_BYTES).reshape(count, BLOCK_BYTES)
    rows[:] = rounded(values, 4 if kind == "coarse" else 7).reshape(count, BLOCK_BYTES)
    return rows


def timed(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each way, which take turns."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def encode_all(codec: Codec, blocks: np.ndarray) -> list[Encoded | None]:
    return [codec.encode(block, FORM) for block in blocks]


def codec_rows(kind: str, blocks: np.ndarray, rounds: int) -> list[dict[str, object]]:
    target = np.zeros_like(blocks)

    def decode_all(codec: Codec, encoded: Sequence[Encoded | None]) -> None:
        for block, one in zip(target, encoded, strict=True):
            if one is not None:
                assert codec.decode(one.data, block, FORM)

    def copy_all() -> None:
        for source, block in zip(blocks, target, strict=True):
            np.copyto(block, source)

    rows = []
    gigabytes = blocks.nbytes / 1e9
    for name in CODECS:
        if name == "none":
            continue
        codec = make_codec(name)
        encoded = encode_all(codec, blocks)
        ways = {
            "memcpy": copy_all,
            "encode": lambda codec=codec: encode_all(codec, blocks),
            "decode": lambda codec=codec, encoded=encoded: decode_all(codec, encoded),
        }
        seconds = timed(ways, rounds)
        stored_bytes = sum(BLOCK_BYTES if one is None else len(one.data) for one in encoded)
        errors = [one.error for one in encoded if one is not None]
        rows.append(
            {
                "what": "codec",
                "data": kind,
                "codec": name,
                "ratio": round(blocks.nbytes / stored_bytes, 3),
                "memcpy_gb_per_s": round(gigabytes / seconds["memcpy"], 2),
                "encode_gb_per_s": round(gigabytes / seconds["encode"], 3),
                "decode_gb_per_s": round(gigabytes / seconds["decode"], 3),
                "encode_share": round(seconds["memcpy"] / seconds["encode"], 3),
                "decode_share": round(seconds["memcpy"] / seconds["decode"], 3),
                "max_absolute_error": max((error.max_absolute for error in errors), default=0.0),
                "rms_relative_error": round(statistics.mean([error.rms_relative for error in errors] or [0.0]), 5),
            }
        )
    return rows


def cipher_row(keys: FileKeys, blocks: np.ndarray, rounds: int) -> dict[str, object]:
    """AES-GCM alone, in segments as blocks are sealed."""
    _, _, cipher = BlockCipher(keys).sealer()
    sealed = np.zeros((len(blocks), sealed_bytes(BLOCK_BYTES)), dtype=np.uint8)
    target = np.zeros_like(blocks)

    def seal() -> None:
        for number, (block, into) in enumerate(zip(blocks, sealed, strict=True)):
            cipher.seal_payload(block, into, number, 1, b"")

    def unseal() -> None:
        for number, (block, into) in enumerate(zip(sealed, target, strict=True)):
            assert cipher.open_payload(block, into, number, 1, b"")

    seconds = timed({"memcpy": lambda: np.copyto(target, blocks), "encode": seal, "decode": unseal}, rounds)
    gigabytes = blocks.nbytes / 1e9
    return {
        "what": "codec",
        "data": "any",
        "codec": "aes-gcm",
        "ratio": round(blocks.nbytes / sealed.nbytes, 4),
        "memcpy_gb_per_s": round(gigabytes / seconds["memcpy"], 2),
        "encode_gb_per_s": round(gigabytes / seconds["encode"], 3),
        "decode_gb_per_s": round(gigabytes / seconds["decode"], 3),
        "encode_share": round(seconds["memcpy"] / seconds["encode"], 3),
        "decode_share": round(seconds["memcpy"] / seconds["decode"], 3),
    }


class OnDisk:
    """Blocks that one pipeline writes to a pool of its own."""

    def __init__(self, tier: DiskTier, number: int, pipeline: Pipeline | None, blocks: np.ndarray) -> None:
        ns_id = number.to_bytes(16, "big")
        tokens = np.zeros(TOKENS, dtype="<u4").tobytes()
        self.pool = tier.pool(ns_id, (BLOCK_BYTES,), TOKENS)
        tier.use_coding(ns_id, PoolCoding(pipeline, (FORM,)))
        self.blocks = blocks
        self.target = np.zeros_like(blocks)
        self.identities = [
            BlockIdentity(b"r" * 16, i.to_bytes(16, "big"), (i + 1).to_bytes(16, "big"), tokens)
            for i in range(len(blocks))
        ]
        self.slots = self.pool.allocate(len(blocks))
        assert len(self.slots) == len(blocks), "the file system has no room for this; choose another --dir"

    def write(self) -> None:
        assert self.pool.write(self.slots, self.identities, [(block,) for block in self.blocks]).all()

    def read(self) -> None:
        assert self.pool.read(self.slots, self.identities, self.target).all()


def disk_rows(folder: Path, keys: FileKeys, kind: str, blocks: np.ndarray, rounds: int) -> list[dict[str, object]]:
    path = Path(tempfile.mkdtemp(dir=folder))
    capacity_bytes = (len(MEASURED) + 2) * (3 * blocks.nbytes + 128 * MIB)
    tier = DiskTier.open(path, capacity_bytes=capacity_bytes, free_floor_bytes=0, keys=keys)
    try:
        pipelines = {"plain": None} | {
            pipeline.name: pipeline for pipeline in (Pipeline(make_codec(name), sealed) for name, sealed in MEASURED)
        }
        ways = {
            name: OnDisk(tier, number, pipeline, blocks) for number, (name, pipeline) in enumerate(pipelines.items())
        }
        written = timed({name: way.write for name, way in ways.items()}, rounds)
        read = timed({name: way.read for name, way in ways.items()}, rounds)
        gigabytes = blocks.nbytes / 1e9
        return [
            {
                "what": "disk",
                "data": kind,
                "codec": name,
                "slot_bytes": way.pool.slot_bytes,
                "raw_bytes": BLOCK_BYTES,
                "write_gb_per_s": round(gigabytes / written[name], 3),
                "read_gb_per_s": round(gigabytes / read[name], 3),
            }
            for name, way in ways.items()
        ]
    finally:
        tier.close()
        shutil.rmtree(path)


def main() -> None:
    keep_freed_memory()  # as the sidecar does
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    key_path = Path(tempfile.mkdtemp()) / "keys"
    key_path.touch(0o600)
    key_path.write_text(f"bench {os.urandom(32).hex()}\n")
    keys = FileKeys(key_path)
    rows: list[dict[str, object]] = []
    for kind in ("normal", "offset", "coarse"):
        blocks = make_blocks(kind, max(4, arguments.megabytes * MIB // BLOCK_BYTES))
        rows += codec_rows(kind, blocks, arguments.rounds)
        rows += disk_rows(arguments.dir, keys, kind, blocks, arguments.rounds)
    rows.append(cipher_row(keys, blocks, arguments.rounds))
    shutil.rmtree(key_path.parent)
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    if arguments.json:
        document = {"machine": describe(), "rounds": arguments.rounds, "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
