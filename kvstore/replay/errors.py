"""What can be wrong with a trace or with what is asked of it."""

from __future__ import annotations

from kvstore.errors import InvalidArgumentError


class TraceError(InvalidArgumentError):
    """The trace cannot be read, or one of its lines is malformed: the text names file and line."""


class MissingExtraError(InvalidArgumentError):
    """What was asked for needs an optional package that is not installed."""
