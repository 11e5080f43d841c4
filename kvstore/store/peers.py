"""What a store needs of the nodes that it shares blocks with. kvstore.cluster has it; the server puts it in.

Blocks of peers enter by stages, as those of engines do, and are then blocks of this store: nothing else in it knows
where they came from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvstore.api import Prefetch
    from kvstore.store.space import Space
    from kvstore.types import Namespace, Root, TokenArray


class Peers(Protocol):
    """The other nodes. Thread-safe; called without any lock of the store."""

    def prefetch(self, namespace: Namespace, root: Root, prompt: TokenArray, local: Prefetch) -> Prefetch:
        """Begin to bring what is missing here of a prompt; `local` brings up what is not, and comes with it.

        Returns at once, with `local` itself where nothing is to be asked for.
        """
        ...

    def stage_ended(self, space: Space, root_key: bytes, prompt: TokenArray) -> None:
        """A store of a prompt was committed or given up."""
        ...
