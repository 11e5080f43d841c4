"""A development CA: what it makes is believed, for what it says and nothing else, and is made once."""

from __future__ import annotations

import os
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import ConfigError

pytest.importorskip("cryptography", reason="needs the extra certs")
from kvstore.certificates import make_certificates


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "new" / "folder"
    make_certificates(folder, hosts=["localhost", "127.0.0.1", "::1"], clients=["a", "b.example"], days=2)
    return folder


def modes(folder: Path) -> dict[str, str]:
    return {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.iterdir()}


def test_keys_and_the_folder_are_for_their_owner_alone(made: Path):
    stems = ("ca", "server", "client-a", "client-b.example")
    expected = {f"{stem}.key": "0o600" for stem in stems} | {f"{stem}.pem": "0o644" for stem in stems}
    assert (expected, 0o700) == (modes(made), stat.S_IMODE(made.stat().st_mode))


def test_a_second_run_adds_what_is_missing_and_changes_nothing(made: Path):
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    files = make_certificates(made, hosts=["other"], clients=["a", "new"], days=9)
    assert ["client-new.pem", "client-new.key"] == [file.path.name for file in files if file.made]
    assert before == {name: (made / name).read_bytes() for name in before}


def test_half_a_pair_is_left_for_its_owner_to_decide(tmp_path: Path):
    make_certificates(tmp_path, hosts=["localhost"], clients=[], days=1)
    (tmp_path / "server.key").unlink()
    with pytest.raises(ConfigError, match=r"server\.pem is there and .*server\.key is not: put it back, or remove"):
        make_certificates(tmp_path, hosts=["localhost"], clients=[], days=1)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"hosts": ["a b"]}, "'a b' cannot be in a certificate"),
        ({"hosts": []}, "0 hosts, 1 days"),
        ({"clients": ["../../etc/passwd"]}, "cannot be in a certificate"),
        ({"clients": ["/"]}, "cannot be in a certificate"),
        ({"clients": ["::1"]}, "cannot be in a certificate"),
        ({"days": 0}, "0 days: expected"),
        ({"days": 100_000}, "100000 days: expected"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path: Path, named: dict, told: str):
    with pytest.raises(ConfigError, match=told):
        make_certificates(tmp_path / "new", **{"hosts": ["localhost"], "clients": [], "days": 1, **named})
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        make_certificates(tmp_path / "file", hosts=["localhost"], clients=[], days=1)


def handshake(made: Path, server: str, client: str, host: str) -> str:
    """The name that the server has of the client, once each believes the other."""
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=made / "ca.pem")
    server_context.verify_mode = ssl.CERT_REQUIRED
    server_context.load_cert_chain(made / f"{server}.pem", made / f"{server}.key")
    client_context = ssl.create_default_context(cafile=made / "ca.pem")
    client_context.load_cert_chain(made / f"{client}.pem", made / f"{client}.key")
    pipes = [ssl.MemoryBIO(), ssl.MemoryBIO()]
    ends = [
        client_context.wrap_bio(pipes[0], pipes[1], server_hostname=host),
        server_context.wrap_bio(pipes[1], pipes[0], server_side=True),
    ]
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[1].getpeercert()["subjectAltName"][0][1]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_both_sides_are_believed_by_their_names(made: Path, host: str):
    assert ["a", "b.example"] == [handshake(made, "server", f"client-{name}", host) for name in ("a", "b.example")]


@pytest.mark.parametrize(
    ("server", "client", "host"),
    [
        ("server", "client-a", "127.0.0.2"),
        ("server", "client-a", "evil.example"),
        ("client-a", "client-a", "a"),
        ("server", "server", "localhost"),
        ("ca", "client-a", "localhost"),
        ("server", "ca", "localhost"),
    ],
    ids=[
        "another address",
        "another host",
        "a client as a server",
        "a server as a client",
        "the CA as one",
        "or other",
    ],
)
def test_a_certificate_is_good_for_nothing_else(made: Path, server: str, client: str, host: str):
    with pytest.raises(ssl.SSLError):
        handshake(made, server, client, host)


def test_without_the_package_it_says_what_to_install(tmp_path: Path):
    program = (
        "import sys; sys.modules['cryptography'] = None; from kvstore.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "certs", str(tmp_path / "new")],
        capture_output=True, text=True, check=False, env=dict(os.environ, PYTHONSAFEPATH="1"),
    )  # fmt: skip
    assert (1, "") == (done.returncode, done.stdout)
    assert (
        "kvstore certs: this needs cryptography, which is not installed: pip install 'prefix-kvstore[certs]'"
        in done.stderr
    )
