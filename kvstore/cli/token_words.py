"""Token ids and digests as words of the command line. Apart from prompt.py, so that parsing loads no numpy."""

from __future__ import annotations

import re


def token_of(word: str) -> int | bytes:
    """A token id, or a digest as 64 hexadecimal digits. Raises ValueError for what is neither."""
    if re.fullmatch(r"[0-9a-fA-F]{64}", word, re.ASCII):
        return bytes.fromhex(word)
    if re.fullmatch(r"-?\d{1,20}", word, re.ASCII):
        return int(word)
    raise ValueError(f"{word[:40]!r} is no token id, expected whole numbers, or digests of 64 hexadecimal digits")
