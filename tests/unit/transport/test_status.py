from __future__ import annotations

import grpc
import pytest

from kvstore import errors
from kvstore.transport.status import DETAILS_CHARS_MAX, UnknownSessionError, error_of, status_of

ALL_ERRORS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KvstoreError)
]


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_every_error_crosses_the_wire_with_its_class_and_message(kind: type[errors.KvstoreError]):
    code, details, metadata = status_of(kind("what, seen, expected"))
    assert code is not grpc.StatusCode.OK
    restored = error_of(code, details, metadata, "host:1")
    assert type(restored) is kind
    assert str(restored) == "what, seen, expected"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.NoSpaceError, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.LayoutMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.ClosedError, grpc.StatusCode.FAILED_PRECONDITION),
        (errors.InvalidTokensError, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED),
        (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
        (errors.StorageFormatError, grpc.StatusCode.INTERNAL),
        (UnknownSessionError, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_codes_are_those_that_other_languages_expect(error: type[errors.KvstoreError], expected: grpc.StatusCode):
    assert expected is status_of(error("x"))[0]


def test_no_space_says_when_to_try_again():
    _, _, metadata = status_of(errors.NoSpaceError("full"))
    assert dict(metadata)["retry-after-ms"] == "1000"


def test_a_subclass_from_elsewhere_crosses_as_the_class_it_derives_from():
    class OwnError(errors.StorageError):
        pass

    assert type(error_of(*status_of(OwnError("x")), "host:1")) is errors.StorageError


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.UnavailableError),
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.INTERNAL, errors.UnavailableError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.UnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.NoSpaceError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgumentError),
        (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDeniedError),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.ClosedError),
        (grpc.StatusCode.UNAUTHENTICATED, UnknownSessionError),
    ],
)
def test_a_status_without_a_class_name_still_has_a_meaning(code: grpc.StatusCode, expected: type[Exception]):
    assert type(error_of(code, "details", (), "host:1")) is expected


def test_an_absent_server_is_named_with_what_to_do():
    message = str(error_of(grpc.StatusCode.UNAVAILABLE, "refused", (), "unix:///run/s"))
    assert message == "cannot reach unix:///run/s (refused); is `kvstore serve` running there?"


def test_long_messages_are_cut_to_what_a_header_holds():
    assert len(status_of(errors.ClosedError("x" * 10**6))[1]) == DETAILS_CHARS_MAX
