"""Certificates, tokens and settings for servers that let in only who is known."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore.certificates import make_certificates
from kvstore.config import load_config
from kvstore.transport.access import hash_of, new_token
from kvstore.transport.security import security_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.transport.security import Security


class Keyring:
    """A development CA and an access file in a folder, and tokens of that file."""

    def __init__(self, folder: Path, hosts: Sequence[str] = ("localhost", "127.0.0.1")) -> None:
        self.folder = folder
        self.access_file = folder / "access.toml"
        self._entries: dict[str, str] = {}
        make_certificates(folder, hosts=list(hosts), clients=["engine", "stranger"], days=1)
        self._write()

    @property
    def ca(self) -> str:
        """The CA's certificate, a file."""
        return self.path("ca.pem")

    def path(self, name: str) -> str:
        """A file of the folder."""
        return str(self.folder / name)

    def settings(self, **more: str) -> dict[str, str]:
        """Settings of a server with TLS and the access file; `more` are keys with `__` for each dot."""
        given = {
            "tls.cert": self.path("server.pem"),
            "tls.key": self.path("server.key"),
            "tls.client_ca": self.ca,
            "auth.file": str(self.access_file),
        }
        return {**given, **{key.replace("__", "."): value for key, value in more.items()}}

    def security(self, **more: str) -> Security:
        """What a server makes of these settings."""
        return security_of(load_config(flags=self.settings(**more), environ={}).config)

    def let_in(self, name: str, tenant: str, role: str) -> str:
        """A new token in the access file, and a file that has it."""
        token = new_token()
        path = self.folder / f"{name}.token"
        path.touch(mode=0o600)
        path.write_text(token + "\n")
        self._entries[name] = _entry("token", name=name, hash=hash_of(token), tenant=tenant, role=role)
        self._write()
        return str(path)

    def let_in_certificate(self, name: str, match: str, tenant: str, role: str) -> None:
        """A certificate in the access file."""
        self._entries[name] = _entry("certificate", name=name, match=match, tenant=tenant, role=role)
        self._write()

    def keep_out(self, name: str) -> None:
        """Take an entry out of the access file."""
        del self._entries[name]
        self._write()

    def _write(self) -> None:
        unfinished = self.folder / "access.new"
        unfinished.touch(mode=0o600)
        unfinished.write_text("\n".join(self._entries.values()))
        os.replace(unfinished, self.access_file)


def _entry(kind: str, **values: str) -> str:
    return "\n".join([f"[[{kind}]]", *(f'{name} = "{value}"' for name, value in values.items()), ""])
