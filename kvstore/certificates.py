"""A certificate authority to begin with: for development and small clusters, where nobody has one yet.

It makes what the sidecar and its clients need for TLS, after RFC 5280: keys on the curve P-256, a CA that signs
certificates only, and certificates for servers and for clients, of which neither can stand for the other.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

CA_DAYS = 3650
_NAME = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9._*-]{0,62})")
_EARLIER = dt.timedelta(hours=1)  # clocks of other machines may be behind


@dataclass(frozen=True, slots=True)
class MadeFile:
    """A file of the folder, and whether this run has made it."""

    path: Path
    made: bool


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate and its key, objects of the package cryptography."""

    certificate: Any
    key: Any


def make_certificates(folder: Path, *, hosts: Sequence[str], clients: Sequence[str], days: int) -> list[MadeFile]:
    """A CA, a certificate of the server for `hosts`, and one for each of `clients`, in `folder`.

    What is there already is left as it is, so a second run adds only what is missing. Keys and the folder are for their
    owner alone. Raises ConfigError if that cannot be done.
    """
    for name in (*hosts, *clients):
        if not _NAME.fullmatch(name) and (name in clients or _as_address(name) is None):
            raise ConfigError(f"{name!r} cannot be in a certificate, expected a host, an address or a client's name")
    if not hosts or not 1 <= days <= CA_DAYS:
        raise ConfigError(f"{len(hosts)} hosts, {days} days: expected at least one host, and 1..{CA_DAYS} days")
    _require_library()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = _ensure(folder, "ca", _make_ca)
        ca = _read_ca(folder)
        files += _ensure(folder, "server", partial(_make_server, ca, hosts, days))
        for client in clients:
            files += _ensure(folder, f"client-{client}", partial(_make_client, ca, client, days))
    except OSError as err:
        raise ConfigError(f"{err.filename or folder}: {err.strerror}") from err
    return files


def _require_library() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as err:
        raise ConfigError(
            "this needs cryptography, which is not installed: pip install 'prefix-kvstore[certs]'"
        ) from err


def _ensure(folder: Path, stem: str, make: Callable[[], _Pair]) -> list[MadeFile]:
    """The files of a pair, made if neither is there."""
    certificate, key = folder / f"{stem}.pem", folder / f"{stem}.key"
    there = certificate.exists(), key.exists()
    if there[0] != there[1]:
        found, missing = (certificate, key) if there[0] else (key, certificate)
        raise ConfigError(f"{found} is there and {missing} is not: put it back, or remove the one that is there")
    if not there[0]:
        from cryptography.hazmat.primitives import serialization

        pair = make()
        encoding = serialization.Encoding.PEM
        private = pair.key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        _write(key, private, 0o600)
        _write(certificate, pair.certificate.public_bytes(encoding), 0o644)
    return [MadeFile(certificate, not there[0]), MadeFile(key, not there[0])]


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file that has its mode, and all of its bytes, from the moment it is there."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _read_ca(folder: Path) -> _Pair:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (ValueError, TypeError) as err:
        raise ConfigError(f"{folder}/ca.pem or {folder}/ca.key cannot be used: {err}") from err
    return _Pair(certificate, key)


def _make_ca() -> _Pair:
    from cryptography import x509

    usage = _usage(signs_certificates=True)
    extensions = ((x509.BasicConstraints(ca=True, path_length=0), True), (usage, True))
    return _signed(None, "kvstore development CA", CA_DAYS, extensions)


def _make_server(ca: _Pair, hosts: Sequence[str], days: int) -> _Pair:
    from cryptography import x509

    names = [_host_name(host) for host in hosts]
    return _signed(ca, hosts[0], days, ((x509.SubjectAlternativeName(names), False), *_leaf(_purpose("SERVER_AUTH"))))


def _make_client(ca: _Pair, name: str, days: int) -> _Pair:
    from cryptography import x509

    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    return _signed(ca, name, days, ((names, False), *_leaf(_purpose("CLIENT_AUTH"))))


def _leaf(purpose: Any) -> tuple[tuple[Any, bool], ...]:  # noqa: ANN401  # of cryptography
    """What certificates of servers and clients have alike: extensions, and whether each is critical."""
    from cryptography import x509

    constraints = x509.BasicConstraints(ca=False, path_length=None)
    return (constraints, True), (_usage(signs_certificates=False), True), (purpose, False)


def _purpose(name: str) -> Any:  # noqa: ANN401
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    return x509.ExtendedKeyUsage([getattr(ExtendedKeyUsageOID, name)])


def _usage(*, signs_certificates: bool) -> Any:  # noqa: ANN401
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(ca: _Pair | None, name: str, days: int, extensions: Sequence[tuple[Any, bool]]) -> _Pair:
    """A new key and its certificate, signed by the CA, or by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    begin = dt.datetime.now(dt.UTC) - _EARLIER
    issuer_key = key if ca is None else ca.key
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if ca is None else ca.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + dt.timedelta(days=days) + _EARLIER)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return _Pair(builder.sign(issuer_key, hashes.SHA256()), key)


def _host_name(host: str) -> Any:  # noqa: ANN401
    from cryptography import x509

    address = _as_address(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _as_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
