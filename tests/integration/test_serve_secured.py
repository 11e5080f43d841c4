"""`kvstore serve` between hosts: TLS and tokens from settings, commands that show them, changes without a restart."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.cli import main
from kvstore.errors import UnauthenticatedError, UnavailableError
from kvstore.transport.access import hash_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("cryptography", reason="needs the extra certs")
from kvstore.certificates import make_certificates
from kvstore.testing.patience import ANSWER_SECONDS, wait_until
from kvstore.testing.securing import Keyring

LAYOUT = kvstore.KvLayout(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)
NAMESPACE = kvstore.Namespace(model="m", revision="r", layout=LAYOUT, tenant="team-a")
NAMED = ["--model", "m", "--revision", "r", "--tenant", "team-a"]
NAMED += ["--layout", "layers=2,kv_heads=1,head_dim=8,dtype=float32,block_tokens=4"]
TOKENS = list(range(40))


class Secured:
    """A sidecar that listens on all addresses of the machine, and what its clients need."""

    def __init__(self, keyring: Keyring, process: subprocess.Popen[str], ready: dict[str, object]) -> None:
        self.keyring = keyring
        self.process = process
        self.metrics = str(ready["metrics"])
        self.port = str(ready["listen"][0]).rpartition(":")[2]
        self.address = f"tls://localhost:{self.port}"
        self.tokens = {"admin": keyring.path("admin.token"), "engine": keyring.path("engine.token")}
        self.log: list[str] = []

    def flags(self, name: str = "admin") -> list[str]:
        return ["--address", self.address, "--tls-ca", self.keyring.ca, "--token-file", self.tokens[name]]

    def log_line(self, text: str) -> str:
        """The next line of the log that has `text`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if text in line:
                return line
        raise AssertionError(f"no line has {text!r}")

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics") as page:
            return page.read().decode()


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    keyring = Keyring(tmp_path / "keys")
    keyring.let_in("admin", "*", "admin")
    keyring.let_in("engine", "team-a", "write")
    return keyring


def command(*flags: str) -> list[str]:
    return [sys.executable, "-P", "-m", "kvstore.cli", "serve", "--host-bytes", "16MiB", *flags]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}


