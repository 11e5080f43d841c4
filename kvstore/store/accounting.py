"""What a store counts. Every field is guarded by the index lock, but the observers: they are read without."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from kvstore.stats import TierStats
from kvstore.tiers.persistent import VolatileTier
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvstore.store.lookup_observer import LookupObserver
    from kvstore.tiers.host import HostTier
    from kvstore.tiers.persistent import PersistentTier
    from kvstore.types import PrefixMatch, TierRun


def lower_name(tier: PersistentTier | None) -> str:
    """What statistics call the tier below host memory."""
    return tier.label if isinstance(tier, VolatileTier) else Tier.DISK.name.lower()


def tier_stats(host: HostTier, lower: PersistentTier | None, blocks: Mapping[Tier, int]) -> dict[str, TierStats]:
    """Occupancy by the names that statistics have for tiers."""
    tiers = {"host": TierStats(host.capacity_bytes, host.used_bytes, blocks[Tier.HOST])}
    if lower is not None:
        tiers[lower_name(lower)] = TierStats(lower.capacity_bytes, lower.used_bytes, blocks[Tier.DISK])
    return tiers


def by_tier(tokens: Mapping[str, int], lower: PersistentTier | None) -> dict[str, int]:
    """Tokens by the names that statistics have for tiers."""
    return {lower_name(lower) if name == Tier.DISK.name.lower() else name: count for name, count in tokens.items()}


class Accounting:
    """Counters since the start, and the memory of which requests were counted already."""

    def __init__(self, request_ids_max: int) -> None:
        self._request_ids_max = request_ids_max
        self._counted: OrderedDict[str, None] = OrderedDict()
        self.observers: tuple[LookupObserver, ...] = ()
        self.lookups = 0
        self.lookup_tokens = 0
        self.hit_tokens: Counter[str] = Counter()
        self.loaded_tokens: Counter[str] = Counter()
        self.shortened_tokens = 0
        self.stored_blocks = 0
        self.present_blocks = 0
        self.corrupt_blocks = 0
        self.written_bytes = 0
        self.prefetches: Counter[str] = Counter()
        self.prefetched_blocks = 0
        self.rejected_blocks: Counter[str] = Counter()
        self.evicted_blocks: Counter[str] = Counter()

    def first_lookup(self, request_id: str | None) -> bool:
        """Whether this request was not counted before; remembers it. Requests without an id always count."""
        if request_id is None:
            return True
        if request_id in self._counted:
            self._counted.move_to_end(request_id)
            return False
        self._counted[request_id] = None
        if len(self._counted) > self._request_ids_max:
            self._counted.popitem(last=False)
        return True

    def count_lookup(self, prompt_tokens: int, runs: Iterable[TierRun], block_tokens: int) -> None:
        """Add one lookup of a whole prompt and what it hit, by tier."""
        self.lookups += 1
        self.lookup_tokens += prompt_tokens
        for run in runs:
            self.hit_tokens[run.tier.name.lower()] += run.blocks * block_tokens

    def tell(self, match: PrefixMatch) -> None:
        """Tell the observers of a lookup that was counted; to be called without the index lock."""
        for observer in self.observers:
            observer.see(match)
