"""A naive model of a store with sparse groups and room for everything: sets of prefixes, slow and easy to believe."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.types import KvLayout, Root

Prefix: TypeAlias = tuple[int, ...]
# A root and the tokens of a block and of all before it: what a block is.
Block: TypeAlias = "tuple[Root, Prefix]"


class ModelSparseStore:
    """One namespace: which blocks are stored, and which of them have the parts of each group."""

    def __init__(self, layout: KvLayout) -> None:
        self.dense: set[Block] = set()
        self.sparse: list[set[Block]] = [set() for _ in layout.groups]
        self._layout = layout

    def blocks(self, root: Root, tokens: Sequence[int]) -> list[Block]:
        """The whole blocks of a prompt."""
        step = self._layout.block_tokens
        return [(root, tuple(tokens[:end])) for end in range(step, len(tokens) + 1, step)]

    def present(self, root: Root, tokens: Sequence[int]) -> int:
        """How many leading blocks of a prompt have all dense parts."""
        count = 0
        for block in self.blocks(root, tokens):
            if block not in self.dense:
                break
            count += 1
        return count

    def match(self, root: Root, tokens: Sequence[int]) -> int:
        """The deepest point at which nothing is missing."""
        blocks = self.blocks(root, tokens)[: self.present(root, tokens)]
        for point in range(len(blocks), 0, -1):
            if not any(self._missing(group, blocks[:point]) for group in range(len(self.sparse))):
                return point
        return 0

    def wanted(self, group: int, root: Root, tokens: Sequence[int], turn_ends: Iterable[int]) -> list[int]:
        """The blocks of which a store of a prompt, of less than 2,048 tokens, wants the parts of a group."""
        step = self._layout.block_tokens
        blocks = self.blocks(root, tokens)
        ends = {len(tokens), max(0, len(tokens) - 1), self.present(root, tokens) * step, *turn_ends}
        kept = set()
        for end in ends:
            whole = list(range(end // step))
            kept.update(whole[-self._layout.groups[group].blocks_back(step) :])
        return sorted(index for index in kept if blocks[index] not in self.sparse[group])

    def store(
        self, root: Root, tokens: Sequence[int], dense_blocks: int, sparse_blocks: Sequence[Iterable[int]]
    ) -> None:
        """A stage that wrote the first `dense_blocks` blocks, and of each group the parts of some blocks, commits."""
        blocks = self.blocks(root, tokens)
        self.dense.update(blocks[:dense_blocks])
        for group, indices in enumerate(sparse_blocks):
            self.sparse[group].update(blocks[index] for index in indices if blocks[index] in self.dense)

    def drop(self, blocks: Iterable[Block]) -> None:
        """Dense blocks leave, and their sparse parts with them."""
        gone = set(blocks)
        self.dense -= gone
        self.sparse = [held - gone for held in self.sparse]

    def _missing(self, group: int, blocks: list[Block]) -> bool:
        needed = blocks[-self._layout.groups[group].blocks_back(self._layout.block_tokens) :]
        return any(block not in self.sparse[group] for block in needed)
