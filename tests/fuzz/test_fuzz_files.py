"""Files that operators write, and tokens that anybody sends: read, or refused by a typed error of one line."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from kvstore.cli import prompt
from kvstore.config import load_config
from kvstore.errors import (
    ConfigError,
    InvalidLayoutError,
    InvalidNamespaceError,
    InvalidTokensError,
    UnauthenticatedError,
)
from kvstore.testing.manual_clock import ManualClock
from kvstore.transport.access import Access, hash_of, load_rules
from kvstore.transport.jwt_keys import JwtKeys, JwtRules
from kvstore.transport.principal import Carrier, Origin
from kvstore.transport.roles import Role

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from conftest import Fuzz, Mutator

TOKEN = "kv_0123456789abcdef"
ACCESS_FILE = f"""
[[token]]
name = "engine"
tenant = "team"
role = "write"
hash = "{hash_of(TOKEN)}"
expires = 2027-06-30T00:00:00Z
[[certificate]]
name = "operator"
tenant = "*"
role = "admin"
match = "CN:operator"
"""
CONFIG_FILE = """
[tiers.host]
capacity_bytes = "64MiB"
[server]
listen = ["127.0.0.1:0", "unix:///tmp/s"]
grace_seconds = "2s"
unix_mode = "0660"
"""
NAMESPACE_FILE = """
model = "model"
revision = "main"
tenant = "team"
[layout]
layers = 4
kv_heads = 2
head_dim = 64
dtype = "bfloat16"
block_tokens = 16
[[layout.groups]]
kind = "sliding_window"
layers = 2
window = 64
kv_heads = 2
head_dim = 64
dtype = "bfloat16"
[root]
adapter = "lora"
"""
RULES = JwtRules("https://issuer", "kvstore", ("RS256", "ES256", "EdDSA"), "tenant", "role", 30.0)
OKP = {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo", "kid": "a", "use": "sig"}
EC = {
    "kty": "EC",
    "crv": "P-256",
    "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
    "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0",
    "kid": "b",
}
KEYS_FILE = json.dumps({"keys": [OKP, EC]})
# {"alg":"EdDSA","kid":"a"} . {"iss":"https://issuer","aud":"kvstore","exp":4000000000,"sub":"s"} . no signature
JWT = (
    "eyJhbGciOiJFZERTQSIsImtpZCI6ImEifQ.eyJpc3MiOiJodHRwczovL2lzc3VlciIsImF1ZCI6Imt2c3RvcmUiLCJleHAiOjQwMDAwMDAwMDAs"
    "InN1YiI6InMifQ." + "A" * 86
)
WORDS = [
    *("0", "-1", "1e999", "nan", "-inf", "9" * 30, "1.5", "true", "null", "0x7fffffffffffffff", "[1, 2]", "[]", "{}"),
    *("1979-05-27", "07:32:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "[" * 200, "token = 1"),
    *(
        '""',
        '"*"',
        '"\\u0000"',
        '"\\ud800"',
        '"RSA"',
        '"CN:"',
        '"sha256:"',
        '"é"',
        "[[token]]",
        "[token]",
        "hash",
        "keys",
    ),
]
REFUSED = (ConfigError, InvalidLayoutError, InvalidNamespaceError, InvalidTokensError)


def text_of(mutator: Mutator, seeds: Sequence[str]) -> bytes:
    """A text with other words in it, or other bytes."""
    if mutator.random.random() < 0.3:
        return mutator.mutated([seed.encode() for seed in seeds])
    words = re.split(r"(\s+|=|,)", mutator.random.choice(seeds))
    for _ in range(mutator.random.randint(1, 3)):
        words[mutator.random.randrange(len(words))] = mutator.random.choice([*WORDS, *words])
    return "".join(words).encode()


def test_an_access_file_is_read_or_refused(fuzz: Fuzz, memory_path: Path) -> None:
    file = memory_path / "access.toml"
    file.touch(mode=0o600)

    def target(raw: bytes) -> None:
        file.write_bytes(raw)
        with suppress(ConfigError):
            rules = load_rules(file)
            assert all(isinstance(principal.role, Role) for principal in rules.principals())
            found = rules.by_token(TOKEN)
            assert found is None or found in rules.principals()

    fuzz.run(2_000, lambda mutator: text_of(mutator, [ACCESS_FILE]), target)


def test_only_the_token_itself_lets_in(fuzz: Fuzz, memory_path: Path) -> None:
    file = memory_path / "access.toml"
    file.touch(mode=0o600)
    file.write_text(ACCESS_FILE)
    access = Access(file, None, Role.READ, ManualClock())
    origin = Origin(Carrier.TLS)

    def target(token: str) -> None:
        with suppress(UnauthenticatedError):
            assert "engine" == access.admit(origin, token).name
            assert token == TOKEN

    fuzz.run(10_000, lambda mutator: mutator.mutated([TOKEN.encode(), JWT.encode()]).decode("latin-1"), target)


def test_published_keys_and_their_tokens_are_read_or_refused(fuzz: Fuzz, memory_path: Path) -> None:
    """Nobody has the keys: no token lets in, whichever of the two is damaged."""
    pytest.importorskip("jwt", reason="needs the extra jwt")
    file = memory_path / "keys.json"
    file.write_text(KEYS_FILE)
    whole = JwtKeys(str(file), RULES, ManualClock())

    def target(made: tuple[bytes, str]) -> None:
        raw, token = made
        file.write_bytes(raw)
        keys = whole
        with suppress(ConfigError):
            keys = JwtKeys(str(file), RULES, ManualClock())
        for known in (whole, keys):
            with pytest.raises(UnauthenticatedError):
                known.verify(token)

    def make(mutator: Mutator) -> tuple[bytes, str]:
        return text_of(mutator, [KEYS_FILE]), mutator.mutated([JWT.encode()]).decode("latin-1")

    fuzz.run(1_000, make, target)


def test_a_file_of_settings_is_read_or_refused(fuzz: Fuzz, memory_path: Path) -> None:
    file = memory_path / "kvstore.toml"

    file.write_text(CONFIG_FILE)
    assert 64 << 20 == load_config(file=file, environ={}).config.tiers.host.capacity_bytes

    def target(raw: bytes) -> None:
        file.write_bytes(raw)
        with suppress(ConfigError):
            load_config(file=file, environ={})

    fuzz.run(1_000, lambda mutator: text_of(mutator, [CONFIG_FILE, ACCESS_FILE]), target)


@pytest.mark.parametrize("name", ["namespace.toml", "namespace.json"])
def test_a_file_of_a_namespace_is_read_or_refused(fuzz: Fuzz, memory_path: Path, name: str) -> None:
    file = memory_path / name
    table = {"model": "m", "revision": "r", "layout": {"layers": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}}
    seeds = [NAMESPACE_FILE] if name.endswith("toml") else [json.dumps({**table, "root": {"adapter": "lora"}})]
    nothing = dict.fromkeys(
        ("model", "revision", "tenant", "secret_file", "layout", "adapter", "salt", "weights_epoch")
    )
    arguments = argparse.Namespace(namespace=str(file), **nothing)
    file.write_text(seeds[0])
    assert 4 == prompt.namespace_of(arguments).layout.layers

    def target(raw: bytes) -> None:
        file.write_bytes(raw)
        with suppress(*REFUSED):
            prompt.namespace_of(arguments)
        with suppress(*REFUSED):
            prompt.root_of(arguments)

    fuzz.run(1_000, lambda mutator: text_of(mutator, seeds), target)


def test_a_file_of_tokens_is_read_or_refused(fuzz: Fuzz, memory_path: Path) -> None:
    file = memory_path / "tokens"
    arguments = argparse.Namespace(tokens=[], tokens_file=str(file))

    def target(raw: bytes) -> None:
        file.write_bytes(raw)
        with suppress(InvalidTokensError):
            assert all(isinstance(token, (int, bytes)) for token in prompt.tokens_of(arguments))

    fuzz.run(5_000, lambda mutator: text_of(mutator, ["1 2 3, 4\n5", "[1, 2, 3, 4294967295]"]), target)
