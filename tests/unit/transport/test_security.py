"""What settings come to: what fits together is made, what does not is named."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvstore.config import load_config
from kvstore.errors import ConfigError
from kvstore.transport.principal import Carrier, Origin
from kvstore.transport.roles import Role
from kvstore.transport.security import Security, local_security, security_of

if TYPE_CHECKING:
    from pathlib import Path

JWT = {"auth.jwt.issuer": "i", "auth.jwt.audience": "a", "auth.jwt.jwks": "absent"}
REFUSED = {
    "a certificate alone": ({"tls.cert": "c"}, "tls.cert and tls.key belong together"),
    "a key alone": ({"tls.key": "c"}, "tls.cert and tls.key belong together"),
    "a CA for no TLS": ({"tls.client_ca": "c"}, "need tls.cert and tls.key"),
    "a certificate required by no CA": (
        {"tls.cert": "c", "tls.key": "k", "tls.require_client_cert": "true"},
        "tls.require_client_cert needs tls.client_ca",
    ),
    "files that are not there": ({"tls.cert": "c", "tls.key": "k"}, "tls.key k cannot be read: No such file"),
    "an access file that is not there": ({"auth.file": "f"}, "access file f cannot be read: No such file"),
    "a switch that is neither": ({"tls.require_client_cert": "maybe"}, "expected true or false"),
    "no such role": ({"auth.local_role": "root"}, "expected one of read, write, admin"),
    "no such group": ({"server.unix_group": "nobody-at-all"}, "expected a group of this machine"),
    "a mode that is none": ({"server.unix_mode": "0778"}, "server.unix_mode is '0778', expected an octal mode"),
    "a mode without its owner": ({"server.unix_mode": "0060"}, "expected an octal mode"),
    "a mode to execute": ({"server.unix_mode": "0700"}, "expected an octal mode"),
    "an issuer alone": ({"auth.jwt.issuer": "i"}, "auth.jwt.audience is empty, expected issuer, audience and jwks"),
    "a shared secret": ({**JWT, "auth.jwt.algorithms": "RS256,HS256"}, "auth.jwt.algorithms has HS256, expected some"),
    "no algorithm": ({**JWT, "auth.jwt.algorithms": "none"}, "auth.jwt.algorithms has none, expected some"),
}  # fmt: skip


def made(flags: dict[str, str]) -> Security:
    return security_of(load_config(flags=flags, environ={}).config)


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_do_not_fit_together_are_named(what: str):
    flags, told = REFUSED[what]
    with pytest.raises(ConfigError, match=told):
        made(flags)


def test_keys_that_are_not_there_are_named():
    pytest.importorskip("jwt", reason="needs the extra jwt")
    with pytest.raises(ConfigError, match=r"auth\.jwt\.jwks absent cannot be read"):
        made(JWT)


def test_without_settings_only_local_users_get_in_and_write():
    security = made({})
    assert (False, False, 0o600, None) == (
        security.rules.tls, security.rules.closed, security.rules.unix_mode, security.rules.unix_group,
    )  # fmt: skip
    assert [] == security.reloadables()
    roles = [security.access.admit(Origin(carrier), "").role for carrier in Carrier]
    assert [Role.WRITE] * 3 == roles
    assert Role.ADMIN is security.access.admit(Origin(Carrier.UNIX, same_user=True), "").role


@pytest.mark.parametrize("role", Role)
def test_the_role_of_local_users_is_a_setting(role: Role):
    for security in (made({"auth.local_role": role.word}), local_security(role)):
        assert role is security.access.admit(Origin(Carrier.LOOPBACK), "").role


def test_all_that_may_change_is_looked_after(tmp_path: Path):
    pytest.importorskip("cryptography", reason="needs the extra certs")
    from kvstore.testing.securing import Keyring

    keyring = Keyring(tmp_path)
    group = str(os.getegid())
    security = keyring.security(server__unix_mode="0660", server__unix_group=group)
    assert ["tls", "access"] == [item.noun for item in security.reloadables()]
    assert {"server.pem", "server.key", "ca.pem", "access.toml"} == {
        path.name for item in security.reloadables() for path in item.files
    }
    assert (True, True, 0o660, os.getegid()) == (
        security.rules.tls, security.rules.closed, security.rules.unix_mode, security.rules.unix_group,
    )  # fmt: skip
    assert security.tls is not None
    security.tls.close()
