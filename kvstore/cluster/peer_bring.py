"""What is done for one prompt that is not all here: look, plan, fetch, claim, wait, look again.

    lacks enough? --no--> end
      | yes
    directory: who has more? -- somebody --> fetch is cheaper? --yes--> fetch -> look again
      | nobody                                | no
    claim it -- another has the claim --> wait for it -> look again
      | ours                                  | (too long)
    end: the engine computes it  <------------+

One `Bringing` serves all prompts. What it does for one it does step by step, and says before each step how long to
wait: threads that wait in between drive it in a node (peer_prefetch.py), and one thread drives many in a simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvstore.cluster.fetch import FetchOutcome
from kvstore.cluster.peer_address import peer_address
from kvstore.cluster.peer_lookup import boundary_blocks, deepest_boundaries
from kvstore.cluster.plan import Candidate, Choice, Need, claim_seconds, is_worth_asking, make_plan, patience_seconds
from kvstore.errors import DirectoryUnavailableError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from random import Random

    from kvstore.clock import Clock
    from kvstore.cluster.directory import Claim, Directory
    from kvstore.cluster.fetch import Fetched, WantedPrompt, Wish
    from kvstore.cluster.peer_settings import PeerSettings
    from kvstore.cluster.plan import Path, Plan
    from kvstore.cluster.prefill import PrefillModel
    from kvstore.nodes import Node

# Times that one prompt is looked at anew: after each fetch, and each wait that was not in vain.
_LOOKS_MAX = 12
_POLL_SECONDS = 0.02


class LocalBlocks(Protocol):
    """What this node has."""

    def present_blocks(self, wanted: WantedPrompt) -> int:
        """Leading blocks of a prompt that are here, in host memory or on disk."""
        ...

    def keys(self, wanted: WantedPrompt) -> Sequence[bytes]:
        """The keys of its whole blocks."""
        ...


class PeerBlocks(Protocol):
    """What peers have, and the way to them."""

    def fetch(self, node: Node, wanted: WantedPrompt, first: int, wish: Wish) -> Fetched:
        """Bring blocks from `first` on; raises nothing of the peer's."""
        ...

    def path(self, node: Node) -> Path:
        """How fast a peer answers and sends."""
        ...

    def queue(self, node: Node) -> int:
        """How many transfers wait there, of this node's and others."""
        ...


class ClaimKeeper(Protocol):
    """Where claims of this node are kept."""

    def keep(self, key: bytes, claim: Claim, seconds: float) -> None:
        """Take a claim over."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a Bringing works with."""

    directory: Directory
    local: LocalBlocks
    peers: PeerBlocks
    claims: ClaimKeeper
    clock: Clock
    random: Random


