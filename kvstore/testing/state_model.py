"""A naive model of a store of sequence states with room for everything: a set of paths, slow and easy to believe."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.types import Root

Path: TypeAlias = tuple[int, ...]


class ModelStates:
    """One namespace: the paths that states are stored for; `cut` is that of SequenceState."""

    def __init__(self, cut: str) -> None:
        self.paths: set[tuple[Root, Path]] = set()
        self._cut = cut

    def serves(self, root: Root, path: Path, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt the state of a path serves."""
        if (root, path) not in self.paths:
            return 0
        shared = 0
        for ours, theirs in zip(path, prompt, strict=False):
            if ours != theirs:
                break
            shared += 1
        return shared if self._cut == "any" or shared == len(path) else 0

    def match(self, root: Root, prompt: Sequence[int]) -> int:
        """What the best state serves."""
        return max((self.serves(where, path, prompt) for where, path in self.paths if where == root), default=0)

    def store(self, root: Root, path: Sequence[int]) -> bool:
        """Store a state unless one serves all of its path."""
        if self.match(root, path) == len(path):
            return False
        self.paths.add((root, tuple(path)))
        return True

    def below(self, root: Root, path: Sequence[int]) -> list[Path]:
        """The states whose path begins with this one."""
        return [found for where, found in self.paths if where == root and found[: len(path)] == tuple(path)]

    def lose(self, root: Root, path: Path) -> None:
        """The state of a path is gone."""
        self.paths.discard((root, path))

    def keep_longest(self) -> None:
        """Forget those that another one serves as well, if states can be cut."""
        if self._cut == "any":
            self.paths = {(root, path) for root, path in self.paths if len(self.below(root, path)) == 1}
