"""Tokens of an issuer: the good one is taken, and every way to forge one that is known is not."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError, UnauthenticatedError
from kvstore.testing.manual_clock import ManualClock
from kvstore.transport.jwt_keys import ALGORITHMS, JwtKeys, JwtRules
from kvstore.transport.roles import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

jwt = pytest.importorskip("jwt", reason="needs the extra jwt")
pytest.importorskip("cryptography", reason="needs the extra jwt")
from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: E402

FAR = 4_000_000_000  # PyJWT asks the machine's own clock
PAST = 1_000_000_000
CLAIMS = {"iss": "https://issuer", "aud": "kvstore", "sub": "engine 7", "exp": FAR, "tenant": "team", "role": "write"}
RULES = JwtRules(
    issuer="https://issuer",
    audience="kvstore",
    algorithms=("RS256", "ES256", "EdDSA"),
    tenant_claim="tenant",
    role_claim="role",
    leeway_seconds=30.0,
)
KEYS: dict[str, Any] = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}
STRANGER = ec.generate_private_key(ec.SECP256R1())


def public(algorithm: str, key: Any, kid: str) -> dict[str, Any]:
    """A key as its issuer publishes it."""
    maker = jwt.get_algorithm_by_name(algorithm)
    return {**maker.to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig"}


def key_set(*entries: dict[str, Any]) -> str:
    return json.dumps({"keys": list(entries)})


PUBLISHED = [public(algorithm, key, f"key of {algorithm}") for algorithm, key in KEYS.items()]


def signed(algorithm: str = "ES256", key: Any = None, kid: str | None = "", **changes: Any) -> str:
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    named = f"key of {algorithm}" if kid == "" else kid
    return jwt.encode(claims, key or KEYS[algorithm], algorithm, headers={"kid": named} if named else None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    path.write_text(key_set(*PUBLISHED))
    return path


@pytest.fixture
def keys(file: Path) -> JwtKeys:
    return JwtKeys(str(file), RULES, ManualClock())


@pytest.mark.parametrize("algorithm", KEYS)
def test_a_good_token_is_who_it_says(keys: JwtKeys, algorithm: str):
    for _ in range(2):  # the second time from memory
        found = keys.verify(signed(algorithm))
        assert ("engine 7", "team", Role.WRITE, FAR + 30.0) == (found.name, found.tenant, found.role, found.expires_at)
    assert keys.holds(found)


def test_a_star_is_every_tenant(keys: JwtKeys):
    assert keys.verify(signed(tenant="*")).tenant is None


def raw(header: dict[str, Any], claims: dict[str, Any], signature: bytes) -> str:
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


def with_none(name: str) -> str:
    return raw({"alg": name, "typ": "JWT", "kid": "key of ES256"}, CLAIMS, b"")


def with_public_key_as_secret(algorithm: str) -> str:
    """The classic confusion: HMAC, with what everybody can read as its secret."""
    pem = (
        KEYS[algorithm]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    header = {"alg": "HS256", "typ": "JWT", "kid": f"key of {algorithm}"}
    unsigned = raw(header, CLAIMS, b"").rpartition(".")[0]
    return raw(header, CLAIMS, hmac.new(pem, unsigned.encode(), hashlib.sha256).digest())


def with_own_key_inside() -> str:
    """A header that brings the key to check it with."""
    header = {"kid": "key of ES256", "jwk": public("ES256", STRANGER, "key of ES256"), "jku": "https://evil/keys"}
    return jwt.encode(CLAIMS, STRANGER, "ES256", headers=header)


def cut(token: str) -> str:
    return token[:-4]


def other_claims(token: str) -> str:
    """The signature of one token under the claims of another."""
    header, _, signature = token.split(".")
    claims = base64.urlsafe_b64encode(json.dumps({**CLAIMS, "role": "admin"}).encode()).rstrip(b"=").decode()
    return f"{header}.{claims}.{signature}"


def encoded(header: str) -> str:
    return base64.urlsafe_b64encode(header.encode()).rstrip(b"=").decode() + ".e30.AAAA"


FORGED: dict[str, Callable[[], str]] = {
    "no algorithm": lambda: with_none("none"),
    "no algorithm, in capitals": lambda: with_none("NONE"),
    "no algorithm, mixed": lambda: with_none("nOnE"),
    "public RSA key as a secret": lambda: with_public_key_as_secret("RS256"),
    "public EC key as a secret": lambda: with_public_key_as_secret("ES256"),
    "signed by a stranger": lambda: signed(key=STRANGER),
    "its own key inside": with_own_key_inside,
    "an unpublished key": lambda: signed(kid="another"),
    "no key named": lambda: signed(kid=None),
    "the algorithm of another key": lambda: signed("RS256", kid="key of ES256"),
    "an algorithm that is not listed": lambda: jwt.encode(CLAIMS, KEYS["RS256"], "RS512", {"kid": "key of RS256"}),
    "expired": lambda: signed(exp=PAST),
    "never expires": lambda: signed(exp=None),
    "expires at no time": lambda: signed(exp="tomorrow"),
    "not yet": lambda: signed(nbf=FAR),
    "of another issuer": lambda: signed(iss="https://issuer.evil"),
    "of no issuer": lambda: signed(iss=None),
    "for another audience": lambda: signed(aud="other"),
    "for no audience": lambda: signed(aud=None),
    "of nobody": lambda: signed(sub=None),
    "of no tenant": lambda: signed(tenant=None),
    "of a tenant that is none": lambda: signed(tenant=["team"]),
    "of an empty tenant": lambda: signed(tenant=""),
    "with no role": lambda: signed(role=None),
    "with an invented role": lambda: signed(role="root"),
    "with a cut signature": lambda: cut(signed()),
    "with other claims": lambda: other_claims(signed()),
    "without sense": lambda: "a.b.c",
    "brackets without end": lambda: encoded("[" * 5000),
    "braces without end": lambda: encoded('{"a":' * 1000),
    "a header that is a list": lambda: encoded("[]"),
    "an algorithm that is a list": lambda: encoded('{"alg": ["ES256"], "kid": "key of ES256"}'),
    "a key that is a number": lambda: encoded('{"alg": "ES256", "kid": 7}'),
    "expires at infinity": lambda: signed(exp=float("inf")),
    "expires at no number": lambda: signed(exp=float("nan")),
    "empty": lambda: "..",
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGED)
def test_a_token_that_is_not_good_is_refused_without_being_repeated(keys: JwtKeys, forgery: str):
    token = FORGED[forgery]()
    for _ in range(2):
        with pytest.raises(UnauthenticatedError) as refused:
            keys.verify(token)
        assert token not in str(refused.value) or len(token) < 6
    assert "engine 7" == keys.verify(signed()).name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["alg", "kid", "exp", "b64", "crit"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(JSON.map(json.dumps) | st.text(max_size=20), min_size=3, max_size=3))
def test_whatever_stands_between_two_dots_is_refused_in_words(keys_for_all: JwtKeys, parts: list[str]):
    coded = [base64.urlsafe_b64encode(part.encode(errors="replace")).rstrip(b"=").decode() for part in parts]
    for token in (".".join(coded), ".".join(parts)):
        with pytest.raises(UnauthenticatedError):
            keys_for_all.verify(token)


@pytest.fixture(scope="module")
def keys_for_all(tmp_path_factory: pytest.TempPathFactory) -> JwtKeys:
    path = tmp_path_factory.mktemp("keys") / "jwks.json"
    path.write_text(key_set(*PUBLISHED))
    return JwtKeys(str(path), RULES, ManualClock())


def test_a_clock_that_is_a_little_behind_is_allowed_for(file: Path):
    import time

    keys = JwtKeys(str(file), RULES, ManualClock())
    assert "engine 7" == keys.verify(signed(exp=int(time.time()) - 5)).name
    with pytest.raises(UnauthenticatedError, match="expired"):
        keys.verify(signed(exp=int(time.time()) - 60))


def test_a_key_that_is_published_later_is_asked_for_and_then_taken(file: Path, keys: JwtKeys):
    token = signed(key=STRANGER, kid="new")
    with pytest.raises(UnauthenticatedError, match="not published"):
        keys.verify(token)
    assert keys.wants_reload
    file.write_text(key_set(*PUBLISHED, public("ES256", STRANGER, "new")))
    keys.reload()
    assert (False, "engine 7") == (keys.wants_reload, keys.verify(token).name)


def test_a_key_that_is_withdrawn_takes_its_tokens_with_it(file: Path, keys: JwtKeys):
    token = signed("ES256")
    found = keys.verify(token)
    file.write_text(key_set(PUBLISHED[0]))
    keys.reload()
    assert not keys.holds(found)
    with pytest.raises(UnauthenticatedError):
        keys.verify(token)


BAD_SETS = {
    "no JSON": "{",
    "no keys": "{}",
    "an empty list": key_set(),
    "a list of what is none": '{"keys": [1]}',
    "a shared secret": key_set({"kty": "oct", "k": "c2VjcmV0", "kid": "a", "alg": "HS256"}),
    "a key for encryption": key_set({**PUBLISHED[0], "use": "enc"}),
    "a key without a name": key_set({name: value for name, value in PUBLISHED[0].items() if name != "kid"}),
    "half a key": key_set({"kty": "EC", "crv": "P-256", "x": "AAAA", "kid": "a"}),
    "an unknown curve": key_set({"kty": "EC", "crv": "P-192", "x": "AAAA", "y": "AAAA", "kid": "a"}),
    "a weak key": key_set(public("RS256", rsa.generate_private_key(65537, 1024), "weak")),
    "brackets without end": "[" * 100_000,
    "too many keys": key_set(*({**PUBLISHED[1], "kid": str(number)} for number in range(101))),
}


@pytest.mark.parametrize("bad", BAD_SETS)
def test_keys_that_cannot_be_used_are_refused_and_the_old_ones_stay(file: Path, keys: JwtKeys, bad: str):
    file.write_text(BAD_SETS[bad])
    with pytest.raises(ConfigError, match=r"auth\.jwt\.jwks"):
        keys.reload()
    assert "engine 7" == keys.verify(signed()).name
    with pytest.raises(ConfigError, match=r"auth\.jwt\.jwks"):
        JwtKeys(str(file), RULES, ManualClock())


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="absent cannot be read"):
        JwtKeys(str(tmp_path / "absent"), RULES, ManualClock())


@pytest.mark.parametrize("url", ["http://issuer.example/keys", "file:///etc/passwd", "ftp://localhost/keys"])
def test_keys_come_over_no_way_that_others_could_change(url: str):
    with pytest.raises(ConfigError, match="expected a file or an https URL"):
        JwtKeys(url, RULES, ManualClock())


def test_no_algorithm_with_a_shared_secret_can_be_chosen():
    assert [] == [name for name in ALGORITHMS if name.lower() == "none" or name.startswith("HS")]


class Issuer:
    """A web server on loopback that publishes keys."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {"/keys": (200, key_set(*PUBLISHED).encode())}
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = issuer.answers.get(self.path, (404, b""))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", body.decode())
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.close()