class BringCounters(Protocol):
    """Where it is counted what happened."""

    def count_fetch(self, fetched: Fetched, block_tokens: int) -> None:
        """A fetch has ended."""
        ...

    def count_choice(self, choice: str) -> None:
        """It was decided what to do about a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Boundary:
    """A block that the directory knows by its key, and how many tokens of the prompt end there."""

    tokens: int
    key: bytes


@dataclass(frozen=True, slots=True)
class _Errand:
    """A prompt under way and its boundaries.

    `asked` has the peers, by slot, and how many tokens they were said to have when they were asked: they are asked
    again where they have more since. Of one that failed nothing more is wanted.
    """

    wanted: WantedPrompt
    wish: Wish
    prefill: PrefillModel
    boundaries: Sequence[Boundary]
    asked: dict[int, float] = field(default_factory=dict)

    def is_news(self, slot: int, tokens: int) -> bool:
        """Whether it was not known, or is not known to be of no use, that a peer has so many tokens."""
        return tokens > self.asked.get(slot, 0)


class Bringing:
    """Decides and acts; see above. Thread-safe if what it is given is."""

    def __init__(self, around: Surroundings, settings: PeerSettings, counters: BringCounters) -> None:
        self._around = around
        self._settings = settings
        self._counters = counters

    def first_key(self, wanted: WantedPrompt) -> bytes | None:
        """The first boundary that is missing here; None where nothing is to be asked for."""
        need = self._need(wanted)
        if not is_worth_asking(need):
            return None
        missing = _behind(self._boundaries(wanted), need)
        return missing[0].key if missing else None

    def steps(self, wanted: WantedPrompt, wish: Wish, prefill: PrefillModel) -> Iterator[float]:
        """Bring what a prompt lacks; yields the seconds to wait before it goes on. It may be dropped at any step."""
        errand = _Errand(wanted, wish, prefill, self._boundaries(wanted))
        for _ in range(_LOOKS_MAX):
            need = self._need(wanted)
            missing = _behind(errand.boundaries, need)
            if not missing or not is_worth_asking(need) or wish.left_seconds() <= 0:
                return
            try:
                plan = self._plan(errand, need, missing)
                if plan.choice is Choice.RECOMPUTE:
                    return
                if plan.candidate is not None:
                    self._fetch(errand, plan.candidate, need)
                    yield 0.0
                elif not (yield from self._claim_or_wait(errand, need, missing[0])):
                    return
            except DirectoryUnavailableError:
                self._counters.count_choice("no_directory")
                return

    def deepest_blocks(self, wanted: WantedPrompt) -> int:
        """How many leading blocks of a prompt one peer has, as the directory says. Raises DirectoryUnavailableError."""
        missing = _behind(self._boundaries(wanted), self._need(wanted))
        found = deepest_boundaries(self._around.directory, [each.key for each in missing], self._nodes()[1])
        deepest = max(found.values(), default=0)
        return missing[deepest - 1].tokens // wanted.namespace.layout.block_tokens if deepest else 0

    def _need(self, wanted: WantedPrompt) -> Need:
        layout = wanted.namespace.layout
        present = self._around.local.present_blocks(wanted)
        tokens = layout.block_tokens
        return Need(present * tokens, wanted.blocks * tokens, layout.block_bytes / tokens)

    def _boundaries(self, wanted: WantedPrompt) -> list[Boundary]:
        tokens = wanted.namespace.layout.block_tokens
        keys = self._around.local.keys(wanted)
        ends = boundary_blocks(tokens, self._settings.announce_tokens, wanted.blocks)
        return [Boundary(end * tokens, keys[end - 1]) for end in ends]

    def _plan(self, errand: _Errand, need: Need, missing: Sequence[Boundary]) -> Plan:
        around = self._around
        nodes, own_slots = self._nodes()
        deepest = deepest_boundaries(around.directory, [each.key for each in missing], own_slots)
        candidates = []
        for slot, count in deepest.items():
            node, tokens = nodes.get(slot), missing[count - 1].tokens
            if node is not None and peer_address(node.addresses) and errand.is_news(slot, tokens):
                candidates.append(Candidate(node, tokens, around.peers.queue(node), around.peers.path(node)))
        plan = make_plan(need, candidates, errand.prefill, self._settings.gpu_weight, around.random)
        self._counters.count_choice(plan.choice.value)
        return plan

    def _nodes(self) -> tuple[dict[int, Node], frozenset[int]]:
        """The living nodes by slot, and which slots are this node's own."""
        nodes = {node.slot: node for node in self._around.directory.nodes()}
        return nodes, frozenset(slot for slot, node in nodes.items() if self._around.directory.is_self(node))

    def _fetch(self, errand: _Errand, asked: Candidate, need: Need) -> None:
        tokens = errand.wanted.namespace.layout.block_tokens
        fetched = self._around.peers.fetch(asked.node, errand.wanted, need.present_tokens // tokens, errand.wish)
        has_failed = fetched.outcome is not FetchOutcome.FETCHED
        errand.asked[asked.node.slot] = math.inf if has_failed else asked.tokens
        self._counters.count_fetch(fetched, tokens)

    def _claim_or_wait(self, errand: _Errand, need: Need, missing: Boundary) -> Generator[float, None, bool]:
        """Claim what nobody has, or wait for who has claimed it; true if there is something new to look at."""
        around, prefill, limits = self._around, errand.prefill, self._settings
        seconds = claim_seconds(need, prefill, limits.settle_seconds, limits.claim_seconds_max)
        key = missing.key
        if self._claim(key, seconds):
            return False
        claimed_seconds = around.directory.claimed(key) or 0.0
        patience = patience_seconds(need, prefill, claimed_seconds, limits.gpu_weight, around.random)
        gives_up_at = around.clock.monotonic() + patience
        while (rest_seconds := gives_up_at - around.clock.monotonic()) > 0 and errand.wish.left_seconds() > 0:
            yield min(_POLL_SECONDS, rest_seconds)
            if self._need(errand.wanted).present_tokens > need.present_tokens:
                return True
            told = around.directory.holders([key])[0]
            # Which slots are this node's own takes a look at every node, so it is asked only of what was found.
            if told and any(errand.is_news(slot, missing.tokens) for slot in told - self._nodes()[1]):
                return True
            if around.directory.claimed(key) is None and self._claim(key, seconds):
                return False
        self._counters.count_choice("waited_in_vain")
        return False

    def _claim(self, key: bytes, seconds: float) -> bool:
        claim = self._around.directory.claim(key, seconds)
        if claim is None:
            return False
        self._around.claims.keep(key, claim, seconds)
        self._counters.count_choice("claimed")
        return True


def _behind(boundaries: Sequence[Boundary], need: Need) -> list[Boundary]:
    return [each for each in boundaries if each.tokens > need.present_tokens]
