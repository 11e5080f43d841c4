"""Which engine a server or a client was told to use, by name. The only place that knows all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.transport.bulk_client import BulkEngineClient
from kvstore.transport.bulk_rows import BulkEngineHost
from kvstore.transport.nixl_engine import NAME, NixlEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

SOCKET = "socket"
CHOICES = (SOCKET, NAME)


def engine_host(choice: str, tenants: Sequence[str]) -> BulkEngineHost | None:
    """A server's engine; None if bytes go over sockets alone. Takes 0.5 s. Raises ConfigError if it is not there."""
    return None if _checked(choice) == SOCKET else BulkEngineHost(NixlEngine(), tenants)


def engine_client(choice: str) -> BulkEngineClient | None:
    """A client's engine, likewise."""
    return None if _checked(choice) == SOCKET else BulkEngineClient(NixlEngine())


def _checked(choice: str) -> str:
    if choice not in CHOICES:
        raise ConfigError(f"bulk is {choice!r}, expected one of {', '.join(CHOICES)}")
    return choice
