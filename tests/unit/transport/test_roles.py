"""The table of who may call what has every call that there is, on both lanes, and no other."""

from __future__ import annotations

import pytest

from kvstore.errors import PermissionDeniedError
from kvstore.transport import wire
from kvstore.transport.principal import Principal, caller, enter
from kvstore.transport.roles import EVERY_TENANT_CALLS, OPEN_CALLS, OPEN_SERVICES, ROLES, Role, role_for, role_of
from kvstore.transport.server import SERVICES
from kvstore.v1 import admin_service_pb2

CALLS = {method.name for service in SERVICES for method in service.methods}


def test_every_call_of_the_api_is_in_the_table_and_nothing_else():
    assert CALLS == set(ROLES)


def test_every_method_of_the_fast_lane_is_in_the_table_or_open():
    assert set() == {method.name for method in wire.Method} - set(ROLES) - OPEN_CALLS
    assert set() == OPEN_CALLS & set(ROLES)


def test_calls_of_operators_are_for_administrators():
    service = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
    open_to_readers = {
        "ListNodes",
        "Locate",
        "FindWriters",
        "GetDiagnosis",
    }  # routers, writers, the doctor
    assert {Role.ADMIN} == {role_for(method.name) for method in service.methods if method.name not in open_to_readers}
    assert {Role.READ} == {role_for(name) for name in open_to_readers}


def test_a_call_that_nobody_wrote_down_is_for_administrators():
    assert Role.ADMIN is role_for("Invented")


def test_what_is_open_to_all_tells_of_no_tenant():
    assert ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection") == OPEN_SERVICES


@pytest.mark.parametrize("method", sorted(CALLS))
@pytest.mark.parametrize("role", Role)
def test_a_role_may_do_what_it_includes_and_nothing_more(method: str, role: Role):
    principal = Principal("somebody", None, role, "local")
    if role >= ROLES[method]:
        principal.require(method)
    else:
        with pytest.raises(PermissionDeniedError, match=f"{method} needs the role {ROLES[method].word}"):
            principal.require(method)


@pytest.mark.parametrize("method", sorted(CALLS))
def test_what_is_about_the_blocks_of_all_tenants_is_not_for_one(method: str):
    operator = Principal("somebody", "team", Role.ADMIN, "local")
    if method in EVERY_TENANT_CALLS:
        with pytest.raises(PermissionDeniedError, match=f"{method} is about the blocks of all tenants"):
            operator.require(method)
    else:
        operator.require(method)


@pytest.mark.parametrize("word", ["", "Admin", "root", None, 3, ["admin"]])
def test_other_words_are_no_roles(word: object):
    with pytest.raises(ValueError, match="expected one of read, write, admin"):
        role_of(word)


def test_who_calls_is_who_was_let_in_last():
    principal = Principal("somebody", "team", Role.READ, "local")
    enter(principal)
    assert principal is caller()
