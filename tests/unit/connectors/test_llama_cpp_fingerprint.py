"""Digests of GGUF files: by content, remembered while the files are as they were."""

from __future__ import annotations

import os

import pytest

from kvstore.connectors import llama_cpp_fingerprint
from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.llama_cpp_fingerprint import KEPT_DIGESTS_MAX, gguf_digest, model_files, text_digest


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(3 << 20))
    return path


@pytest.fixture
def kept_in(tmp_path):
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def reads(monkeypatch):
    """The files that were read in full."""
    content, files = llama_cpp_fingerprint._content, []
    monkeypatch.setattr(llama_cpp_fingerprint, "_content", lambda file: files.append(file.name) or content(file))
    return files


def test_a_digest_is_that_of_the_content(model, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(model.read_bytes())
    assert gguf_digest(model, None) == gguf_digest(other, None)
    other.write_bytes(model.read_bytes()[:-1] + b"\1")
    assert gguf_digest(model, None) != gguf_digest(other, None)


def test_a_file_is_read_once(model, kept_in, reads):
    assert gguf_digest(model, kept_in) == gguf_digest(model, kept_in) == gguf_digest(model, None)
    assert ["model.gguf"] * 2 == reads


def test_a_file_of_the_same_size_and_time_is_read_again_when_it_was_written(model, kept_in, reads):
    before, stat = gguf_digest(model, kept_in), model.stat()
    model.write_bytes(b"GGUF" + bytes((3 << 20) - 1) + b"\1")
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert before != gguf_digest(model, kept_in)
    assert 2 == len(reads)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"[1, 2]", b'{"x": 1}'])
def test_a_damaged_file_of_digests_is_done_without(damage, model, kept_in, reads):
    kept_in.parent.mkdir()
    kept_in.write_bytes(damage)
    assert gguf_digest(model, kept_in) == gguf_digest(model, kept_in)
    assert 1 == len(reads)


def test_a_folder_that_cannot_be_written_is_done_without(model, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert gguf_digest(model, None) == gguf_digest(model, blocked / "digests.json")


def test_only_so_many_digests_are_remembered(tmp_path, kept_in):
    for number in range(KEPT_DIGESTS_MAX + 3):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(bytes([number % 256]))
        gguf_digest(path, kept_in)
    assert KEPT_DIGESTS_MAX == len(llama_cpp_fingerprint._read(kept_in))


def test_all_parts_of_a_split_model_count(tmp_path):
    parts = [tmp_path / f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for number, part in enumerate(parts):
        part.write_bytes(bytes([number]))
    assert parts == model_files(parts[0])
    before = gguf_digest(parts[0], None)
    parts[2].write_bytes(b"changed")
    assert before != gguf_digest(parts[0], None)
    parts[1].unlink()
    with pytest.raises(UnsupportedModelError, match="big-00002-of-00003"):
        gguf_digest(parts[0], None)


def test_texts_are_told_apart_by_their_lengths():
    assert text_digest(["ab", "c"]) != text_digest(["a", "bc"])
