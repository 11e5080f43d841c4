"""Who is let in: tokens of a file, tokens that an issuer has signed, certificates, and local users.

The file is TOML and holds hashes only:

    [[token]]
    name = "engines of team a"
    hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    tenant = "team-a"                   # "*": every tenant
    role = "write"                      # read, write or admin; each includes the ones before it
    expires = 2027-06-30T00:00:00Z      # optional

    [[certificate]]
    name = "node 7"
    match = "DNS:node-7.example"        # or CN:, URI:, IP:, of a certificate that tls.client_ca has signed
    tenant = "*"
    role = "admin"
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError, UnauthenticatedError
from kvstore.transport.credentials import TOKEN_BYTES_MAX
from kvstore.transport.principal import Origin, Principal
from kvstore.transport.private_files import read_private
from kvstore.transport.roles import Role, role_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.transport.jwt_keys import JwtKeys

EVERY_TENANT = "*"
ENTRIES_MAX = 10_000
_TOKEN_PREFIX = "kvs_"
_TOKEN_RANDOM_BYTES = 32
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_MATCH = re.compile(r"(CN|DNS|URI|IP):.+")
_FIELDS = {"token": ("name", "hash", "tenant", "role"), "certificate": ("name", "match", "tenant", "role")}
_OPTIONAL = {"token": ("expires",), "certificate": ()}
_INDEX_BYTES = 8


def new_token() -> str:
    """A token of 256 random bits."""
    return _TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_RANDOM_BYTES)


def hash_of(token: str) -> str:
    """How the file keeps a token: as many bits as the token is random need no salt and no slow hash."""
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class AccessRules:
    """What an access file says. `tokens` are by the first bytes of their digests, `certificates` by name."""

    tokens: dict[bytes, tuple[tuple[bytes, Principal], ...]]
    certificates: dict[str, Principal]

    def by_token(self, token: str) -> Principal | None:
        """Whose token it is. Digests are compared in constant time; nothing is compared with the token itself."""
        digest = hashlib.sha256(token.encode()).digest()
        found = None
        for known, principal in self.tokens.get(digest[:_INDEX_BYTES], ()):
            if hmac.compare_digest(known, digest):
                found = principal
        return found

    def by_certificate(self, names: tuple[str, ...]) -> Principal | None:
        """Whose certificate it is: the first of its names that is known."""
        return next((self.certificates[name] for name in names if name in self.certificates), None)

    def principals(self) -> frozenset[Principal]:
        """All that may come in."""
        of_tokens = (principal for known in self.tokens.values() for _, principal in known)
        return frozenset((*of_tokens, *self.certificates.values()))


NO_RULES = AccessRules({}, {})


class Access:
    """Lets callers in. Used from the event loop of its server only.

    Without a file and without an issuer, the user of the server is the administrator over the Unix socket, and whoever
    else gets there has `local_role`.
    """

    def __init__(self, file: Path | None, jwt: JwtKeys | None, local_role: Role, clock: Clock) -> None:
        self.file = file
        self.jwt = jwt
        self._local_role = local_role
        self._clock = clock
        self._rules = NO_RULES if file is None else load_rules(file)
        self._principals = self._rules.principals()

    @property
    def is_closed(self) -> bool:
        """Whether only those come in who are known by name."""
        return self.file is not None or self.jwt is not None

    def reload(self) -> None:
        """Take what the file says now; raises ConfigError, and keeps what it has, if that cannot be."""
        if self.file is not None:
            self._rules = load_rules(self.file)
            self._principals = self._rules.principals()

    def admit(self, origin: Origin, token: str) -> Principal:
        """Who calls, by a token, else by a certificate, else by being local. Raises UnauthenticatedError."""
        if not self.is_closed:
            if origin.same_user:
                return Principal("local user", None, Role.ADMIN, "local")
            return Principal("local", None, self._local_role, "local")
        principal = self._by_token(token) if token else self._rules.by_certificate(origin.certificate_names)
        if principal is None:
            raise UnauthenticatedError("this server lets in who has a token: name the file that has yours (token_file)")
        if not self.holds(principal):
            raise UnauthenticatedError("the token is not known here, or no longer; ask for another one")
        return principal

    def holds(self, principal: Principal) -> bool:
        """Whether one who was let in would be let in still: neither expired nor revoked."""
        if principal.expires_at is not None and principal.expires_at <= self._clock.unix():
            return False
        if principal.source == "local":
            return not self.is_closed
        if self.jwt is not None and principal.source.startswith("jwt:"):
            return self.jwt.holds(principal)
        return principal in self._principals

    def _by_token(self, token: str) -> Principal:
        if len(token) > TOKEN_BYTES_MAX or not token.isascii():
            raise UnauthenticatedError(f"a token has {len(token)} characters, expected 1..{TOKEN_BYTES_MAX} of ASCII")
        if self.jwt is not None and token.count(".") == 2:  # no token of a file has a dot
            return self.jwt.verify(token)
        principal = self._rules.by_token(token)
        if principal is None:
            raise UnauthenticatedError("the token is not known here, or no longer; ask for another one")
        return principal


def load_rules(file: Path) -> AccessRules:
    """Read an access file; raises ConfigError that names the entry and what was expected."""
    raw = read_private(file, "access file")
    try:
        table = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"access file {file}: {err}") from err
    if unknown := sorted(set(table) - set(_FIELDS)):
        raise ConfigError(f"access file {file} has {unknown[0]!r}, expected tables [[token]] and [[certificate]]")
    tokens: dict[bytes, tuple[tuple[bytes, Principal], ...]] = {}
    certificates: dict[str, Principal] = {}
    names: set[str] = set()
    for kind in _FIELDS:
        for number, entry in enumerate(_entries(table, kind, file), 1):
            where = f"access file {file}: {kind} {number}"
            principal = _principal(kind, entry, where)
            if principal.name in names:
                raise ConfigError(f"{where} has the name {principal.name!r} of another entry, expected one of its own")
            names.add(principal.name)
            if kind == "token":
                digest = bytes.fromhex(principal.source.removeprefix("sha256:"))
                index = digest[:_INDEX_BYTES]
                tokens[index] = (*tokens.get(index, ()), (digest, _without_digest(principal)))
            else:
                certificates[principal.source] = principal
    return AccessRules(tokens, certificates)


def _entries(table: dict[str, Any], kind: str, file: Path) -> list[dict[str, Any]]:
    entries = table.get(kind, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"access file {file}: {kind} is no list of tables, expected [[{kind}]]")
    if len(entries) > ENTRIES_MAX:
        raise ConfigError(f"access file {file} has {len(entries)} entries {kind}, expected at most {ENTRIES_MAX}")
    return entries


def _principal(kind: str, entry: dict[str, Any], where: str) -> Principal:
    for name in _FIELDS[kind]:
        if not isinstance(entry.get(name), str) or not entry[name]:
            raise ConfigError(f"{where} has {name} {entry.get(name)!r}, expected a text")
    if unknown := sorted(set(entry) - set(_FIELDS[kind]) - set(_OPTIONAL[kind])):
        raise ConfigError(f"{where} has {unknown[0]!r}, expected {', '.join((*_FIELDS[kind], *_OPTIONAL[kind]))}")
    if kind == "token" and not _HASH.fullmatch(entry["hash"]):
        raise ConfigError(f"{where} has a hash that is not sha256: and 64 hex digits; `kvstore token new` makes one")
    if kind == "certificate" and not _MATCH.fullmatch(entry["match"]):
        raise ConfigError(f"{where} has match {entry['match']!r}, expected CN:, DNS:, URI: or IP: and a name")
    try:
        role = role_of(entry["role"])
    except ValueError as err:
        raise ConfigError(f"{where}: {err}") from err
    tenant = None if entry["tenant"] == EVERY_TENANT else entry["tenant"]
    source = entry["hash"] if kind == "token" else entry["match"]
    return Principal(entry["name"], tenant, role, source, _expiry(entry.get("expires"), where))


def _without_digest(principal: Principal) -> Principal:
    """The same, known by the first digits of its hash only: a principal is shown in logs."""
    return Principal(principal.name, principal.tenant, principal.role, principal.source[:15], principal.expires_at)


def _expiry(value: object, where: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise ConfigError(f"{where} has expires {value!r}, expected a time such as 2027-06-30T00:00:00Z")
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
