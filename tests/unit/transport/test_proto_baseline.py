"""The API only grows: whatever the last release had is there under the same numbers and types."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from kvstore.v1 import admin_service_pb2, block_pb2, cache_service_pb2

BASELINE = Path(__file__).parents[3] / "protos" / "baseline" / "kvstore-v1.binpb"
Shape = dict[str, object]


def message_shape(prefix: str, message: descriptor_pb2.DescriptorProto) -> Shape:
    """Every field by message and number, with all that a peer relies on."""
    name = f"{prefix}.{message.name}"
    shape: Shape = {
        f"{name}#{field.number}": (field.name, field.type, field.label, field.type_name, field.HasField("oneof_index"))
        for field in message.field
    }
    for nested in message.nested_type:
        shape |= message_shape(name, nested)
    for enum in message.enum_type:
        shape |= enum_shape(name, enum)
    return shape


def enum_shape(prefix: str, enum: descriptor_pb2.EnumDescriptorProto) -> Shape:
    return {f"{prefix}.{enum.name}#{value.number}": value.name for value in enum.value}


def shape_of(file: descriptor_pb2.FileDescriptorProto) -> Shape:
    shape: Shape = {}
    for message in file.message_type:
        shape |= message_shape(file.package, message)
    for enum in file.enum_type:
        shape |= enum_shape(file.package, enum)
    for service in file.service:
        for method in service.method:
            streams = (method.client_streaming, method.server_streaming)
            shape[f"{file.package}.{service.name}/{method.name}"] = (method.input_type, method.output_type, streams)
    return shape


def shape_now() -> Shape:
    shape: Shape = {}
    for module in (admin_service_pb2, block_pb2, cache_service_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        shape |= shape_of(file)
    return shape


def released() -> Shape:
    files = descriptor_pb2.FileDescriptorSet.FromString(BASELINE.read_bytes())
    shape: Shape = {}
    for file in files.file:
        if file.package == "kvstore.v1":
            shape |= shape_of(file)
    return shape


def broken(before: Shape, now: Shape) -> list[str]:
    return [name for name, meaning in before.items() if now.get(name) != meaning]


def test_nothing_of_the_last_release_has_changed():
    before = released()
    assert len(before) > 100
    assert [] == broken(before, shape_now())


@pytest.mark.parametrize("name", ["kvstore.v1.MatchRequest#2", "kvstore.v1.CacheService/Match"])
def test_a_change_would_be_seen(name: str):
    changed = shape_now()
    del changed[name]
    assert [name] == broken(released(), changed)
