"""Sizes of coded slots, and which slot a block of some size gets."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from kvstore.tiers.buffers import PAGE_BYTES, whole_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CLASSES_PER_FACTOR = 8
_RECENT_BLOCKS = 64


def class_bytes(block_bytes: int, largest_bytes: int, usual_bytes: int | None = None) -> int:
    """The size of slot for a block: eight sizes for each factor of two, so at most an eighth of one is wasted.

    All are whole pages; up to 16 pages each number of them is a size. `largest_bytes` is what the largest block takes:
    its own size, in whole pages, is the last one. Where most blocks take `usual_bytes`, that is a size, too.
    """
    if block_bytes == usual_bytes:
        return whole_pages(block_bytes)
    pages = -(-block_bytes // PAGE_BYTES)
    step = 1 << max(0, (pages - 1).bit_length() - CLASSES_PER_FACTOR.bit_length())
    return min(-(-pages // step) * step * PAGE_BYTES, whole_pages(largest_bytes))


class RecentSizes:
    """Slot sizes that the last blocks of a pool needed. Its owner locks it."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque(maxlen=_RECENT_BLOCKS)

    def note(self, sizes: Iterable[int]) -> None:
        """Remember what blocks needed."""
        self._sizes.extend(sizes)

    def largest(self, unknown: int) -> int:
        """The size in which all of them fit; `unknown` where there were none."""
        return max(self._sizes, default=unknown)

    def in_order(self, sizes: Iterable[int], unknown: int) -> list[int]:
        """Those of some sizes that are of use, in the order in which slots are handed out.

        First those in which every block is likely to fit, then those in which some do.
        """
        largest, smallest = self.largest(unknown), min(self._sizes, default=unknown)
        some = sorted(size for size in sizes if size >= smallest)
        return [size for size in some if size >= largest] + [size for size in reversed(some) if size < largest]


def fit(needed: Sequence[int], slots: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Which of some slots, given as (size, slot), each block gets, by its position; those that fit in none get none.

    First, in order, slots of just the size that is needed; then the larger ones, the smallest first, to large blocks
    before small ones.
    """
    by_size: defaultdict[int, deque[int]] = defaultdict(deque)
    for size, slot in slots:
        by_size[size].append(slot)
    fitted: dict[int, int] = {}
    for position, size in enumerate(needed):
        if by_size[size]:
            fitted[position] = by_size[size].popleft()
    sizes = sorted(by_size)
    left = [position for position in range(len(needed)) if position not in fitted]
    for position in sorted(left, key=lambda position: needed[position], reverse=True):
        larger = next((size for size in sizes if size > needed[position] and by_size[size]), None)
        if larger is not None:
            fitted[position] = by_size[larger].popleft()
    return fitted
