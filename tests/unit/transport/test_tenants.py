"""Limits of tenants, compared with a naive count; rates by a clock that stands still; whose is whose."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import NoSpaceError
from kvstore.testing.manual_clock import ManualClock
from kvstore.transport import tenants as module
from kvstore.transport.limits import ServiceLimits
from kvstore.transport.tenants import Owners, Tenants, under_way

LIMITS = ServiceLimits(calls_per_tenant=2, leases_per_tenant=3, stages_per_tenant=1, leased_bytes_per_tenant=100)
KINDS = ("calls", "leases", "stages")


@dataclass
class Naive:
    """Lists of what each tenant has open."""

    opened: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def may_open(self, kind: str, tenant: str, size: int) -> bool:
        held = self.opened.setdefault((kind, tenant), [])
        most = {"calls": 2, "leases": 3, "stages": 1}[kind]
        return len(held) < most and (kind != "leases" or sum(held) + size <= 100)


STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from("ab"), st.integers(0, 60), st.booleans()), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_a_tenant_has_open_what_a_count_of_its_own_allows(steps: list[tuple[str, str, int, bool]]):
    tenants = Tenants(LIMITS, ManualClock())
    naive = Naive()
    endings: dict[tuple[str, str], list] = {}
    for kind, tenant, size, opens in steps:
        mine = endings.setdefault((kind, tenant), [])
        if not opens:
            if mine:
                mine.pop()()
                naive.opened[kind, tenant].pop()
            continue
        begin = {
            "calls": lambda tenant=tenant: tenants.begin(tenant),
            "leases": lambda tenant=tenant, size=size: tenants.hold_lease(tenant, size),
            "stages": lambda tenant=tenant: tenants.hold_stage(tenant),
        }[kind]
        if naive.may_open(kind, tenant, size):
            mine.append(begin())
            naive.opened[kind, tenant].append(size)
        else:
            with pytest.raises(NoSpaceError, match=f"tenant '{tenant}'"):
                begin()
    for tenant in "ab":
        stats = tenants.stats(tenant, namespaces=0, pins=0)
        open_counts = [len(naive.opened.get((kind, tenant), ())) for kind in ("leases", "stages")]
        assert open_counts == [stats.leases, stats.stages]


def test_a_rate_lets_a_second_of_calls_in_at_once_and_says_when_the_next_may_come():
    clock = ManualClock()
    tenants = Tenants(ServiceLimits(calls_per_second_per_tenant=10), clock)
    for _ in range(10):
        tenants.begin("a")()
    with pytest.raises(NoSpaceError, match="more than 10 calls a second") as refused:
        tenants.begin("a")
    assert 0.1 == pytest.approx(refused.value.retry_after_seconds)
    tenants.begin("b")()
    clock.advance(0.1001)
    tenants.begin("a")()
    with pytest.raises(NoSpaceError):
        tenants.begin("a")
    clock.advance(1000)
    for _ in range(10):
        tenants.begin("a")()
    with pytest.raises(NoSpaceError):
        tenants.begin("a")
    assert {"rate": 3} == tenants.refused


def test_without_a_rate_nothing_is_refused():
    tenants = Tenants(ServiceLimits(), ManualClock())
    for _ in range(5000):
        tenants.begin("a")()
    assert {} == tenants.refused


def test_names_without_end_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_TENANTS_MAX", 100)
    tenants = Tenants(ServiceLimits(), ManualClock())
    end = tenants.hold_stage("holder")
    for number in range(1000):
        tenants.begin(f"tenant {number}")()
    assert 1 == tenants.stats("holder", namespaces=0, pins=0).stages
    assert 100 >= len(tenants._tenants)
    end()


def test_a_call_ends_whatever_comes_of_it_and_one_of_no_tenant_is_not_counted():
    tenants = Tenants(ServiceLimits(calls_per_tenant=1), ManualClock())
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), under_way(tenants, "a"):
            raise ZeroDivisionError
    with under_way(tenants, None), under_way(tenants, None), under_way(tenants, "a"), pytest.raises(NoSpaceError):
        tenants.begin("a")


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.booleans()), max_size=40))
def test_owners_are_as_they_were_last_told(steps: list[tuple[int, str, bool]]):
    owners, naive = Owners(), {}
    for owned, tenant, adds in steps:
        if adds:
            owners.add(owned, tenant)
            naive[owned] = tenant
        else:
            owners.remove(owned)
            naive.pop(owned, None)
    for tenant in "ab":
        assert Counter(owned for owned, owner in naive.items() if owner == tenant) == Counter(owners.of(tenant))
        assert [naive.get(owned) == tenant for owned in range(10)] == [
            owners.is_of(owned, tenant) for owned in range(10)
        ]


def test_the_oldest_owners_are_forgotten_at_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_OWNED_MAX", 3)
    owners = Owners()
    for owned in range(5):
        owners.add(owned, "a")
    assert [2, 3, 4] == owners.of("a")
