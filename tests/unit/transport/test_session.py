from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstore.errors import ClosedError, InvalidArgumentError, NoSpaceError
from kvstore.transport.limits import ServiceLimits
from kvstore.transport.principal import Principal, enter
from kvstore.transport.roles import Role
from kvstore.transport.session import Holdings, Session, SessionTable
from kvstore.transport.status import UnknownSessionError
from kvstore.types import KvLayout, Namespace

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, dtype="int8")
CALLER = Principal("caller", "team", Role.WRITE, "local")
NAMESPACE = Namespace(model="m", revision="r", layout=LAYOUT)


def holdings(ended: list[str], limit: int = 2) -> Holdings[str]:
    return Holdings("lease", limit, ended.append)


def test_what_is_held_ends_once():
    ended: list[str] = []
    held = holdings(ended)
    first = 7
    held.open(first, lambda: "a", NAMESPACE)
    assert held.get(first).handle == "a"
    held.end(first)
    held.end(first)
    assert ended == ["a"]
    with pytest.raises(ClosedError, match=f"lease {first}"):
        held.get(first)


def test_the_limit_is_checked_before_anything_is_acquired():
    held = holdings([], limit=1)
    held.open(1, lambda: "a", NAMESPACE)
    with pytest.raises(NoSpaceError, match="1 lease"):
        held.open(2, lambda: pytest.fail("acquired beyond the limit"), NAMESPACE)


@pytest.mark.parametrize("held_id", [0, 1])
def test_an_id_that_is_none_or_in_use_is_refused(held_id: int):
    held = holdings([])
    held.open(1, lambda: "a", NAMESPACE)
    with pytest.raises(InvalidArgumentError, match="lease id"):
        held.open(held_id, lambda: pytest.fail("acquired"), NAMESPACE)
    assert held.get(1).handle == "a"


def test_a_failed_acquisition_takes_no_place():
    held = holdings([], limit=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            held.open(1, lambda: str(1 // 0), NAMESPACE)
    assert held.open(1, lambda: "a", NAMESPACE) == "a"


def test_what_is_taken_does_not_end_with_the_session():
    ended: list[str] = []
    held = holdings(ended)
    first = 7
    held.open(first, lambda: "a", NAMESPACE)
    assert held.take(first).handle == "a"
    assert held.close() == 0
    assert ended == []


@pytest.mark.parametrize(
    "end", [lambda held: held.end(1), lambda held: held.close()], ids=["by id", "with the session"]
)
def test_what_is_ended_while_it_is_acquired_ends_once_it_is_there(end: Callable[[Holdings[str]], object]):
    ended: list[str] = []
    held = holdings(ended)
    acquiring, go = threading.Event(), threading.Event()
    problems: list[BaseException] = []

    def acquire() -> str:
        acquiring.set()
        go.wait()
        return "late"

    def open_one() -> None:
        try:
            held.open(1, acquire, NAMESPACE)
        except ClosedError as error:
            problems.append(error)

    thread = threading.Thread(target=open_one)
    thread.start()
    acquiring.wait()
    end(held)
    go.set()
    thread.join()
    assert ended == ["late"]
    assert len(problems) == 1


def test_one_that_fails_to_end_is_counted_and_the_others_end(caplog: pytest.LogCaptureFixture):
    ended: list[str] = []

    def end(name: str) -> None:
        if name == "bad":
            raise ZeroDivisionError
        ended.append(name)

    held: Holdings[str] = Holdings("lease", 3, end)
    for held_id, name in enumerate(("a", "bad", "b"), start=1):
        held.open(held_id, lambda name=name: name, NAMESPACE)
    assert held.close() == 1
    assert ended == ["a", "b"]
    assert [record.getMessage() for record in caplog.records] == ["a lease could not be ended"]


def test_namespaces_are_known_to_their_session_only_and_limited():
    session = Session(ServiceLimits(namespaces_per_session=1), CALLER)
    session.open_namespace(b"a" * 16, NAMESPACE)
    session.open_namespace(b"a" * 16, NAMESPACE)
    assert session.namespace(b"a" * 16) is NAMESPACE
    with pytest.raises(NoSpaceError):
        session.open_namespace(b"b" * 16, NAMESPACE)
    with pytest.raises(ClosedError, match="OpenNamespace"):
        session.namespace(b"b" * 16)
    with pytest.raises(InvalidArgumentError, match="3 bytes"):
        session.namespace(b"abc")


def test_sessions_are_limited_and_forgotten():
    table = SessionTable(ServiceLimits(sessions=1))
    enter(CALLER)
    session = table.open(CALLER)
    assert table.get(session.session_id) is session
    with pytest.raises(NoSpaceError):
        table.open(CALLER)
    table.remove(session)
    with pytest.raises(UnknownSessionError):
        table.get(session.session_id)
    other = table.open(CALLER)
    assert other.session_id != session.session_id
    assert other.challenge != session.challenge


def test_the_session_of_another_caller_is_unknown_and_one_with_a_new_token_is_not():
    table = SessionTable(ServiceLimits())
    session = table.open(CALLER)
    enter(replace(CALLER, source="another token", expires_at=7.0))
    assert table.get(session.session_id) is session
    for other in (replace(CALLER, name="other"), replace(CALLER, tenant="other"), replace(CALLER, tenant=None)):
        enter(other)
        with pytest.raises(UnknownSessionError):
            table.get(session.session_id)


def test_what_an_account_refuses_is_given_back_and_what_ends_is_taken_off_it():
    ended: list[str] = []
    account: list[str] = []

    def count(handle: str) -> Callable[[], None]:
        if account:
            raise NoSpaceError("one is enough")
        account.append(handle)
        return account.clear

    held = holdings(ended)
    held.open(1, lambda: "a", NAMESPACE, count)
    with pytest.raises(NoSpaceError, match="one is enough"):
        held.open(2, lambda: "b", NAMESPACE, count)
    assert ended == ["b"]
    held.end(1)
    assert (account, ended) == ([], ["b", "a"])
    held.open(2, lambda: "c", NAMESPACE, count)
    assert account == ["c"]
    held.take(2)
    assert (account, ended) == ([], ["b", "a"])
