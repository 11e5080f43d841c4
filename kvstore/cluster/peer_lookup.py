"""Who has how much of a prompt, as the directory says: a few reads that double in size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.nodes import boundary_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.cluster.directory import Directory

_FIRST_READ_KEYS = 4
_READ_KEYS_MAX = 256


def boundary_blocks(block_tokens: int, announce_tokens: int, blocks: int) -> range:
    """The ends, in blocks, at which the directory knows a prompt of so many blocks."""
    step = boundary_step(announce_tokens, block_tokens)
    return range(step, blocks + 1, step)


def deepest_boundaries(
    directory: Directory, keys: Sequence[bytes], own_slots: frozenset[int] = frozenset()
) -> dict[int, int]:
    """By slot of each other node that has some: how many leading boundaries of these it has, by the deepest it is in.

    `keys` are those of consecutive boundaries. What nobody has ends the search, since whoever has a block has all above
    it. O(log(depth)) reads. Raises DirectoryUnavailable.
    """
    deepest: dict[int, int] = {}
    begin, size = 0, _FIRST_READ_KEYS
    while begin < len(keys):
        for count, slots in enumerate(directory.holders(keys[begin : begin + size]), begin + 1):
            others = slots - own_slots
            if not others:
                return deepest
            deepest.update(dict.fromkeys(others, count))
        begin += size
        size = min(2 * size, _READ_KEYS_MAX)
    return deepest