@pytest.fixture
def secured(keyring: Keyring) -> Iterator[Secured]:
    flags = ["--listen", "tls://0.0.0.0:0", "--metrics", "127.0.0.1:0", "--set", "log.level=debug"]
    flags += ["--tls-cert", keyring.path("server.pem"), "--tls-key", keyring.path("server.key")]
    flags += ["--tls-client-ca", keyring.ca, "--access-file", str(keyring.access_file)]
    with subprocess.Popen(
        command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            yield Secured(keyring, process, json.loads(line))
        finally:
            process.kill()


def test_commands_show_a_token_over_tls(secured: Secured, capsys: pytest.CaptureFixture[str]):
    assert 0 == main(["status", *secured.flags(), "--json"])
    assert {"serving": True, "lane": "wire"}.items() <= json.loads(capsys.readouterr().out).items()
    assert 0 == main(["flush", *secured.flags()])
    assert 1 == main(["flush", *secured.flags("engine")])
    assert "Flush needs the role admin, 'engine' has write" in capsys.readouterr().err
    assert 0 == main(["match", *map(str, TOKENS), *NAMED, *secured.flags("engine")])
    assert 1 == main(["stats", "--address", secured.address, "--tls-ca", secured.keyring.ca])
    assert "name the file that has yours" in capsys.readouterr().err
    assert 1 == main(["stats", "--address", f"127.0.0.1:{secured.port}", "--token-file", secured.tokens["admin"]])


def test_commands_take_what_they_show_from_the_settings(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("KVSTORE_ADDRESS", secured.address)
    monkeypatch.setenv("KVSTORE_CLIENT__TLS_CA", secured.keyring.ca)
    monkeypatch.setenv("KVSTORE_CLIENT__TOKEN_FILE", secured.tokens["admin"])
    assert 0 == main(["verify"])


def test_a_load_is_put_on_a_sidecar_over_tls(secured: Secured, capsys: pytest.CaptureFixture[str]):
    few = ["--clients", "1", "--seconds", "300ms", "--prompts", "2", "--prompt-tokens", "64"]
    assert 0 == main(["bench", "load", *few, *secured.flags(), "--json"])
    assert {} == json.loads(capsys.readouterr().out)["errors"]


def test_a_token_is_revoked_by_its_entry_and_a_new_one_let_in(secured: Secured):
    with kvstore.connect(secured.address, tls_ca=secured.keyring.ca, token_file=secured.tokens["engine"]) as engine:
        assert 0 == engine.match(NAMESPACE, TOKENS).blocks
        secured.keyring.keep_out("engine")
        secured.log_line("loaded again: what=access")

        def is_out() -> bool:
            try:
                engine.match(NAMESPACE, TOKENS)
            except UnauthenticatedError:
                return True
            return False

        wait_until(is_out)
        secured.keyring.let_in("engine", "team-a", "write")
        secured.log_line("loaded again: what=access")
        assert 0 == engine.match(NAMESPACE, TOKENS).blocks


def test_a_new_certificate_is_used_after_a_hangup_and_a_bad_one_is_not(secured: Secured, tmp_path: Path):
    renewed = tmp_path / "renewed"
    make_certificates(renewed, hosts=["localhost"], clients=[], days=1)

    def connects(ca: str) -> bool:
        try:
            with kvstore.connect(secured.address, tls_ca=ca, token_file=secured.tokens["admin"]) as client:
                return client.status().serving
        except (UnauthenticatedError, UnavailableError):
            return False

    assert (True, False) == (connects(secured.keyring.ca), connects(str(renewed / "ca.pem")))
    with kvstore.connect(secured.address, tls_ca=secured.keyring.ca, token_file=secured.tokens["admin"]) as before:
        session = before.stats()
        certificate = secured.keyring.folder / "server.pem"
        certificate.write_text("-----BEGIN CERTIFICATE-----\nno such thing\n")
        assert "what=tls cause=tls.cert" in secured.log_line("kept what was loaded before")
        assert connects(secured.keyring.ca)
        for name in ("server.key", "server.pem"):
            (renewed / name).replace(secured.keyring.folder / name)
        secured.process.send_signal(signal.SIGHUP)
        secured.log_line("loaded again: what=tls")
        wait_until(lambda: connects(str(renewed / "ca.pem")))
        assert not connects(secured.keyring.ca)
        assert session.namespaces == before.stats().namespaces  # who was connected stays so
    scraped = secured.scrape()
    assert 'kvstore_reloads_total{outcome="refused",what="tls"}' in scraped
    assert 'kvstore_reloads_total{outcome="ok",what="tls"}' in scraped


def test_no_secret_is_in_the_log_the_metrics_or_the_settings_shown(
    secured: Secured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    secrets = []
    for path in secured.tokens.values():
        with open(path) as file:
            secrets.append(file.read().strip())
    with open(secured.keyring.path("server.key")) as file:
        secrets.append("".join(file.read().splitlines()[1:-1]))
    forged = tmp_path / "forged"
    forged.touch(mode=0o600)
    forged.write_text("kvs_" + "C" * 43)
    for token_file in (*secured.tokens.values(), str(forged)):
        for address in (secured.address, f"grpc+{secured.address}"):
            with (
                contextlib.suppress(kvstore.KvstoreError),
                kvstore.connect(address, tls_ca=secured.keyring.ca, token_file=token_file) as client,
            ):
                client.stats()
                client.flush()
    scraped = secured.scrape()
    settings = [flag for key, value in secured.keyring.settings().items() for flag in ("--set", f"{key}={value}")]
    assert 0 == main(["config", "show", *settings])
    secured.process.send_signal(signal.SIGTERM)
    out, err = secured.process.communicate(timeout=ANSWER_SECONDS)
    shown = "".join((scraped, capsys.readouterr().out, out, err, *secured.log))
    hidden = [*secrets, "C" * 43, *map(hash_of, secrets[:2])]
    assert [] == [text for text in hidden if text in shown or text[8:30] in shown]
    assert 0 == secured.process.returncode


def test_what_is_not_safe_is_refused_in_one_line(keyring: Keyring):
    files = ["--tls-cert", keyring.path("server.pem"), "--tls-key", keyring.path("server.key")]
    done = subprocess.run(
        command("--listen", "tls://0.0.0.0:0", *files),
        capture_output=True, text=True, check=False, env=environment(), timeout=ANSWER_SECONDS,
    )  # fmt: skip
    assert (1, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
    assert "anybody could come in; set auth.file (`kvstore token new` makes an entry)" in done.stderr
