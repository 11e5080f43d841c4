"""`kvstore certs` and `kvstore token new`: files that a server takes as they are; no secret where it need not be."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.transport.access import hash_of, load_rules
from kvstore.transport.roles import Role

NEW = ["token", "new", "--name", 'engines "of" team ü', "--tenant", "team-a", "--role", "write"]


def test_a_token_and_its_entry_fit_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, out = tmp_path / "access.toml", tmp_path / "token"
    assert 0 == main([*NEW, "--access-file", str(file), "--out", str(out)])
    assert 0 == main(["token", "new", "--name", "b", "--tenant", "*", "--role", "admin", "--access-file", str(file)])
    assert [0o600, 0o600] == [stat.S_IMODE(path.stat().st_mode) for path in (file, out)]
    rules = load_rules(file)
    first, second = rules.by_token(out.read_text().strip()), rules.by_token(capsys.readouterr().out.strip())
    assert first is not None
    assert second is not None
    assert ('engines "of" team ü', "team-a", Role.WRITE) == (first.name, first.tenant, first.role)
    assert ("b", None, Role.ADMIN) == (second.name, second.tenant, second.role)
    assert out.read_text().strip() not in file.read_text()


def test_without_files_both_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert 0 == main([*NEW, "--days", "3"])
    token, entry = capsys.readouterr().out.split("\n\n")
    file = tmp_path / "access.toml"
    file.touch(mode=0o600)
    file.write_text(entry)
    found = load_rules(file).by_token(token)
    assert found is not None
    assert found.expires_at is not None


def test_a_token_that_is_written_to_a_file_is_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "token"
    assert 0 == main([*NEW, "--json", "--out", str(out)])
    told = json.loads(capsys.readouterr().out)
    assert {"name", "hash"} == set(told)
    assert hash_of(out.read_text().strip()) == told["hash"]


def test_nothing_is_overwritten_or_left_half_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, out = tmp_path / "access.toml", tmp_path / "token"
    out.write_text("precious")
    assert 1 == main([*NEW, "--access-file", str(file), "--out", str(out)])
    assert ("precious", False) == (out.read_text(), file.exists())
    out.unlink()
    assert 0 == main([*NEW, "--access-file", str(file)])
    before = file.read_text()
    assert 1 == main([*NEW, "--access-file", str(file), "--out", str(out)])
    assert "has the name" in capsys.readouterr().err
    assert (before, ["access.toml"]) == (file.read_text(), [path.name for path in tmp_path.iterdir()])


@pytest.mark.parametrize("flags", [["--days", "0"], ["--name", "a\nb"], ["--tenant", ""]])
def test_what_cannot_be_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]):
    assert 1 == main([*NEW, *flags])
    assert 1 == len(capsys.readouterr().err.splitlines())


def test_certificates_are_told_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("cryptography", reason="needs the extra certs")
    for made in (True, False):
        assert 0 == main(["certs", str(tmp_path / "pki"), "--host", "localhost, ::1", "--client", "", "--json"])
        files = json.loads(capsys.readouterr().out)["files"]
        expected = [(f"{stem}.{kind}", made) for stem in ("ca", "server") for kind in ("pem", "key")]
        assert expected == [(Path(file["path"]).name, file["made"]) for file in files]
