"""What all tests share."""

from __future__ import annotations

import pytest

from kvstore.transport import client
from kvstore.transport.link import Deadlines


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store answers does not depend on how busy the machine is; tests of deadlines name their own."""
    monkeypatch.setattr(client, "DEFAULT_DEADLINES", Deadlines(lookup_seconds=10.0, bulk_seconds=30.0))
