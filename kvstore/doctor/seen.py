"""One lookup as the doctor sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.types import TokenArray


@dataclass(frozen=True, slots=True)
class Home:
    """Where a prompt's blocks are kept apart from others': what its tenant may change about it, as texts.

    Two homes of one tenant whose prompts are alike could share, if what tells them apart were the same.
    """

    tenant: str
    model: str
    revision: str
    layout: str
    root: str

    def differs_in(self, other: Home) -> tuple[str, ...]:
        """The names of what tells two homes apart."""
        return tuple(
            name for name in ("model", "revision", "layout", "root") if getattr(self, name) != getattr(other, name)
        )


@dataclass(frozen=True, slots=True)
class SeenLookup:
    """A prompt that was looked up, and how many of its tokens were found.

    None where nobody knows: it is then taken for as many as were looked up before, in whole blocks.
    """

    home: Home
    tokens: TokenArray
    matched_tokens: int | None
    block_tokens: int
