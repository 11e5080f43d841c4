"""Everything that decides who gets in and what is encrypted, made from the settings."""

from __future__ import annotations

import grp
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.clock import SystemClock
from kvstore.errors import ConfigError
from kvstore.transport.access import Access
from kvstore.transport.jwt_keys import ALGORITHMS, JwtKeys, JwtRules
from kvstore.transport.listen import ListenRules
from kvstore.transport.reload import Reloadable
from kvstore.transport.roles import Role, role_of
from kvstore.transport.tls import ServerTls

if TYPE_CHECKING:
    from kvstore.clock import Clock
    from kvstore.config import Config
    from kvstore.security_config import JwtConfig, TlsConfig

_MODES = range(0o600, 0o1000)


@dataclass(frozen=True, slots=True)
class Security:
    """Who gets in, and how."""

    access: Access
    rules: ListenRules
    tls: ServerTls | None
    clock: Clock
    jwks_seconds: float = 300.0

    def reloadables(self) -> list[Reloadable]:
        """What may change while the server runs."""
        items = []
        if self.tls is not None:
            items.append(Reloadable("tls", self.tls.reload, self.tls.files))
        if self.access.file is not None:
            items.append(Reloadable("access", self.access.reload, (self.access.file,)))
        jwt = self.access.jwt
        if jwt is not None:
            files = () if jwt.file is None else (jwt.file,)
            seconds = self.jwks_seconds if jwt.file is None else None
            items.append(Reloadable("jwks", jwt.reload, files, seconds, lambda: jwt.wants_reload))
        return items


def local_security(role: Role = Role.WRITE) -> Security:
    """Nobody has to show anything; who is not the server's user on a Unix socket has this role."""
    clock = SystemClock()
    return Security(Access(None, None, role, clock), ListenRules(), None, clock)


def security_of(config: Config) -> Security:
    """What the settings say. Raises ConfigError, in one line, for what does not fit together or cannot be read."""
    clock = SystemClock()
    tls = _tls_of(config.tls)
    jwt = _jwt_of(config.auth.jwt, clock)
    file = Path(config.auth.file) if config.auth.file else None
    access = Access(file, jwt, role_of(config.auth.local_role), clock)
    rules = ListenRules(
        tls=tls is not None,
        closed=access.is_closed,
        unix_mode=_mode_of(config.server.unix_mode),
        unix_group=_group_of(config.server.unix_group),
    )
    return Security(access, rules, tls, clock, config.auth.jwt.refresh_seconds)


def _tls_of(tls: TlsConfig) -> ServerTls | None:
    if not tls.cert and not tls.key:
        if tls.client_ca or tls.require_client_cert:
            raise ConfigError("tls.client_ca and tls.require_client_cert need tls.cert and tls.key")
        return None
    if not tls.cert or not tls.key:
        raise ConfigError("tls.cert and tls.key belong together: set both, or neither")
    if tls.require_client_cert and not tls.client_ca:
        raise ConfigError("tls.require_client_cert needs tls.client_ca, the CA that signs the clients' certificates")
    return ServerTls(
        cert=Path(tls.cert),
        key=Path(tls.key),
        client_ca=Path(tls.client_ca) if tls.client_ca else None,
        require_client_cert=tls.require_client_cert,
    )


def _jwt_of(jwt: JwtConfig, clock: Clock) -> JwtKeys | None:
    given = {"issuer": jwt.issuer, "audience": jwt.audience, "jwks": jwt.jwks}
    if not any(given.values()):
        return None
    if missing := [name for name, value in given.items() if not value]:
        raise ConfigError(f"auth.jwt.{missing[0]} is empty, expected issuer, audience and jwks together")
    unknown = [name for name in jwt.algorithms if name not in ALGORITHMS]
    if unknown or not jwt.algorithms:
        raise ConfigError(
            f"auth.jwt.algorithms has {', '.join(unknown) or 'nothing'}, expected some of {', '.join(ALGORITHMS)}: "
            "those whose keys may be published"
        )
    rules = JwtRules(
        issuer=jwt.issuer,
        audience=jwt.audience,
        algorithms=jwt.algorithms,
        tenant_claim=jwt.tenant_claim,
        role_claim=jwt.role_claim,
        leeway_seconds=jwt.leeway_seconds,
    )
    return JwtKeys(jwt.jwks, rules, clock)


def _mode_of(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = 0
    if mode not in _MODES or mode & 0o111:
        raise ConfigError(f"server.unix_mode is {text!r}, expected an octal mode such as 0600, 0660 or 0666")
    return mode


def _group_of(name: str) -> int | None:
    if not name:
        return None
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError as err:
        raise ConfigError(f"server.unix_group is {name!r}, expected a group of this machine, or its number") from err
