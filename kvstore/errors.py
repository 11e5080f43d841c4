"""Every exception that kvstore raises for a reason outside its own code.

    KvstoreError
      InvalidArgumentError (also a ValueError)   what the caller handed over cannot be right
        InvalidTokensError                       token ids out of range, or not a flat integer sequence
        InvalidLayoutError                       a KvLayout whose fields contradict each other
        InvalidNamespaceError                    a Namespace or Root with a missing or oversize field
        InvalidBufferError                       a buffer of the wrong shape, size, or not writable
        ConfigError                              a setting that is unknown, malformed or out of range
        EngineEventsError                        what an engine published is no batch of KV events
      LayoutMismatchError                        the other side holds this namespace under another layout
      PermissionDeniedError                      the caller may not do this, or did not prove a namespace's secret
      UnauthenticatedError                       who calls is not known: no token, or a wrong, expired or revoked one
      NoSpaceError                               a tier, lease or stage limit is reached and nothing may go
      UnavailableError                           the sidecar cannot be reached, is stopping, or was too slow
        BulkEngineError                          an engine for remote memory could not move bytes; sockets still can
      DirectoryUnavailableError                  the cluster's directory does not answer; the node itself serves on
      NodeNameTakenError                         a living node of the cluster has this node's name
      ClosedError                                a store, lease or stage was used after its end
      StorageError                               the data directory cannot be used
        DirectoryLockedError                     another process holds it
        StorageFormatError                       written by a newer version, or by something else

A miss is no error: it is a match of 0 blocks, or a load of fewer blocks than were asked for.
Asserts in the code state our own invariants and are not part of this tree.
"""

from __future__ import annotations


class KvstoreError(Exception):
    """Root of all errors that kvstore raises on purpose."""


class InvalidArgumentError(KvstoreError, ValueError):
    """The caller handed over something that cannot be right; nothing was changed."""


class InvalidTokensError(InvalidArgumentError):
    """Token ids must be a flat sequence of integers in 0..2^32-1."""


class InvalidLayoutError(InvalidArgumentError):
    """The fields of a KvLayout contradict each other."""


class InvalidNamespaceError(InvalidArgumentError):
    """A field of a Namespace or Root is missing, empty or too long."""


class InvalidBufferError(InvalidArgumentError):
    """A buffer has the wrong shape or size, is not contiguous, or cannot be written."""


class ConfigError(InvalidArgumentError):
    """A setting is unknown, malformed or out of range."""


class EngineEventsError(InvalidArgumentError):
    """What an engine published is no batch of KV events; nothing of it counts."""


class LayoutMismatchError(KvstoreError):
    """The other side holds this namespace under another layout."""


class PermissionDeniedError(KvstoreError):
    """The caller's role or tenant does not allow this, or the secret of the namespace was not proven."""


class UnauthenticatedError(KvstoreError):
    """Who calls is not known: there is no token or certificate, or one that is wrong, expired, revoked or untrusted."""


class NoSpaceError(KvstoreError):
    """A limit is reached and nothing may be evicted for this request; try later or raise the limit.

    `retry_after_seconds` is when it may go better, where that is known.
    """

    retry_after_seconds: float | None = None


class UnavailableError(KvstoreError):
    """The sidecar cannot be reached, is stopping, or did not answer within the deadline."""


class BulkEngineError(UnavailableError):
    """An engine for remote memory access could not move bytes; the same bytes can still go over sockets."""


class DirectoryUnavailableError(KvstoreError):
    """The cluster's directory cannot be reached or did not answer in time; the node itself serves on."""


class NodeNameTakenError(KvstoreError):
    """Another living node of the cluster goes by the name that this one was given."""


class ClosedError(KvstoreError):
    """A store, lease or stage was used after its end."""


class StorageError(KvstoreError):
    """The data directory cannot be used: not writable, no space, or not ours."""


class DirectoryLockedError(StorageError):
    """Another process has the data directory open."""


class StorageFormatError(StorageError):
    """The data directory was written by a newer version of kvstore, or by something else."""
