"""The one table between kvstore's errors and gRPC statuses.

The code is for any client; ours restores the exact class from the trailing metadata. A miss is OK, never NOT_FOUND.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from kvstore import errors

if TYPE_CHECKING:
    from collections.abc import Iterable

ERROR_KEY = "kvstore-error"
RETRY_KEY = "retry-after-ms"
RETRY_AFTER_MS = 1000
DETAILS_CHARS_MAX = 1000

_CODES: dict[type[errors.KvstoreError], grpc.StatusCode] = {
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidTokensError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidLayoutError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidNamespaceError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidBufferError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.EngineEventsError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.LayoutMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.NoSpaceError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.BulkEngineError: grpc.StatusCode.UNAVAILABLE,
    errors.DirectoryUnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.NodeNameTakenError: grpc.StatusCode.ALREADY_EXISTS,
    errors.ClosedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StorageError: grpc.StatusCode.INTERNAL,
    errors.DirectoryLockedError: grpc.StatusCode.INTERNAL,
    errors.StorageFormatError: grpc.StatusCode.INTERNAL,
    errors.KvstoreError: grpc.StatusCode.UNKNOWN,
}
_CLASSES = {kind.__name__: kind for kind in _CODES}

# For servers, or proxies, that send no class name. Everything else is a server that cannot be used.
_BARE_CODES: dict[grpc.StatusCode, type[errors.KvstoreError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgumentError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.ClosedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.NoSpaceError,
}


class UnknownSessionError(errors.UnavailableError):
    """The server does not know the session (any more): open another one. Inside the transport only."""


def status_of(error: errors.KvstoreError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Code, details and trailing metadata that stand for `error`."""
    details = str(error)[:DETAILS_CHARS_MAX]
    if isinstance(error, UnknownSessionError):
        return grpc.StatusCode.UNAUTHENTICATED, details, ()
    kind = next(base for base in type(error).__mro__ if base in _CODES)
    metadata = [(ERROR_KEY, kind.__name__)]
    if isinstance(error, errors.NoSpaceError):
        seconds = error.retry_after_seconds
        metadata.append((RETRY_KEY, str(RETRY_AFTER_MS if seconds is None else max(1, round(seconds * 1000)))))
    return _CODES[kind], details, tuple(metadata)


def error_of(
    code: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, Any]], address: str
) -> errors.KvstoreError:
    """The error that a failed call to `address` stands for."""
    named = dict(metadata)
    kind = _CLASSES.get(named.get(ERROR_KEY, ""))
    if kind is not None:
        return _with_retry(kind(details), named.get(RETRY_KEY, ""))
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return UnknownSessionError(f"{address} has ended this session: {details}")
    if code in _BARE_CODES:
        return _BARE_CODES[code](details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.UnavailableError(f"no answer from {address} within the deadline")
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.UnavailableError(f"cannot reach {address} ({details}); is `kvstore serve` running there?")
    return errors.UnavailableError(f"{address} failed with {code.name}: {details}; see its log")


def _with_retry(error: errors.KvstoreError, milliseconds: object) -> errors.KvstoreError:
    if isinstance(error, errors.NoSpaceError) and isinstance(milliseconds, str) and milliseconds.isdecimal():
        error.retry_after_seconds = int(milliseconds) / 1000
    return error
