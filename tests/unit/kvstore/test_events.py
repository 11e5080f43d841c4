from __future__ import annotations

import threading

from kvstore.events import EventKind, EventLog


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
    log = EventLog("epoch", 1000)
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
