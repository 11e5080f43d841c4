"""Fingerprints of what engines load from folders: model weights and adapters. Two folders never share one by chance."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import xxhash

from kvstore.connectors.common import UnsupportedModelError

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_CONFIG_FILES = frozenset({"config.json", "params.json", "hf_quant_config.json", "quantize_config.json"})
_ADAPTER_FILES = frozenset({"adapter_config.json", "new_embeddings.safetensors"})
_ADAPTERS_MAX = 1024
_STEP_BYTES = 1 << 20  # short enough to hold up nobody who wants the interpreter

# Name, size, time and inode of each file: what tells that a folder is still as it was read.
_Signature = tuple[tuple[str, int, int, int], ...]


def model_fingerprint(path: str, detail: str) -> str:
    """A digest of all weight and configuration files under `path`, and of `detail`, which tells how they are loaded.

    Reads every byte once: about 2 GB/s from memory, where the engine's own loading has just brought it. Raises
    UnsupportedModelError where there are no weights to read.
    """
    files = _files(path, _CONFIG_FILES, WEIGHT_SUFFIXES)
    if not any(file.suffix in WEIGHT_SUFFIXES for file in files):
        raise UnsupportedModelError(
            f"there are no weights at {path!r} to take a fingerprint of; give the checkpoint's revision in the setting "
            '"revision"'
        )
    return _digest(files, b"kvstore.vllm.mdl", detail)


def has_weights(path: str) -> bool:
    """Whether there are files of weights under `path`."""
    return any(file.suffix in WEIGHT_SUFFIXES for file in _files(path, _CONFIG_FILES, WEIGHT_SUFFIXES))


def read_config(folder: Path) -> dict[str, Any]:
    """The table in config.json of a model's folder; raises ValueError, in a line, where there is none that can be."""
    file = folder / "config.json"
    if not file.is_file():
        found = "config.json in that folder" if folder.is_dir() else "such folder"
        raise ValueError(f"there is no {found}; expected a folder with a model")
    try:
        return require_table(json.loads(file.read_text(encoding="utf-8")), "config.json")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config.json is no JSON: {error}") from error


def require_table(value: object, name: str) -> dict[str, Any]:
    """A table of a configuration; raises ValueError for anything else."""
    if not isinstance(value, dict):
        found = "a list" if isinstance(value, list) else f"{value!r:.80}"
        raise ValueError(f"{name} is {found}, expected a table")
    return value


class AdapterDigests:
    """Content digests of adapter folders, read again only when their files changed. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[_Signature, str]] = {}

    def digest(self, path: str) -> str:
        """The digest of the adapter at `path`; raises UnsupportedModelError where there is none."""
        files = _files(path, _ADAPTER_FILES, WEIGHT_SUFFIXES)
        if not any(file.suffix in WEIGHT_SUFFIXES for file in files):
            raise UnsupportedModelError(f"there is no adapter at {path!r} to take a digest of")
        signature = _signature(files)
        with self._lock:
            known = self._known.get(path)
        if known is not None and known[0] == signature:
            return known[1]
        digest = _digest(files, b"kvstore.vllm.ada", "")
        with self._lock:
            if len(self._known) >= _ADAPTERS_MAX:
                self._known.clear()
            self._known[path] = (signature, digest)
        return digest


def _files(path: str, names: frozenset[str], suffixes: frozenset[str]) -> list[Path]:
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        return []
    return sorted(file for file in root.iterdir() if file.name in names or file.suffix in suffixes)


def _signature(files: list[Path]) -> _Signature:
    found = [(file, file.stat()) for file in files]
    return tuple((file.name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for file, stat in found)


def _digest(files: list[Path], person: bytes, detail: str) -> str:
    digest = hashlib.blake2b(detail.encode(), digest_size=16, person=person)
    for file in files:
        digest.update(f"\n{file.name} {file.stat().st_size} {_content(file)}".encode())
    return digest.hexdigest()


def _content(file: Path) -> str:
    digest = xxhash.xxh3_128()
    buffer = bytearray(_STEP_BYTES)
    with file.open("rb", buffering=0) as opened, memoryview(buffer) as view:
        while count := opened.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
