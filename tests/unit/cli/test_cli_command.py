"""The command line without a sidecar: parsing, exit codes, one-line errors, start time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvstore.cli import main
from kvstore.cli.output import print_table


def test_version_and_help_are_done(capsys):
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit) as ended:
            main([flag])
        assert 0 == ended.value.code
    assert "kvstore 0." in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["frobnicate"], ["config"], ["unpin"], ["unpin", "x"], ["match", "--ttl", "1"]])
def test_a_wrong_command_line_is_usage(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert 2 == ended.value.code
    assert "usage: kvstore" in capsys.readouterr().err


def test_config_show_names_the_origin_of_each_value(capsys, monkeypatch):
    monkeypatch.setenv("KVSTORE_LOG__LEVEL", "error")

    assert 0 == main(["config", "show", "--json", "--set", "tiers.host.capacity_bytes=64MiB"])

    shown = json.loads(capsys.readouterr().out)
    assert {"value": "64MiB", "origin": "flag"} == shown["tiers.host.capacity_bytes"]
    assert {"value": "error", "origin": "environment"} == shown["log.level"]
    assert "default" == shown["log.format"]["origin"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_config_show_shows_no_password(capsys, form):
    for password in ("secret", "secret@:/secret"):
        assert 0 == main(["config", "show", *form, "--set", f"cluster.directory=valkey://me:{password}@cache:6379"])
        out = capsys.readouterr().out
        assert "valkey://me:***@cache:6379" in out
        assert "secret@" not in out


def test_config_show_aligns_its_columns(capsys):
    assert 0 == main(["config", "show"])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["setting", "value", "origin"]
    assert {lines[0].index("origin")} == {line.rindex(" ") + 1 for line in lines if line.endswith("default")}


def test_config_check_accepts_a_right_file(tmp_path, capsys):
    file = tmp_path / "kvstore.toml"
    file.write_text('[log]\nlevel = "debug"\n')

    assert 0 == main(["config", "check", str(file)])
    assert "1 settings" in capsys.readouterr().out
    assert 0 == main(["config", "check", str(file), "--json"])
    assert {"right": True, "settings": 1} == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[log\n", ":1: "),
        ('[log]\nlevl = "debug"\n', "nearest one is 'log.level'"),
        ("data_dir = 3\n", "data_dir is 3"),
        ('data_dir = "a\\u0000b"\n', "without NUL"),
        (f"data_dir = {'9' * 5000}\n", "settings file"),
        (f"data_dir = {'[' * 5000}\n", "settings file"),
        ("server.listen = []\n", "server.listen is empty"),
        ('server.listen = ["garbage"]\n', "'garbage' is not host:port"),
        ('data_dir = "d"\ntiers.disk.capacity_bytes = 5\n', "expected at least 1MiB, or 0"),
    ],
)
def test_config_check_says_what_is_wrong_in_one_line(tmp_path, capsys, text, expected):
    file = tmp_path / "kvstore.toml"
    file.write_text(text)

    assert 1 == main(["config", "check", str(file)])

    error = capsys.readouterr().err
    assert error.startswith("kvstore config check: ")
    assert expected in error
    assert 1 == len(error.splitlines())


@pytest.mark.parametrize("pair", ["log.level", "=3", "log.levels=3"])
def test_a_wrong_assignment_is_one_line(capsys, pair):
    assert 1 == main(["config", "show", "--set", pair])
    assert 1 == len(capsys.readouterr().err.splitlines())


def test_numbers_are_right_aligned(capsys):
    print_table(("tier", "blocks"), [("host", 5), ("disk", 1234)])

    assert ["tier  blocks", "host       5", "disk    1234"] == capsys.readouterr().out.splitlines()


def test_help_needs_no_heavy_import():
    heavy = ("numpy", "grpc", "torch", "lmdb", "prometheus_client", "uvloop", "asyncio")
    code = (
        "import sys\n"
        "from kvstore.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print(sorted(set({heavy}) & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)

    assert "[]" == done.stdout.splitlines()[-1]


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvstore.cli", "--version"], capture_output=True, text=True, check=True
    )

    assert done.stdout.startswith("kvstore ")


def test_a_reader_that_leaves_early_is_no_stack_trace():
    code = "from kvstore.cli import main; import sys; sys.exit(main(['config', 'show']))"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        command.stdout.close()
        error = command.stderr.read()

    assert 1 == command.returncode
    assert "" == error


@pytest.mark.parametrize("target", [" > /dev/full", " >&-"])
def test_output_that_cannot_be_written_is_one_line(target):
    command = f"{sys.executable} -P -m kvstore.cli config show{target}"

    ended = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)

    assert 1 == ended.returncode
    assert ended.stderr.startswith("kvstore config show: ")
    assert 1 == len(ended.stderr.splitlines())
