"""What codecs for blocks in memory bring: hits gained on a trace, against the seconds that loads and stores lose.

    python bench/bench_host_codecs.py --traces DIR [--policy lru] [--capacities 1%,5%] [--json FILE]

Host memory of so many bytes holds `ratio` times the blocks if they are encoded. Each trace is replayed with that many
blocks and with the plain number (second half, warmed on the first). What a codec costs is measured in the same run, on
blocks as bench_codecs.py makes them (`normal`), CPU time of one thread, beside a memcpy of the same bytes: with a codec
every hit is decoded instead of copied, or instead of being read in place, and every miss that is stored is encoded. A
row says, in nanoseconds for each byte of KV that the trace asks for:

- `gain_compute`: what the hits gained would have taken to compute, at 0.4-1.5 ns a byte (8B to 70B models on a GPU of
  today; kvstore/store/budget.py); that is what they bring where there is no disk below;
- `gain_disk`: what they would have taken from a disk of `--disk` GB/s that has them all, less decoding them;
- `loss_load`: decoding all hits instead of copying them; `loss_in_place`: instead of reading them in place;
- `encode`: encoding what is stored, which is CPU time beside the engine.

`net_compute` is the most that may be won without a disk, `net_disk` with one: gain less the loss on loads, the encoding
left out. A codec is worth building where one is above zero, and above zero after `encode` where CPUs are not idle.

`packed_...` is what there is (`tiers.packed`): half of the same bytes is host memory as it is, and the other half holds
`ratio` times the blocks, of what left it. Only what leaves is encoded, and only hits there are decoded.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from bench_codecs import BLOCK_BYTES, FORM, MIB, encode_all, make_blocks
from bench_replay import BLOCK_BYTES as TRACE_BLOCK_BYTES
from machine import describe

from kvstore.clock import SystemClock
from kvstore.replay.capacity import parse_capacity
from kvstore.replay.run import Replay
from kvstore.replay.trace import read_trace
from kvstore.server import keep_freed_memory
from kvstore.tiers.buffers import aligned_bytes
from kvstore.tiers.codecs.registry import make_codec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.replay.run import ReplayRow
    from kvstore.tiers.codecs.base import Codec, Encoded

CODECS = ("blosc2", "fp8", "int8")
TRACES = ("lmcache_agents", "mooncake_synthetic", "mooncake_conversation")
COMPUTE_NS = (0.4, 1.5)
ROUNDS = 9
HOST_SHARE = 2  # of the bytes, host memory in front of packed memory is one part of so many


def codec_costs(megabytes: int) -> dict[str, dict[str, float]]:
    """For each codec: how much smaller blocks get, and nanoseconds for each raw byte, beside those of a memcpy."""
    blocks = make_blocks("normal", megabytes * MIB // BLOCK_BYTES)
    target = aligned_bytes(blocks.nbytes).reshape(blocks.shape)
    memcpy = nanoseconds(lambda: np.copyto(target, blocks), blocks.nbytes)
    costs = {}
    for name in CODECS:
        codec = make_codec(name)
        encoded = encode_all(codec, blocks)
        encode = nanoseconds(partial(encode_all, codec, blocks), blocks.nbytes)
        decode = nanoseconds(partial(decode_all, codec, encoded, target), blocks.nbytes)
        ratio = blocks.nbytes / sum(len(one.data) for one in encoded if one is not None)
        costs[name] = {"memcpy": memcpy, "encode": encode, "decode": decode, "ratio": ratio}
    return costs


def decode_all(codec: Codec, encoded: Sequence[Encoded | None], target: np.ndarray) -> None:
    for one, row in zip(encoded, target, strict=True):
        assert one is not None, "a block is stored as it is"
        codec.decode(one.data, row, FORM)


def nanoseconds(call: Callable[[], object], size_bytes: int) -> float:
    """CPU time of this thread for each byte: the least of some turns, since others keep the caches busy."""
    spent = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        call()
        spent.append(time.thread_time() - started)
    return min(spent) / size_bytes * 1e9


def rows_of(
    path: Path, policy: str, capacities: str, costs: dict[str, dict[str, float]], disk_ns: float
) -> list[dict[str, object]]:
    trace = read_trace(path)
    replay = Replay(trace, block_bytes=TRACE_BLOCK_BYTES, warm_ratio=0.5, clock=SystemClock())

    @cache
    def hit_rate(blocks: int) -> float:
        text = str(min(blocks, trace.unique_blocks))
        capacity = parse_capacity(text, unique_blocks=trace.unique_blocks, block_bytes=TRACE_BLOCK_BYTES)
        return replay.run(policy, capacity).token_hit_rate

    @cache
    def packed_row(blocks: int, ratio: float) -> ReplayRow:
        host_blocks = max(1, blocks // HOST_SHARE)
        counts = (host_blocks, int((blocks - host_blocks) * ratio))
        texts = [str(min(count, trace.unique_blocks)) for count in counts]
        sizes = {"unique_blocks": trace.unique_blocks, "block_bytes": TRACE_BLOCK_BYTES}
        host, below = (parse_capacity(text, **sizes) for text in texts)
        return replay.run(policy, host, below, admission="demotion")

    rows: list[dict[str, object]] = []
    for text in capacities.split(","):
        plain_blocks = parse_capacity(text, unique_blocks=trace.unique_blocks, block_bytes=TRACE_BLOCK_BYTES).blocks
        plain = hit_rate(plain_blocks)
        for name, cost in costs.items():
            hits = hit_rate(int(plain_blocks * cost["ratio"]))
            gained = hits - plain
            gain_compute = [gained * ns for ns in COMPUTE_NS]
            gain_disk = gained * (disk_ns - cost["decode"])
            loss_load = hits * (cost["decode"] - cost["memcpy"])
            packed = packed_row(plain_blocks, cost["ratio"])
            packed_gain = (packed.token_hit_rate - plain) * COMPUTE_NS[1]
            packed_loss = packed.disk_token_hit_rate * cost["decode"]
            moved = packed.demoted_bytes / TRACE_BLOCK_BYTES * trace.block_tokens / packed.tokens
            figures = {
                "packed_hits": packed.token_hit_rate,
                "packed_hits_as_they_are": packed.host_token_hit_rate,
                "packed_gain_large": packed_gain,
                "packed_loss": packed_loss,
                "packed_encode": moved * cost["encode"],
                "packed_net": packed_gain - packed_loss,
                "ratio": cost["ratio"],
                "hits_plain": plain,
                "hits": hits,
                "gain_compute_small": gain_compute[0],
                "gain_compute_large": gain_compute[1],
                "gain_disk": gain_disk,
                "loss_load": loss_load,
                "loss_in_place": hits * cost["decode"],
                "encode": (1 - hits) * cost["encode"],
                "net_compute": gain_compute[1] - loss_load,
                "net_disk": gain_disk - loss_load,
            }
            rounded = {key: round(value, 4) for key, value in figures.items()}
            rows.append({"trace": path.name, "capacity": text, "codec": name, **rounded})
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    keep_freed_memory()  # as the sidecar does
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with NAME.jsonl.gz")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--capacities", default="1%,5%", help="of host memory without a codec, parted by commas")
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--disk", type=float, default=1.4, help="GB/s that loads from disk reach")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    arguments = parser.parse_args()
    costs = codec_costs(arguments.megabytes)
    for name, cost in costs.items():
        print(name, "  ".join(f"{key}={value:.3f}" for key, value in cost.items()), flush=True)
    rows: list[dict[str, object]] = []
    for name in TRACES:
        path = arguments.traces / f"{name}.jsonl.gz"
        if path.is_file():
            rows += rows_of(path, arguments.policy, arguments.capacities, costs, 1 / arguments.disk)
    if arguments.json:
        command = f"python bench/bench_host_codecs.py --traces DIR --capacities {arguments.capacities}"
        result = {"command": command, "machine": describe(), "codecs": costs, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
