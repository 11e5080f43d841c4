from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.store import Quota, StoreSettings


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"leases_max": 0}, "leases_max is 0, expected at least 1"),
        ({"room_seconds_max": -0.1}, "room_seconds_max is -0.1, expected at least 0"),
        ({"pinned_ratio_max": 1.5}, "pinned_ratio_max is 1.5"),
        ({"eviction_policy": "mru"}, "eviction_policy is 'mru', expected one of survival, survival_flops, lru"),
    ],
)
def test_a_limit_out_of_range_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        StoreSettings(**change)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"host_min": -1}, "host_min is -1, expected a whole number of bytes"),
        ({"disk_max": 1.5}, "disk_max is 1.5, expected a whole number of bytes"),
        ({"host_max": True}, "host_max is True, expected a whole number of bytes"),
        ({"disk_min": None}, "disk_min is None, expected a whole number of bytes"),
        ({"host_min": 2, "host_max": 1}, "host_min is 2, expected at most host_max, which is 1"),
        ({"priority": 0.0}, "priority is 0.0, expected a number above 0"),
        ({"priority": float("inf")}, "priority is inf, expected a number above 0"),
        ({"priority": float("nan")}, "priority is nan, expected a number above 0"),
    ],
)
def test_a_quota_that_cannot_be_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Quota(**change)
