"""Which sidecar a command asks, and what it shows it: flags, else settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import kvstore
from kvstore.config import load_config
from kvstore.transport.credentials import CredentialFiles

if TYPE_CHECKING:
    import argparse

    from kvstore.transport.client import Client

# People wait longer than engines.
_LOOKUP_SECONDS = 5.0


def sidecar_address(arguments: argparse.Namespace) -> str:
    """Its address."""
    if arguments.address is not None:
        return str(arguments.address)
    return load_config().config.address


def client_files(arguments: argparse.Namespace) -> CredentialFiles:
    """Certificates and token of the command, as options of kvstore.connect."""
    client = load_config().config.client
    return CredentialFiles(
        tls_ca=arguments.tls_ca or client.tls_ca or None,
        tls_cert=arguments.tls_cert or client.tls_cert or None,
        tls_key=arguments.tls_key or client.tls_key or None,
        token_file=arguments.token_file or client.token_file or None,
    )


def connect_sidecar(arguments: argparse.Namespace, address: str | None = None) -> Client:
    """A client of the command's sidecar, or of another one at an address, which is shown the same."""
    chosen = sidecar_address(arguments) if address is None else address
    return kvstore.connect(chosen, lookup_seconds=_LOOKUP_SECONDS, **client_files(arguments))
