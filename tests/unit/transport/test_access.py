"""Who is let in: by the access file, compared with a naive reading of it; by certificates; by being local."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError, UnauthenticatedError
from kvstore.testing.manual_clock import ManualClock
from kvstore.transport.access import Access, hash_of, load_rules, new_token
from kvstore.transport.principal import Carrier, Origin
from kvstore.transport.roles import Role

LOCAL = Origin(Carrier.UNIX, same_user=True)
ELSEWHERE = Origin(Carrier.LOOPBACK)
TOKEN = "kvs_known"


def written(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def entry(token: str = TOKEN, name: str = "engines", tenant: str = "team", role: str = "write", more: str = "") -> str:
    return f'[[token]]\nname = "{name}"\nhash = "{hash_of(token)}"\ntenant = "{tenant}"\nrole = "{role}"\n{more}\n'


def certificate(match: str, name: str = "node", tenant: str = "*", role: str = "admin") -> str:
    return f'[[certificate]]\nname = "{name}"\nmatch = "{match}"\ntenant = "{tenant}"\nrole = "{role}"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "access.toml", entry())


def access(file: Path | None, local_role: Role = Role.WRITE, now: float = 0.0) -> Access:
    return Access(file, None, local_role, ManualClock(unix=now))


@settings(max_examples=100, deadline=None)
@given(
    known=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(Role)), unique_by=lambda pair: pair[0]),
    asked=st.sampled_from("abcdefghij"),
)
def test_a_token_lets_in_who_a_walk_through_the_file_finds(
    tmp_path_factory: pytest.TempPathFactory, known: list[tuple[str, Role]], asked: str
):
    text = "".join(entry(token, f"name {token}", f"tenant {token}", role.word) for token, role in known)
    rules = load_rules(written(tmp_path_factory.mktemp("access") / "a", text))
    found = rules.by_token(asked)
    expected = [(f"name {token}", f"tenant {token}", role) for token, role in known if token == asked]
    assert expected == ([] if found is None else [(found.name, found.tenant, found.role)])


def test_tokens_are_new_each_time_and_long_enough():
    tokens = {new_token() for _ in range(100)}
    assert (100, {47}) == (len(tokens), {len(token) for token in tokens})


def test_a_star_is_every_tenant(tmp_path: Path):
    rules = load_rules(written(tmp_path / "a", entry(tenant="*")))
    found = rules.by_token(TOKEN)
    assert found is not None
    assert found.tenant is None


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o666, 0o777])
def test_a_file_that_others_can_read_or_change_is_refused(file: Path, mode: int):
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}, expected .*: chmod 600"):
        load_rules(file)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_file_that_its_group_may_read_is_taken(file: Path, mode: int):
    file.chmod(mode)
    assert load_rules(file).by_token(TOKEN) is not None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[token]]\n", "token 1 has name None, expected a text"),
        (entry(role="root"), "role is 'root', expected one of read, write, admin"),
        (entry(tenant=""), "token 1 has tenant '', expected a text"),
        (entry() + entry("other"), "token 2 has the name 'engines' of another entry"),
        (entry().replace("sha256:", "md5:"), "has a hash that is not sha256: and 64 hex digits"),
        (entry(more="colour = 1"), "token 1 has 'colour', expected name, hash, tenant, role, expires"),
        (entry(more='expires = "soon"'), "has expires 'soon', expected a time such as 2027"),
        (certificate("node-7"), "has match 'node-7', expected CN:, DNS:, URI: or IP: and a name"),
        ("token = 3", r"token is no list of tables, expected \[\[token\]\]"),
        ("colour = 1", "has 'colour', expected tables"),
        ("[[token", "access file .*: "),
        ("\x00", "access file .*: "),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, told: str):
    with pytest.raises(ConfigError, match=told):
        load_rules(written(tmp_path / "a", text))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent cannot be read: No such file"):
        load_rules(tmp_path / "absent")


@pytest.mark.parametrize("token", ["", "kvs_other", "kvs_known ", "kvs_know", "a.b.c", "x" * 9000, "ü"])
@pytest.mark.parametrize("origin", [LOCAL, ELSEWHERE])
def test_with_a_file_nobody_comes_in_without_a_token_of_it(file: Path, token: str, origin: Origin):
    with pytest.raises(UnauthenticatedError):
        access(file).admit(origin, token)
    assert "team" == access(file).admit(origin, TOKEN).tenant


def test_a_token_ends_when_it_says(tmp_path: Path):
    file = written(tmp_path / "a", entry(more="expires = 1970-01-01T00:01:40Z"))
    assert "engines" == access(file, now=99).admit(ELSEWHERE, TOKEN).name
    with pytest.raises(UnauthenticatedError, match="not known here, or no longer"):
        access(file, now=100).admit(ELSEWHERE, TOKEN)


def test_a_certificate_lets_in_who_is_known_by_one_of_its_names(tmp_path: Path):
    file = written(tmp_path / "a", certificate("DNS:node-7") + certificate("CN:node-8", "other", "team", "read"))
    door = access(file)
    found = door.admit(Origin(Carrier.TLS, certificate_names=("DNS:node-9", "DNS:node-7")), "")
    assert ("node", None, Role.ADMIN) == (found.name, found.tenant, found.role)
    for names in ((), ("DNS:node-8",), ("CN:node-7",), ("CN:NODE-8",)):
        with pytest.raises(UnauthenticatedError):
            door.admit(Origin(Carrier.TLS, certificate_names=names), "")


def test_a_token_says_more_than_a_certificate(tmp_path: Path):
    file = written(tmp_path / "a", certificate("CN:node") + entry())
    origin = Origin(Carrier.TLS, certificate_names=("CN:node",))
    assert "engines" == access(file).admit(origin, TOKEN).name
    with pytest.raises(UnauthenticatedError):
        access(file).admit(origin, "kvs_other")


@pytest.mark.parametrize("role", Role)
def test_without_a_file_the_servers_user_is_the_administrator_on_its_socket_alone(role: Role):
    door = access(None, role)
    found = {origin: door.admit(origin, "").role for origin in (LOCAL, ELSEWHERE, Origin(Carrier.UNIX))}
    assert {LOCAL: Role.ADMIN, ELSEWHERE: role, Origin(Carrier.UNIX): role} == found


def test_a_new_file_holds_from_then_on_and_a_bad_one_never(tmp_path: Path):
    file = written(tmp_path / "a", entry() + entry("kvs_second", "second"))
    door = access(file)
    first, second = door.admit(ELSEWHERE, TOKEN), door.admit(ELSEWHERE, "kvs_second")
    written(file, entry(role="read") + entry("kvs_second", "second"))
    door.reload()
    assert (False, True) == (door.holds(first), door.holds(second))
    assert Role.READ is door.admit(ELSEWHERE, TOKEN).role
    written(file, "[[token")
    with pytest.raises(ConfigError):
        door.reload()
    assert Role.READ is door.admit(ELSEWHERE, TOKEN).role


def test_no_token_and_no_hash_is_in_what_is_shown_of_a_caller(file: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    found = access(file).admit(ELSEWHERE, TOKEN)
    with pytest.raises(UnauthenticatedError) as refused:
        access(file).admit(ELSEWHERE, "kvs_hidden")
    shown = f"{found!r} {refused.value} {caplog.text}"
    assert [] == [text for text in (TOKEN, "kvs_hidden", hash_of(TOKEN)) if text in shown]