def test_keys_are_fetched_and_rotated_over_http(issuer: Issuer):
    keys = JwtKeys(f"{issuer.url}/keys", RULES, ManualClock())
    assert "engine 7" == keys.verify(signed()).name
    issuer.answers["/keys"] = (200, key_set(public("ES256", STRANGER, "new")).encode())
    keys.reload()
    assert "engine 7" == keys.verify(signed(key=STRANGER, kid="new")).name
    with pytest.raises(UnauthenticatedError):
        keys.verify(signed())


@pytest.mark.parametrize(
    "answer",
    [b"", b"no HTTP at all\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
     b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n"],
    ids=["nothing", "something else", "less than announced", "a chunk of no size", "headers without end"],
)  # fmt: skip
def test_an_issuer_that_speaks_no_http_is_told_of_in_words(answer: bytes):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_once() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.recv(65536)
                connected.sendall(answer)

        answering = threading.Thread(target=answer_once)
        answering.start()
        with pytest.raises(
            ConfigError, match=r"auth\.jwt\.jwks http://127\.0\.0\.1:\d+/ (cannot be fetched|is no JWK set)"
        ):
            JwtKeys(f"http://127.0.0.1:{listening.getsockname()[1]}/", RULES, ManualClock())
        answering.join()


@pytest.mark.parametrize(
    "answer", [(500, b""), (404, b""), (302, b"/other"), (200, b"x" * (2**20 + 1)), (200, b"<html>")]
)
def test_an_issuer_that_answers_something_else_changes_nothing(issuer: Issuer, answer: tuple[int, bytes]):
    keys = JwtKeys(f"{issuer.url}/keys", RULES, ManualClock())
    issuer.answers["/other"] = issuer.answers["/keys"]
    issuer.answers["/keys"] = answer
    with pytest.raises(ConfigError, match=r"auth\.jwt\.jwks"):
        keys.reload()
    assert "engine 7" == keys.verify(signed()).name
