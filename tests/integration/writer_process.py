"""A process that stores prompts for ever and says so, to be killed: `python writer_process.py DIR SEED [hybrid]`.

Prints "flushed N" after each flush: the first N prompts of the sequence must be found after a restart.
"""

from __future__ import annotations

import dataclasses
import sys
from itertools import count

import kvstore
from kvstore.layer_groups import Recurrent, SlidingWindow
from kvstore.testing.blocks import store_prompt
from kvstore.types import KvLayout, Namespace

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4)
NAMESPACE = Namespace(model="model", revision="revision", layout=LAYOUT)
GROUPS = (
    SlidingWindow(layers=2, window=10, kv_heads=2, head_dim=8, dtype="int8"),
    Recurrent(layers=2, state_bytes=2048),
)
HYBRID = dataclasses.replace(NAMESPACE, layout=dataclasses.replace(LAYOUT, groups=GROUPS))
HOST_BYTES = 2 << 20
DISK_BYTES = 32 << 20


def prompt_at(index: int, seed: int) -> list[int]:
    """A prompt that shares its first blocks with one in four others."""
    return [*range(index % 4, index % 4 + 20), *range(1000 * (index + seed), 1000 * (index + seed) + 20 + index % 7)]


def main() -> None:
    """Store until killed."""
    path, seed = sys.argv[1], int(sys.argv[2])
    namespace = HYBRID if sys.argv[3:] == ["hybrid"] else NAMESPACE
    with kvstore.open(path, host_bytes=HOST_BYTES, disk_bytes=DISK_BYTES) as store:
        for index in count():
            store_prompt(store, namespace, prompt_at(index, seed))
            if index % 20 == 19:
                store.flush()
                print("flushed", index + 1, flush=True)  # noqa: T201  # the test reads it
            elif index % 20 == 9:
                print("stored", index + 1, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
