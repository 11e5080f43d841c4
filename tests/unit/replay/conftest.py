from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Writes records (or raw texts) as JSON lines into a file; gzipped where the name says so."""

    def write(*lines: object, name: str = "trace.jsonl") -> Path:
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


@pytest.fixture
def chats() -> list[dict[str, object]]:
    """A small trace with blocks of 4 tokens: conversations of one system prompt that grow turn by turn."""
    generator = np.random.default_rng(1)
    histories: list[list[int]] = [[0, 1] for _ in range(12)]
    next_id = 2
    records: list[dict[str, object]] = []
    for at in range(120):
        history = histories[int(generator.integers(len(histories)))]
        added = int(generator.integers(1, 5))
        history += range(next_id, next_id + added)
        next_id += added
        tokens = 4 * len(history) + int(generator.integers(4))
        records.append({"timestamp": 100 * at, "input_length": tokens, "output_length": 1, "hash_ids": [*history]})
    return records
