"""Content digests of GGUF files, kept beside the user's other caches, since a large model takes long to read.

A file is read again when its size, inode or times changed. Imports no llama_cpp.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from kvstore.connectors.common import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterable

KEPT_DIGESTS_MAX = 256
# The names of a model in several files, and how many files it has (llama.cpp: llama_split_path).
_SPLIT = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_STEP_BYTES = 1 << 20  # short enough to hold up nobody who wants the interpreter


def default_digest_file() -> Path | None:
    """Where digests are kept unless another file is named; nowhere for a user without a home."""
    try:
        return Path.home() / ".cache" / "kvstore" / "gguf-digests.json"
    except RuntimeError:
        return None


def model_files(path: Path) -> list[Path]:
    """All files of the model that `path` begins; raises UnsupportedModelError where one is missing."""
    split = _SPLIT.match(path.name)
    files = [path]
    if split is not None:
        count = int(split["count"])
        files = [path.with_name(f"{split['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise UnsupportedModelError(f"there is no file {file}; expected a GGUF file, or all parts of a split one")
    return files


def gguf_digest(path: Path, kept_in: Path | None) -> str:
    """The digest of all bytes of a model, taken from `kept_in` where its files are as they were when it was made.

    Reads every byte otherwise, at about 2 GB/s from memory. A file of digests that cannot be read or written is done
    without.
    """
    digests = [_kept_digest(file.resolve(), kept_in) for file in model_files(path)]
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16, person=b"kvstore.gguf").hexdigest()


def text_digest(texts: Iterable[str]) -> str:
    """One digest of some texts, which are told apart by their lengths."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvstore.gguf.txt")
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _kept_digest(file: Path, kept_in: Path | None) -> str:
    stat = file.stat()
    signature = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
    kept = {} if kept_in is None else _read(kept_in)
    known = kept.get(str(file))
    if isinstance(known, list) and known[:-1] == signature and isinstance(known[-1], str):
        return known[-1]
    digest = _content(file)
    if kept_in is not None:
        kept.pop(str(file), None)
        latest = dict(list(kept.items())[1 - KEPT_DIGESTS_MAX :])
        _write(kept_in, latest | {str(file): [*signature, digest]})
    return digest


def _read(kept_in: Path) -> dict[str, object]:
    try:
        kept = json.loads(kept_in.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _write(kept_in: Path, kept: dict[str, object]) -> None:
    """Put the file in place as a whole, so that two processes at a time leave one of their files."""
    made = kept_in.with_name(f"{kept_in.name}.{os.getpid()}")
    try:
        kept_in.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(kept), encoding="utf-8")
        made.replace(kept_in)
    except OSError:
        with suppress(OSError):
            made.unlink(missing_ok=True)


def _content(file: Path) -> str:
    digest = xxhash.xxh3_128()
    buffer = bytearray(_STEP_BYTES)
    with file.open("rb", buffering=0) as opened, memoryview(buffer) as view:
        while count := opened.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
