from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.codecs.keys import FileKeys

A, B = "aa" * 32, "bb" * 32


def key_file(path: Path, content: str, mode: int = 0o600) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


def test_the_first_key_writes_and_all_of_them_read(tmp_path: Path) -> None:
    keys = FileKeys(key_file(tmp_path / "keys", f"# newest first\n\nnew {A}\nold-1 {B}\n"))
    assert (b"new".ljust(8, b"\0"), bytes.fromhex(A)) == (keys.current().key_id, keys.current().secret)
    old = keys.find(b"old-1".ljust(8, b"\0"))
    assert old is not None
    assert bytes.fromhex(B) == old.secret
    assert keys.find(b"gone".ljust(8, b"\0")) is None


def test_what_a_key_wrote_may_be_given_up(tmp_path: Path) -> None:
    keys = FileKeys(key_file(tmp_path / "keys", f"new {A}\nold dropped\n"))
    names = [name.ljust(8, b"\0") for name in (b"new", b"old", b"other")]
    assert [False, True, False] == [keys.is_dropped(name) for name in names]
    assert [True, False, False] == [keys.find(name) is not None for name in names]


def test_no_key_is_ever_shown(tmp_path: Path) -> None:
    keys = FileKeys(key_file(tmp_path / "keys", f"new {A}\n"))
    assert A not in repr(keys.current())
    assert str(bytes.fromhex(A)) not in repr(keys.current())


@pytest.mark.parametrize(
    ("content", "mode", "complaint"),
    [
        (f"new {A}\n", 0o640, "has mode 0640, expected a file that only its owner may read; chmod 600 it"),
        (f"new {A}\n", 0o604, "has mode 0604"),
        ("", 0o600, "has no key"),
        ("# none\n", 0o600, "has no key"),
        ("new\n", 0o600, "line 1: expected a name"),
        (f"new {A[:-1]}\n", 0o600, "line 1: expected a name"),
        (f"new {'zz' * 32}\n", 0o600, "line 1: the key is not written in hexadecimal digits"),
        (f"ok {B}\nmuch-too-long {A}\n", 0o600, "line 2: expected a name"),
        (f"a!b {A}\n", 0o600, "line 1: expected a name"),
        (f"new {A}\nnew {B}\n", 0o600, "line 2: key new is there twice"),
        (f"new {A}\nnew dropped\n", 0o600, "line 2: key new is there twice"),
        ("old dropped\n", 0o600, "has no key"),
        ("#" * 70_000, 0o600, "has more than 65536 bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, content: str, mode: int, complaint: str
) -> None:
    path = key_file(tmp_path / "keys", content, mode)
    with pytest.raises(ConfigError, match="keys") as refused:
        FileKeys(path)
    assert complaint in str(refused.value)
    assert A not in str(refused.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            FileKeys(path)


def test_a_file_that_changes_is_read_again_and_a_bad_one_left_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = key_file(tmp_path / "keys", f"old {B}\n")
    keys = FileKeys(path)
    os.replace(key_file(tmp_path / "next", f"new {A}\nold {B}\n"), path)
    assert b"new".ljust(8, b"\0") == keys.current().key_id
    os.replace(key_file(tmp_path / "next", "nonsense\n"), path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert b"new".ljust(8, b"\0") == keys.current().key_id
    assert 1 == len(caplog.records)
    with pytest.raises(ConfigError):
        keys.reload()
    path.unlink()
    assert keys.find(b"old".ljust(8, b"\0")) is not None
