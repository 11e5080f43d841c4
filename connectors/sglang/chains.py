"""Calls to a store about the pages of one pool, by the hashes that SGLang hands over.

With the hashes before them (`prefix`), pages are one path from the start of the sequence. Without, SGLang does not say
what comes before a page: each is stored by itself, as a path of one block. A lookup without a prefix takes both for
what they are: it follows a path as far as it goes and begins anew behind it, so it costs one call for a stored sequence
and one for each page stored by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import InvalidTokensError
from kvstore.tokens import as_prompt
from kvstore.types import DIGEST_BYTES, PLAIN_ROOT, PrefixMatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.api import KvStore, Lease, Stage
    from kvstore.clock import Clock
    from kvstore.connectors.common import ConnectorCounters
    from kvstore.connectors.sglang.pages import Bounce, HostPages, Indices
    from kvstore.types import Namespace, Root


# How many pages are asked about at once behind the end of a path, where pages stored by themselves may follow.
_WINDOW_PAGES = 16


@dataclass(frozen=True, slots=True)
class Chain:
    """The digests of some pages, and of those before them in the sequence: None where SGLang did not say."""

    digests: list[bytes]
    prefix: list[bytes] | None

    @classmethod
    def of_keys(cls, keys: Sequence[str], prefix_keys: Sequence[str] | None) -> Chain:
        """Raises InvalidTokensError for a key that is no hexadecimal SHA-256 digest."""
        return cls(_digests(keys), None if prefix_keys is None else _digests(prefix_keys))

    def whole(self) -> list[bytes]:
        """The path from the start of the sequence."""
        return [*(self.prefix or ()), *self.digests]


def _digests(keys: Sequence[str]) -> list[bytes]:
    try:
        digests = [bytes.fromhex(key) for key in keys]
    except (TypeError, ValueError) as error:
        raise InvalidTokensError(f"a page hash is no hexadecimal text: {error}") from error
    wrong = next((digest for digest in digests if len(digest) != DIGEST_BYTES), None)
    if wrong is not None:
        raise InvalidTokensError(f"a page hash has {len(wrong)} bytes, expected {DIGEST_BYTES}")
    return digests


class PageStore:
    """The pages of one pool in a store. Calls raise KvstoreError; none outlasts its budget by more than one step."""

    def __init__(
        self, store: KvStore, namespace: Namespace, pages: HostPages, clock: Clock, counters: ConnectorCounters
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._pages = pages
        self._clock = clock
        self._counters = counters
        self._keeps_single_pages = False

    @property
    def namespace(self) -> Namespace:
        """Where the pages are kept."""
        return self._namespace

    def leading(self, chain: Chain, root: Root | None, budget_seconds: float) -> int:
        """How many of the leading pages are stored. A touch, and one lookup in the store's count.

        Pages stored by themselves are touched, and counted, one by one.
        """
        ends_at = self._clock.monotonic() + budget_seconds
        if chain.prefix:
            found = self._store.match(self._namespace, chain.whole(), root=root).blocks - len(chain.prefix)
            return max(0, found)
        pages, window = 0, len(chain.digests)
        while pages < len(chain.digests) and (not pages or self._clock.monotonic() < ends_at):
            some = chain.digests[pages : pages + window]
            found = self._store.match(
                self._namespace, some, root=root, touch=not pages or self._keeps_single_pages
            ).blocks
            if not found:
                break
            pages, window = pages + found, 1 if self._keeps_single_pages else max(_WINDOW_PAGES, 4 * found)
        return pages

    def stored(self, chain: Chain, root: Root | None, budget_seconds: float) -> set[int]:
        """Which of these pages are stored by themselves, the last ones asked for first, as far as the budget goes."""
        ends_at = self._clock.monotonic() + budget_seconds
        found: set[int] = set()
        for index in reversed(range(len(chain.digests))):
            if self._clock.monotonic() >= ends_at:
                break
            if self._store.match(self._namespace, chain.digests[index : index + 1], root=root).blocks:
                found.add(index)
        return found

    def load(self, chain: Chain, root: Root | None, indices: Indices, bounce: Bounce, budget_seconds: float) -> int:
        """Copy the leading pages into host memory at `indices`; returns how many of them are right."""
        ends_at = self._clock.monotonic() + budget_seconds
        if chain.prefix:
            return self._load_path(chain.whole(), len(chain.prefix), root, indices, bounce=bounce, ends_at=ends_at)
        pages = 0
        while pages < len(chain.digests) and (not pages or self._clock.monotonic() < ends_at):
            rest = indices[pages * self._pages.page_size :]
            loaded = self._load_path(chain.digests[pages:], 0, root, rest, bounce=bounce, ends_at=ends_at)
            if not loaded:
                break
            pages += loaded
        return pages

    def save(self, chain: Chain, root: Root | None, indices: Indices, bounce: Bounce, budget_seconds: float) -> int:
        """Store the pages at `indices`; returns how many of the leading ones are stored now."""
        ends_at = self._clock.monotonic() + budget_seconds
        if chain.prefix is not None:
            return self._save_path(chain.whole(), len(chain.prefix), root, indices, bounce=bounce, ends_at=ends_at)
        self._keeps_single_pages = True
        size = self._pages.page_size
        for index, digest in enumerate(chain.digests):
            if index and self._clock.monotonic() >= ends_at:
                return index
            own = indices[index * size : (index + 1) * size]
            if not self._save_path([digest], 0, root, own, bounce=bounce, ends_at=ends_at):
                return index
        return len(chain.digests)

    def _load_path(
        self, path: list[bytes], skip: int, root: Root | None, indices: Indices, *, bounce: Bounce, ends_at: float
    ) -> int:
        claimed = PrefixMatch(
            self._namespace, PLAIN_ROOT if root is None else root, as_prompt(self._namespace, path), len(path), ()
        )
        with self._store.lease(claimed) as lease:
            pages = self._load_leased(lease, skip, indices, bounce=bounce, ends_at=ends_at)
        self._counters.add(loaded_tokens=pages * self._namespace.layout.block_tokens)
        return pages

    def _load_leased(self, lease: Lease, skip: int, indices: Indices, *, bounce: Bounce, ends_at: float) -> int:
        pages, wanted = 0, lease.blocks - skip
        while pages < wanted and (not pages or self._clock.monotonic() < ends_at):
            with bounce.rows(self._pages.page_bytes, wanted - pages) as rows:
                loaded = lease.load_into(rows, from_block=skip + pages).blocks
                if loaded:
                    self._pages.write(self._at(indices, pages, loaded), rows[:loaded])
            pages += loaded
            if loaded < len(rows):
                break
        return pages

    def _save_path(
        self, path: list[bytes], skip: int, root: Root | None, indices: Indices, *, bounce: Bounce, ends_at: float
    ) -> int:
        with self._store.stage(self._namespace, path, root=root, from_block=skip) as stage:
            self._write_stage(stage, skip, indices, bounce=bounce, ends_at=ends_at)
            result = stage.commit()
        self._counters.add(
            stored_blocks=result.blocks, present_blocks=result.present_blocks, refused_blocks=result.refused_blocks
        )
        return min(len(path) - skip, result.present_blocks + result.blocks)

    def _write_stage(self, stage: Stage, skip: int, indices: Indices, *, bounce: Bounce, ends_at: float) -> None:
        written = 0
        while written < stage.blocks:
            if written and self._clock.monotonic() >= ends_at:
                return  # what is written is committed
            with bounce.rows(self._pages.page_bytes, stage.blocks - written) as rows:
                first = stage.from_block + written
                self._pages.read(self._at(indices, first - skip, len(rows)), rows)
                stage.write_from(rows, from_block=first)
                written += len(rows)

    def _at(self, indices: Indices, page: int, pages: int) -> Indices:
        size = self._pages.page_size
        return indices[page * size : (page + pages) * size]
