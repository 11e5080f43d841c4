from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import events
from kvstore.errors import InvalidArgumentError
from kvstore.events import EventKind, EventLog, EventPage


def _append(log: EventLog, count: int) -> None:
    for _ in range(count):
        log.append(EventKind.CLEARED, b"n" * 16)


def test_pages_follow_each_other_without_loss() -> None:
    log = EventLog("epoch", 1 << 20)
    _append(log, 5)
    first = log.read(0, 3)
    second = log.read(first.next_after, 3)
    assert [event.sequence for event in (*first.events, *second.events)] == [1, 2, 3, 4, 5]
    assert (first.gap, second.gap, second.epoch) == (False, False, "epoch")
    assert log.read(second.next_after, 3).events == ()


def test_overflow_is_bounded_and_told_to_late_readers() -> None:
    log = EventLog("epoch", 1200)
    _append(log, 100)
    page = log.read(1, 1000)
    assert page.gap
    assert [event.sequence for event in page.events] == [96, 97, 98, 99, 100]
    assert not log.read(95, 1000).gap


def test_a_reader_from_the_future_is_told_of_a_gap() -> None:
    log = EventLog("epoch", 1000)
    _append(log, 2)
    page = log.read(50, 10)
    assert (page.gap, page.events, page.next_after) == (True, (), 2)


def test_a_waiting_reader_gets_the_next_event() -> None:
    log = EventLog("epoch", 1000)
    pages = []
    reader = threading.Thread(target=lambda: pages.append(log.read(0, 10, wait_seconds=30)))
    reader.start()
    _append(log, 1)
    reader.join()
    assert [event.sequence for event in pages[0].events] == [1]


def _sequences(page: EventPage) -> list[int]:
    return [event.sequence for event in page.events]


def test_a_tenant_has_sequences_of_its_own_however_much_others_do() -> None:
    log = EventLog("epoch", 1 << 20)
    for tenant in ("ours", "theirs", "theirs", "ours", "theirs"):
        log.append(EventKind.CLEARED, tenant.encode(), tenant=tenant)
    page = log.read_own("ours", 0, 10)
    assert ([1, 2], {b"ours"}, 2, False) == (
        _sequences(page), {event.ns_id for event in page.events}, page.next_after, page.gap
    )  # fmt: skip
    assert [1, 2, 3, 4, 5] == _sequences(log.read(0, 10))
    assert ([2], [3]) == (_sequences(log.read_own("ours", 1, 10)), _sequences(log.read_own("theirs", 2, 10)))
    assert ((), 0, False) == (
        (nobody := log.read_own("nobody", 0, 10)).events, nobody.next_after, nobody.gap
    )  # fmt: skip


def test_what_others_do_does_not_wake_a_reader_of_a_tenant() -> None:
    log = EventLog("epoch", 1 << 20)
    pages: list[EventPage] = []
    reader = threading.Thread(target=lambda: pages.append(log.read_own("ours", 0, 10, wait_seconds=30)))
    reader.start()
    _append(log, 3)
    log.append(EventKind.CLEARED, b"n" * 16, tenant="ours")
    reader.join()
    assert [1] == _sequences(pages[0])


def test_a_tenant_that_was_forgotten_is_told_of_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_TENANTS_MAX", 2)
    log = EventLog("epoch", 1000)
    for tenant in ("a", "a", "b", "c", "d", "e", "f", "g"):
        log.append(EventKind.CLEARED, b"n" * 16, tenant=tenant)
    assert (True, 2) == ((page := log.read_own("a", 1, 10)).gap, page.next_after)
    assert not log.read_own("a", 2, 10).gap
    log.append(EventKind.CLEARED, b"n" * 16, tenant="a")
    assert [3] == _sequences(log.read_own("a", 2, 10))


@pytest.mark.parametrize(("after", "limit", "wait_seconds"), [(-1, 1, 0.0), (0, 0, 0.0), (0, 1, -1.0)])
def test_a_page_that_cannot_be_is_refused(after: int, limit: int, wait_seconds: float) -> None:
    log = EventLog("epoch", 1000)
    with pytest.raises(InvalidArgumentError, match=f"after={after}, limit={limit}"):
        log.read(after, limit, wait_seconds)
    with pytest.raises(InvalidArgumentError, match=f"after={after}, limit={limit}"):
        log.read_own("ours", after, limit, wait_seconds)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), max_size=60), st.integers(300, 3000))
def test_logs_of_tenants_are_what_a_naive_one_has(steps: list[tuple[str, int]], capacity_bytes: int) -> None:
    """Readers that follow see each event of their tenant once, in order, unless they are told of a gap."""
    log = EventLog("epoch", capacity_bytes)
    appended: dict[str, list[bytes]] = {tenant: [] for tenant in "abcd"}
    seen = dict.fromkeys("abcd", 0)
    for number, (tenant, keys) in enumerate(steps):
        name = number.to_bytes(16, "big")
        log.append(EventKind.REMOVED, name, tenant=tenant, keys=(b"k" * 16,) * keys)
        appended[tenant].append(name)
        if number % 3 == 0:
            page = log.read_own(tenant, seen[tenant], 2)
            assert [appended[tenant][event.sequence - 1] for event in page.events] == [e.ns_id for e in page.events]
            assert page.gap or _sequences(page) == list(range(seen[tenant] + 1, page.next_after + 1))
            seen[tenant] = page.next_after
    for tenant, names in appended.items():
        page = log.read_own(tenant, 0, 100)
        assert names[len(names) - len(page.events) :] == [event.ns_id for event in page.events]
        assert (len(names), len(page.events) < len(names)) == (page.next_after, page.gap)
    assert sum(len(log.read_own(tenant, 0, 100).events) for tenant in "abcd") == len(log.read(0, 100).events)
