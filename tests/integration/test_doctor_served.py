"""The doctor of a store that is served: told of its lookups, asked by clients and on the command line."""

from __future__ import annotations

import gc
import inspect
import json
import weakref
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.cli import main
from kvstore.clock import SystemClock
from kvstore.doctor import Cause, Doctor, LookupWatch
from kvstore.errors import InvalidArgumentError, PermissionDeniedError
from kvstore.testing.securing import Keyring
from kvstore.testing.serving import ServedStore, grpc_address
from kvstore.tokens import as_token_array

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.store import Store

LAYOUT = kvstore.KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_tokens=16)
OURS = kvstore.Namespace(model="m", revision="r", layout=LAYOUT, tenant="ours")
THEIRS = kvstore.Namespace(model="m", revision="r", layout=LAYOUT, tenant="theirs")
DICE = np.random.default_rng(7)
SYSTEM = DICE.integers(0, 50_000, 1024, dtype=np.uint32)


def stamped() -> np.ndarray:
    """The same prompt behind a text that is new each time."""
    return np.concatenate([DICE.integers(0, 50_000, 20, dtype=np.uint32), SYSTEM])


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(None, host_bytes=16 << 20) as opened:
        yield opened


@pytest.fixture
def doctor(store: Store) -> Iterator[Doctor]:
    with closing(Doctor(SystemClock(), cpu_share_max=1)) as made:
        store.observe_lookups(LookupWatch(made))
        yield made


@pytest.mark.parametrize("lane", ["wire", "grpc"])
def test_what_clients_look_up_is_diagnosed_and_told_to_them(store: Store, doctor: Doctor, lane: str):
    with ServedStore(store, doctor=doctor) as served:
        address = served.addresses[0] if lane == "wire" else grpc_address(served.addresses[0])
        with kvstore.connect(address) as client:
            for _ in range(10):
                client.match(OURS, stamped())
            doctor.wait()
            found = client.diagnosis()
            assert ({Cause.COLD: 1, Cause.VOLATILE: 9}, 10, 0) == (found.causes, found.requests, found.skipped)
            (finding,) = found.findings
            assert ("ours", "m", Cause.VOLATILE, 0.9) == (finding.tenant, finding.model, finding.cause, finding.share)
            assert finding.tokens_per_day > 0
            client.reset_diagnosis()
            assert 0 == client.diagnosis().requests


def test_lookups_that_do_not_count_and_digests_are_not_looked_at(store: Store, doctor: Doctor):
    digests = kvstore.Namespace(
        model="m",
        revision="r",
        layout=kvstore.KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", symbols="digests"),
    )
    store.match(OURS, SYSTEM, touch=False)
    store.match(digests, [bytes(32)] * 4)
    store.match(OURS, SYSTEM)
    store.match(OURS, SYSTEM, request_id="a")
    store.match(OURS, SYSTEM, request_id="a")
    doctor.wait()
    assert 2 == doctor.report().requests


def test_prompts_kept_apart_by_a_salt_are_told_as_such_and_those_of_another_tenant_are_not(
    store: Store, doctor: Doctor
):
    store.match(OURS, SYSTEM, root=kvstore.Root(salt="one"))
    store.match(OURS, SYSTEM, root=kvstore.Root(salt="two"))
    store.match(THEIRS, SYSTEM)
    doctor.wait()
    report = doctor.report()
    assert {Cause.COLD: 2, Cause.SPLIT: 1} == report.causes
    assert "kept apart by their root" in report.findings[0].advice


def test_a_tenant_is_told_what_is_its_own_and_cannot_reset(store: Store, doctor: Doctor, tmp_path: Path):
    keyring = Keyring(tmp_path)
    tokens = {name: keyring.let_in(name, tenant, "admin") for name, tenant in (("a", "ours"), ("root", "*"))}
    for namespace in (OURS, OURS, THEIRS):
        store.match(namespace, stamped())
    doctor.wait()
    with ServedStore(store, ["tls://127.0.0.1:0"], security=keyring.security(), doctor=doctor) as served:
        told = {}
        for name, token in tokens.items():
            with kvstore.connect(served.addresses[0], tls_ca=keyring.ca, token_file=token) as client:
                told[name] = client.diagnosis()
                if name == "a":
                    with pytest.raises(PermissionDeniedError):
                        client.reset_diagnosis()
    assert (2, 3) == (told["a"].requests, told["root"].requests)
    assert {"ours"} == {finding.tenant for finding in told["a"].findings}


def test_a_server_without_a_doctor_says_how_to_get_one(store: Store):
    with (
        ServedStore(store) as served,
        kvstore.connect(served.addresses[0]) as client,
        pytest.raises(InvalidArgumentError, match=r"doctor\.enabled=true"),
    ):
        client.diagnosis()


def test_the_command_tells_the_table_and_counts_anew(store: Store, doctor: Doctor, capsys: pytest.CaptureFixture[str]):
    for _ in range(4):
        store.match(OURS, stamped())
    doctor.wait()
    with ServedStore(store, doctor=doctor) as served:
        asked = ["doctor", "--address", served.addresses[0]]
        assert 0 == main([*asked, "--json"])
        row = json.loads(capsys.readouterr().out)
        assert ({"cold": 1, "volatile": 3}, "volatile") == (row["causes"], row["findings"][0]["cause"])
        assert 0 == main(asked)
        table = capsys.readouterr().out
        assert "4 lookups" in table
        assert "75.0%" in table
        assert 0 == main([*asked, "--reset"])
        assert 0 == main([*asked, "--json"])
        assert 0 == json.loads(capsys.readouterr().out.splitlines()[-1])["requests"]


def test_nothing_of_a_prompt_nor_of_a_salt_stays_in_the_doctor(doctor: Doctor):
    watch = LookupWatch(doctor)
    match = kvstore.PrefixMatch(OURS, kvstore.Root(salt="s" * 20), as_token_array(SYSTEM), 0, ())
    prompt = weakref.ref(match.prompt)
    watch.see(match)
    doctor.wait()
    assert 1 == doctor.report().requests
    roots = [one for one in gc.get_referrers(match.root) if one is not match]
    assert [] == [one for one in roots if not inspect.isframe(one)]
    del match, roots
    assert prompt() is None
