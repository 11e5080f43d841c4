"""Keeps this node in the directory: its lease, and what it holds, as the store's events tell."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from kvstore.cluster.announcements import Announcements
from kvstore.cluster.directory import GROUPS
from kvstore.errors import ClosedError, DirectoryUnavailableError, NodeNameTakenError
from kvstore.nodes import NodeReport, NodeState
from kvstore.stats import ClusterStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvstore.clock import Clock
    from kvstore.cluster.directory import Membership, NodeProfile
    from kvstore.events import EventPage

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
_EVENTS_MAX = 1000  # in one page
_PAGES_MAX = 64  # in one turn
LOOK_SECONDS_MIN = 5.0  # from one look through the store to the next, however often the log drops events
_KEYS_MAX = 1024  # in one call
_CALLS_MAX = 16  # in one turn, so that the lease and the events have theirs
_STOP_SECONDS = 2.0  # for withdrawing all at the end
_JOIN_SECONDS = 10.0  # for the thread to end; one turn takes less


class AnnouncedStore(Protocol):
    """What is asked of a store."""

    def events(self, *, after: int = 0, limit: int = 1000, wait_seconds: float = 0.0) -> EventPage:
        """The log of what was stored and removed."""
        ...

    def boundaries(self, every_tokens: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """Namespaces and keys of the boundaries that it holds."""
        ...


@dataclass(frozen=True, slots=True)
class AnnounceSettings:
    """How a node keeps its place."""

    announce_tokens: int = 512
    announce_after_seconds: float = 2.0
    lease_seconds: float = 15.0
    entry_seconds: float = 3600.0
    withdrawals_max: int = 1 << 16


class Announcer:
    """One thread, which alone uses the membership to join, renew, announce and withdraw. `stop` ends it.

    Nothing here waits for a store, and no store for this: events are read by polling, where the log dropped some the
    store is looked through, and while the directory does not answer, what is to be told gathers, bounded by what the
    store holds. All that is held is told again once in half of `entry_seconds`, a group at a time, so drift does not
    last longer; a group that the directory lost is told again at once.
    """

    def __init__(
        self,
        store: AnnouncedStore,
        membership: Membership,
        *,
        settings: AnnounceSettings,
        clock: Clock,
        report: Callable[[], NodeReport] = NodeReport,
        upkeep: Callable[[], None] = lambda: None,
    ) -> None:
        """`report` is what the node says of itself with its lease, but for whether it drains; `upkeep` is done before
        each renewal of the lease, and raises nothing of the directory's."""
        self._store = store
        self._membership = membership
        self._settings = settings
        self._clock = clock
        self._report = report
        self._upkeep = upkeep
        self._profile: NodeProfile | None = None
        self._announcements = Announcements(
            settings.announce_tokens, settings.announce_after_seconds, settings.withdrawals_max
        )
        self._is_adrift = True
        self._after = 0
        self._epoch = ""
        self._has_joined = False
        self._is_in = False  # the lease stood at the last look
        self._renew_at = clock.monotonic()
        self._period = settings.entry_seconds / 2
        self._begun_at = clock.monotonic()
        self._repeated = 0  # groups that were told again since then
        self._look_at = self._begun_at  # the store is looked through then in any case,
        self._look_from = self._begun_at  # and from then on if events were lost
        self._announced = self._withdrawn = self._snapshots = self._failures = 0
        self._has_ended = threading.Event()
        self._is_draining = threading.Event()
        self._has_news = threading.Event()  # the lease is to be renewed at once
        self._thread: threading.Thread | None = None

    def enter(self, profile: NodeProfile) -> None:
        """Say who this node is, before the first turn."""
        self._profile = profile

    def start(self, addresses: Sequence[str], capacities: Mapping[str, int]) -> None:
        """Take part from now on, with the bytes of each tier. A directory that does not answer is asked again."""
        assert self._thread is None, "it is started once"
        assert self._profile is not None, "it was said who this node is"
        host_bytes, disk_bytes = capacities.get("host", 0), capacities.get("disk", 0)
        self._profile = replace(self._profile, addresses=tuple(addresses), host_bytes=host_bytes, disk_bytes=disk_bytes)
        self._thread = threading.Thread(target=self._run, name="kvstore-announcer", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Say in the lease that this node drains. What it holds is told on: others are to take it. Idempotent."""
        self._is_draining.set()
        self._has_news.set()

    def undrain(self) -> None:
        """Say that it takes part again. Idempotent."""
        self._is_draining.clear()
        self._has_news.set()

    def stop(self) -> None:
        """Withdraw everything within some seconds, and leave. Idempotent."""
        if self._has_ended.is_set():
            return
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        try:
            if self._is_in:
                self._withdraw_all()
                self._membership.leave()
        except DirectoryUnavailableError as err:
            logger.warning("left without a word to the directory; its lease ends by itself: cause=%s", err)
        finally:
            self._is_in = False
            self._membership.close()

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs, was not started yet, or was stopped."""
        return self._thread is None or self._has_ended.is_set() or self._thread.is_alive()

    def stats(self) -> ClusterStats:
        """What it did so far; numbers of one moment each."""
        return ClusterStats(
            node="" if self._profile is None else self._profile.name,
            is_member=self._is_in,
            announced_boundaries=self._announcements.told,
            waiting_boundaries=self._announcements.waiting,
            announcements=self._announced,
            withdrawals=self._withdrawn,
            snapshots=self._snapshots,
            failures=self._failures,
        )

    def turn(self) -> None:
        """Do what is due now: renew, follow the store, tell. Never waits but for the directory, which is bounded."""
        self._keep_lease()
        now = self._clock.monotonic()
        if now >= self._look_at or (self._is_adrift and now >= self._look_from):
            self._take_snapshot()
        if not self._is_adrift:
            self._follow()
        self._announcements.mature(self._clock.monotonic())
        if self._is_in:
            self._repeat()
            self._tell()

    def _run(self) -> None:
        seconds = 0.0
        while not self._has_ended.wait(seconds):
            seconds = POLL_SECONDS
            try:
                self.turn()
            except ClosedError:
                return
            except Exception:
                self._failures += 1
                logger.exception("a turn of the announcer failed; the next one goes on")
                self._is_adrift = True

    def _keep_lease(self) -> None:
        now = self._clock.monotonic()
        if now < self._renew_at and not self._has_news.is_set():
            return
        self._has_news.clear()
        assert self._profile is not None, "it was said who this node is"
        self._renew_at = now + self._settings.lease_seconds / 3
        was_in = self._is_in
        self._upkeep()
        try:
            if not self._has_joined:
                node = self._membership.join(self._profile)
                self._has_joined = True
                self._announcements.tell_groups_again(range(GROUPS))
                self._has_news.set()  # what a lease says besides who has it
            else:
                state = NodeState.DRAINING if self._is_draining.is_set() else NodeState.READY
                renewal = self._membership.renew(replace(self._report(), state=state))
                node = renewal.node
                self._announcements.tell_groups_again(renewal.lost)
        except (DirectoryUnavailableError, NodeNameTakenError) as err:
            self._fail(err)
            return
        self._is_in = True
        if not was_in:
            logger.info("in the directory: node=%s slot=%d", node.name, node.slot)

    def _take_snapshot(self) -> None:
        """Look through the store; the lease is renewed between slices."""
        page = self._store.events(after=2**63, limit=1)
        self._epoch, self._after = page.epoch, page.next_after
        self._announcements.begin_snapshot()
        for ns_id, keys in self._store.boundaries(self._settings.announce_tokens):
            self._announcements.add_snapshot(ns_id, keys)
            self._keep_lease()
        self._announcements.end_snapshot()
        self._snapshots += 1
        self._is_adrift = False
        self._look_from = self._clock.monotonic() + LOOK_SECONDS_MIN
        self._look_at = self._clock.monotonic() + self._period

    def _follow(self) -> None:
        for _ in range(_PAGES_MAX):
            page = self._store.events(after=self._after, limit=_EVENTS_MAX)
            if page.gap or page.epoch != self._epoch:
                self._is_adrift = True
                return
            now = self._clock.monotonic()
            for event in page.events:
                self._announcements.apply(event, now)
            self._after = page.next_after
            if len(page.events) < _EVENTS_MAX:
                return

    def _repeat(self) -> None:
        """Have the groups told again whose turn has come."""
        turns = int((self._clock.monotonic() - self._begun_at) / self._period * GROUPS)
        groups = {turn % GROUPS for turn in range(self._repeated, min(turns, self._repeated + GROUPS))}
        self._repeated = turns
        self._announcements.tell_groups_again(groups)

    def _tell(self) -> None:
        for _ in range(_CALLS_MAX):
            gone = self._announcements.take_gone(_KEYS_MAX)
            due = self._announcements.take_due(_KEYS_MAX)
            if not gone and not due:
                return
            try:
                self._membership.withdraw(gone)
                self._membership.announce(due)
            except DirectoryUnavailableError as err:
                self._announcements.withdraw_again(gone)
                self._announcements.tell_again(due)
                self._fail(err)
                return
            self._withdrawn += len(gone)
            self._announced += len(due)

    def _withdraw_all(self) -> None:
        end = self._clock.monotonic() + _STOP_SECONDS
        keys = self._announcements.withdraw_all()
        for first in range(0, len(keys), _KEYS_MAX):
            if self._clock.monotonic() >= end:
                logger.info("left with entries in the directory, which expire: entries=%d", len(keys) - first)
                return
            self._membership.withdraw(keys[first : first + _KEYS_MAX])

    def _fail(self, error: DirectoryUnavailableError | NodeNameTakenError) -> None:
        self._failures += 1
        if self._is_in or self._failures == 1:
            logger.warning("not in the directory; this node serves on alone and tries again: cause=%s", error)
        self._is_in = False
