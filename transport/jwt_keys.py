"""Tokens that somebody else has issued: JSON Web Tokens (RFC 7519) checked by the issuer's published keys (RFC 7517).

Advice of RFC 8725 that is followed: algorithms are those of a list that has neither `none` nor any with a shared
secret; a key serves the algorithms of its own kind only; issuer, audience and expiry are required.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError, UnauthenticatedError
from kvstore.layer_groups import FIELD_BYTES_MAX
from kvstore.transport.principal import Principal
from kvstore.transport.private_files import FILE_BYTES_MAX
from kvstore.transport.roles import role_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.clock import Clock

logger = logging.getLogger(__name__)
KEYS_MAX = 100
_VERIFIED_MAX = 4096
_FETCH_SECONDS = 5.0
_RSA_BITS_MIN = 2048
# What the library lets through where JSON holds what it does not expect: other kinds, infinity, brackets without end.
_MALFORMED = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
# By the kind of a key: what it may verify.
_ALGORITHMS_OF: dict[str, tuple[str, ...]] = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
}
ALGORITHMS = tuple(name for names in _ALGORITHMS_OF.values() for name in names)


@dataclass(frozen=True, slots=True)
class JwtRules:
    """What a token must say to be taken."""

    issuer: str
    audience: str
    algorithms: tuple[str, ...]
    tenant_claim: str
    role_claim: str
    leeway_seconds: float


@dataclass(frozen=True, slots=True)
class _Key:
    key: Any  # a public key of the package cryptography
    algorithms: tuple[str, ...]


class JwtKeys:
    """An issuer's keys, and the tokens found good by them. Thread-safe; `_lock` guards `_keys` and `_verified`.

    `source` is a file, or an https URL (http on loopback only).
    """

    def __init__(self, source: str, rules: JwtRules, clock: Clock) -> None:
        self._jwt = _library()
        self.source = source
        self._rules = rules
        self._clock = clock
        self._read = _reader(source)
        self._lock = threading.Lock()
        self._verified: OrderedDict[bytes, Principal] = OrderedDict()
        self._keys = self._load()
        self.wants_reload = False  # a token named a key that is not there: the issuer may have a new one

    @property
    def file(self) -> Path | None:
        """The file that the keys are read from; None for a URL."""
        return None if "://" in self.source else Path(self.source)

    def reload(self) -> None:
        """Take the keys that are published now; raises ConfigError, and keeps what it has, if that cannot be."""
        self.wants_reload = False
        keys = self._load()
        with self._lock:
            self._keys = keys
            self._verified.clear()

    def holds(self, principal: Principal) -> bool:
        """Whether the key that a caller was known by is published still."""
        with self._lock:
            return principal.source.removeprefix("jwt:") in self._keys

    def verify(self, token: str) -> Principal:
        """Whose token it is; raises UnauthenticatedError for one that is not good, in words that do not repeat it."""
        digest = sha256(token.encode()).digest()
        with self._lock:
            known = self._verified.get(digest)
            keys = self._keys
        if known is not None:
            return known
        key_id, claims = self._checked(token, keys)
        principal = self._principal(key_id, claims)
        with self._lock:
            if self._keys is keys:
                self._verified[digest] = principal
                if len(self._verified) > _VERIFIED_MAX:
                    self._verified.popitem(last=False)
        return principal

    def _checked(self, token: str, keys: Mapping[str, _Key]) -> tuple[str, dict[str, Any]]:
        jwt = self._jwt
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, *_MALFORMED) as err:
            raise UnauthenticatedError("the token is no JWT") from err
        key_id = header.get("kid")
        key = keys.get(key_id) if isinstance(key_id, str) else None
        if key is None:
            self.wants_reload = True
            raise UnauthenticatedError("the token names a signing key that its issuer has not published")
        allowed = [name for name in key.algorithms if name in self._rules.algorithms]
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key=key.key,
                algorithms=allowed,
                audience=self._rules.audience,
                issuer=self._rules.issuer,
                leeway=self._rules.leeway_seconds,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.ExpiredSignatureError as err:
            raise UnauthenticatedError("the token has expired; ask its issuer for another one") from err
        except (jwt.PyJWTError, *_MALFORMED) as err:
            raise UnauthenticatedError(f"the token is not good: {type(err).__name__}") from err
        return str(key_id), claims

    def _principal(self, key_id: str, claims: Mapping[str, Any]) -> Principal:
        tenant, subject = claims.get(self._rules.tenant_claim), claims["sub"]
        if not isinstance(tenant, str) or not 1 <= len(tenant.encode()) <= FIELD_BYTES_MAX:
            raise UnauthenticatedError(f"the token has no tenant in its claim {self._rules.tenant_claim!r}")
        try:
            role = role_of(claims.get(self._rules.role_claim))
        except ValueError as err:
            raise UnauthenticatedError(f"the token's claim {self._rules.role_claim!r}: {err}") from err
        expires_at = float(claims["exp"]) + self._rules.leeway_seconds
        return Principal(str(subject), None if tenant == "*" else tenant, role, f"jwt:{key_id}", expires_at)

    def _load(self) -> dict[str, _Key]:
        try:
            found = json.loads(self._read())["keys"]
            keys = {}
            for entry in found[: KEYS_MAX + 1]:
                algorithms = _ALGORITHMS_OF.get(entry.get("kty"), ())
                if algorithms and entry.get("use", "sig") == "sig" and isinstance(entry.get("kid"), str):
                    key = self._jwt.PyJWK(entry, algorithm=_algorithm(entry)).key
                    if entry["kty"] == "RSA" and key.key_size < _RSA_BITS_MIN:
                        raise ValueError(f"an RSA key has {key.key_size} bits, expected at least {_RSA_BITS_MIN}")
                    keys[entry["kid"]] = _Key(key, algorithms)
        except (self._jwt.PyJWTError, *_MALFORMED) as err:
            raise ConfigError(f"auth.jwt.jwks {self.source} is no JWK set: {type(err).__name__}: {err}") from err
        if not 1 <= len(keys) <= KEYS_MAX:
            raise ConfigError(
                f"auth.jwt.jwks {self.source} has {len(keys)} public keys for signatures with a `kid`, "
                f"expected 1..{KEYS_MAX}"
            )
        return keys


_OKP, _RSA = "EdDSA", "RS256"
_EC_ALGORITHMS = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}


def _algorithm(entry: Mapping[str, Any]) -> str:
    """What tells the library how to read a key; which algorithms it serves is decided by its kind."""
    if entry["kty"] == "EC":
        return _EC_ALGORITHMS[entry["crv"]]
    return _RSA if entry["kty"] == "RSA" else _OKP


def _library() -> Any:  # noqa: ANN401  # a module
    try:
        import cryptography  # noqa: F401  # without it the library knows algorithms with shared secrets only
        import jwt
    except ImportError as err:
        raise ConfigError(
            "auth.jwt needs PyJWT and cryptography, which are not installed: pip install 'prefix-kvstore[jwt]'"
        ) from err
    return jwt


def _reader(source: str) -> Callable[[], bytes]:
    """What reads the keys; raises ConfigError for a source that others could change on its way."""
    if "://" not in source:
        return lambda: _read_file(Path(source))
    parts = urllib.parse.urlsplit(source)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise ConfigError(f"auth.jwt.jwks is {source!r}, expected a file or an https URL (http on loopback only)")
    opener = urllib.request.build_opener(_NoRedirects)
    return lambda: _fetch(opener, source)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise ConfigError(f"auth.jwt.jwks {path} cannot be read: {err.strerror}") from err


def _fetch(opener: urllib.request.OpenerDirector, url: str) -> bytes:
    try:
        with opener.open(url, timeout=_FETCH_SECONDS) as response:
            content: bytes = response.read(FILE_BYTES_MAX + 1)
    except (OSError, HTTPException, ValueError) as err:  # urllib's own errors are of the first kind
        raise ConfigError(f"auth.jwt.jwks {url} cannot be fetched: {getattr(err, 'reason', err)}") from err
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"auth.jwt.jwks {url} has more than {FILE_BYTES_MAX} bytes, expected less")
    return content


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Keys come from where the settings say, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401
        """Follow none; the answer is then an error."""
        return
