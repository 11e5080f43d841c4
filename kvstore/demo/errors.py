"""What can go wrong in the demo, told in one line."""

from __future__ import annotations

from kvstore.errors import KvstoreError


class DemoError(KvstoreError):
    """The demo cannot run on this machine, or a process of it failed."""
