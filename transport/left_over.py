"""What a killed server leaves behind beside its sockets: folders in which one was about to be bound."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_AGE_SECONDS_MIN = 60.0  # binding takes some ms: an older folder is nobody's


def sweep_beside(fresh: Path, prefix: str, socket_name: str) -> None:
    """Remove folders named `prefix`* beside the folder `fresh`, made just now, that an earlier server left there.

    Those are our user's, older by a minute, and hold nothing but a socket of that name. Anything else stays, and what
    cannot be removed does too.
    """
    with suppress(OSError):
        now = fresh.stat().st_mtime  # by the clock of that file system
        for folder in [Path(entry.path) for entry in os.scandir(fresh.parent) if entry.name.startswith(prefix)]:
            _remove_if_left_over(folder, socket_name, now - _AGE_SECONDS_MIN)


def _remove_if_left_over(folder: Path, socket_name: str, newest: float) -> None:
    with suppress(OSError):  # no folder, somebody else's, or gone meanwhile
        state = folder.lstat()
        if state.st_uid == os.geteuid() and state.st_mtime < newest and set(os.listdir(folder)) <= {socket_name}:
            (folder / socket_name).unlink(missing_ok=True)
            folder.rmdir()
