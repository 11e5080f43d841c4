"""Settings of who gets in and what is encrypted; a part of kvstore.config."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.setting_values import Kind, setting

ROLE_WORDS = ("read", "write", "admin")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS of the addresses tls://. Files that change are read again for new connections."""

    cert: str = setting("", Kind.TEXT, "PEM file with the server's certificate and those between it and its CA.")
    key: str = setting("", Kind.TEXT, "PEM file with the key of tls.cert; others may not read it.")
    client_ca: str = setting("", Kind.TEXT, "PEM file with the CA whose client certificates are believed.")
    require_client_cert: bool = setting(False, Kind.SWITCH, "Whether a client without a certificate is sent away.")


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtConfig:
    """Tokens of an issuer, JSON Web Tokens; issuer, audience and jwks go together (extra `jwt`)."""

    issuer: str = setting("", Kind.TEXT, "Who must have issued a JWT (`iss`).")
    audience: str = setting("", Kind.TEXT, "Whom a JWT must be meant for (`aud`).")
    jwks: str = setting("", Kind.TEXT, "The issuer's public keys: a file, or an https URL.")
    algorithms: tuple[str, ...] = setting(
        ("RS256", "ES256", "EdDSA"), Kind.LIST, "How a JWT may be signed; with published keys only."
    )
    tenant_claim: str = setting("kvstore-tenant", Kind.TEXT, "Claim with the tenant of a JWT; `*`: every tenant.")
    role_claim: str = setting("kvstore-role", Kind.TEXT, "Claim with the role of a JWT: read, write or admin.")
    leeway_seconds: float = setting(
        30.0, Kind.DURATION, "How far the issuer's clock may be from this machine's.", maximum=600
    )
    refresh_seconds: float = setting(
        300.0, Kind.DURATION, "How often keys are fetched again from a URL.", minimum=1, maximum=86400
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Who gets in. With a file or an issuer, nobody does without a token or a certificate that is known."""

    file: str = setting("", Kind.TEXT, "Access file: hashes of tokens and names of certificates, tenants and roles.")
    local_role: str = setting(
        "write",
        Kind.TEXT,
        "Without a file or an issuer: the role of all but the server's own user on a Unix socket, who is admin.",
        choices=ROLE_WORDS,
    )
    jwt: JwtConfig = field(default_factory=JwtConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What commands show the sidecar that they ask."""

    tls_ca: str = setting("", Kind.TEXT, "PEM file with the CA of the sidecar's certificate; empty: the system's.")
    tls_cert: str = setting("", Kind.TEXT, "PEM file with the certificate of a command.")
    tls_key: str = setting("", Kind.TEXT, "PEM file with the key of client.tls_cert.")
    token_file: str = setting("", Kind.TEXT, "File with the token of a command; others may not read it.")
