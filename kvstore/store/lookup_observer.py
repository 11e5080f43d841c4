"""Who is told of lookups as they are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvstore.types import PrefixMatch


class LookupObserver(Protocol):
    """Told of each lookup that counts, also of states, in the thread that asked, without any lock of the store."""

    def see(self, match: PrefixMatch) -> None:
        """What was found of a prompt. Must not wait, nor change or keep more than what it needs: a microsecond."""
        ...
