from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.store import StoreSettings


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"leases_max": 0}, "leases_max is 0, expected at least 1"),
        ({"room_seconds_max": -0.1}, "room_seconds_max is -0.1, expected at least 0"),
        ({"pinned_ratio_max": 1.5}, "pinned_ratio_max is 1.5"),
    ],
)
def test_a_limit_out_of_range_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        StoreSettings(**change)
