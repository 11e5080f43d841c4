from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.cluster.assembly import check_addresses, node_profile, open_membership
from kvstore.cluster.memory_directory import MemoryDirectory
from kvstore.cluster_config import ClusterConfig
from kvstore.errors import ConfigError, StorageError

SHARED = ClusterConfig(directory="valkey://cache")


def test_a_node_is_the_same_after_a_restart_if_it_has_a_data_directory(tmp_path: Path) -> None:
    first = node_profile(SHARED, str(tmp_path))
    assert first == node_profile(SHARED, str(tmp_path))
    assert 16 == len(first.identity)
    assert first.identity != node_profile(SHARED, "").identity


def test_a_name_that_is_given_counts_and_the_identity_stays(tmp_path: Path) -> None:
    first = node_profile(SHARED, str(tmp_path))
    named = node_profile(ClusterConfig(directory="valkey://cache", node="seven"), str(tmp_path))
    assert ("seven", first.identity) == (named.name, named.identity)


def test_nodes_of_one_host_without_data_have_names_of_their_own() -> None:
    assert node_profile(SHARED, "").name != node_profile(SHARED, "").name


def test_a_node_alone_leaves_nothing_in_its_data_directory(tmp_path: Path) -> None:
    node_profile(ClusterConfig(), str(tmp_path))
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "[]", '{"name": "a"}', '{"name": "a", "identity": "xy"}'])
def test_a_damaged_name_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    (tmp_path / "node.json").write_text(content)
    with pytest.raises(StorageError, match=r"node\.json"):
        node_profile(SHARED, str(tmp_path))
    assert content == (tmp_path / "node.json").read_text()


def test_the_identity_is_written_as_json(tmp_path: Path) -> None:
    profile = node_profile(SHARED, str(tmp_path))
    kept = json.loads((tmp_path / "node.json").read_text())
    assert {"name": profile.name, "identity": profile.identity.hex()} == kept


def test_without_an_address_the_directory_is_in_memory() -> None:
    assert isinstance(open_membership(ClusterConfig(), SystemClock()), MemoryDirectory)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"prefix-kvstore\[cluster\]"):
        open_membership(SHARED, SystemClock())


def test_a_password_comes_from_its_file(tmp_path: Path) -> None:
    missing = ClusterConfig(directory="valkey://cache", directory_password_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="none"):
        open_membership(missing, SystemClock())


def test_files_for_the_directory_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path) -> None:
    over_tls = replace(SHARED, directory="valkeys://cache")
    with pytest.raises(ConfigError, match=r"cluster\.directory_tls_\*: .*nowhere"):
        open_membership(replace(over_tls, directory_tls_ca=str(tmp_path / "nowhere")), SystemClock())
    with pytest.raises(ConfigError, match=r"cluster\.directory_tls_\*: .* belong together"):
        open_membership(replace(over_tls, directory_tls_key=str(tmp_path)), SystemClock())


def test_files_for_the_directory_are_refused_where_nobody_would_use_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="say valkeys://"):
        open_membership(replace(SHARED, directory_tls_ca=str(tmp_path)), SystemClock())


ANY = ["tls://0.0.0.0:7070", "grpc+tls://[::]:7070"]


@pytest.mark.parametrize("address", ANY)
def test_an_address_that_each_node_takes_for_itself_is_not_told(address: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.advertise .* such as .*tls://node-7\.example:7070"):
        check_addresses(SHARED, ["unix:///run/kvstore.sock", address])
    with pytest.raises(ConfigError, match=r"cluster\.advertise names"):
        check_addresses(replace(SHARED, advertise=(address,)), ["127.0.0.1:0"])
    check_addresses(replace(SHARED, advertise=("tls://node-3:7070",)), [address])
    check_addresses(ClusterConfig(), [address])


@pytest.mark.parametrize("address", ["node-3", "http://node-3:7070", "node-3:0", "unix://relative"])
def test_an_address_that_nobody_can_connect_to_is_not_told(address: str) -> None:
    with pytest.raises(ConfigError, match=address):
        check_addresses(replace(SHARED, advertise=("[::1]:7070", address)), [])


def test_a_port_that_is_chosen_at_the_start_is_told_then() -> None:
    check_addresses(SHARED, ["127.0.0.1:0"])
