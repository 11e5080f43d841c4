"""kvstore: a prefix-aware KV-cache tiering service for LLM inference.

`open()` gives a store embedded in this process, `connect()` the same interface (kvstore.api.KvStore) against a
sidecar, `connect_async()` its methods as awaitables. Importing this package imports neither torch nor grpc.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvstore.errors import (
    ClosedError,
    ConfigError,
    DirectoryLockedError,
    InvalidArgumentError,
    InvalidBufferError,
    InvalidLayoutError,
    InvalidNamespaceError,
    InvalidTokensError,
    KvstoreError,
    LayoutMismatchError,
    NoSpaceError,
    PermissionDeniedError,
    StorageError,
    StorageFormatError,
    UnauthenticatedError,
    UnavailableError,
)
from kvstore.layer_groups import Recurrent, SequenceState, SlidingWindow
from kvstore.stats import StoreStats, TierStats
from kvstore.types import CommitResult, KvLayout, LoadResult, Namespace, Pin, PrefixMatch, Root, Tier, Verification

if TYPE_CHECKING:
    from kvstore.api import KvStore, Lease, Stage, StateLease, StateStage
    from kvstore.store import open_store as open  # noqa: A004
    from kvstore.transport.aio import connect_async
    from kvstore.transport.client import connect

__version__ = "0.1.0"

__all__ = [
    "ClosedError",
    "CommitResult",
    "ConfigError",
    "DirectoryLockedError",
    "InvalidArgumentError",
    "InvalidBufferError",
    "InvalidLayoutError",
    "InvalidNamespaceError",
    "InvalidTokensError",
    "KvLayout",
    "KvStore",
    "KvstoreError",
    "LayoutMismatchError",
    "Lease",
    "LoadResult",
    "Namespace",
    "NoSpaceError",
    "PermissionDeniedError",
    "Pin",
    "PrefixMatch",
    "Recurrent",
    "Root",
    "SequenceState",
    "SlidingWindow",
    "Stage",
    "StateLease",
    "StateStage",
    "StorageError",
    "StorageFormatError",
    "StoreStats",
    "Tier",
    "TierStats",
    "UnauthenticatedError",
    "UnavailableError",
    "Verification",
    "connect",
    "connect_async",
    "open",
]

_LAZY = {
    "KvStore": ("kvstore.api", "KvStore"),
    "Lease": ("kvstore.api", "Lease"),
    "Stage": ("kvstore.api", "Stage"),
    "StateLease": ("kvstore.api", "StateLease"),
    "StateStage": ("kvstore.api", "StateStage"),
    "connect": ("kvstore.transport.client", "connect"),
    "connect_async": ("kvstore.transport.aio", "connect_async"),
    "open": ("kvstore.store", "open_store"),
}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:  # noqa: ANN401  # the type of a lazily imported name is not known here
    if name not in _LAZY:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    import importlib

    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)
