"""Settings: where values come from, what is refused, and that the tree agrees with the limits it feeds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from kvstore.config import (
    EVICTION_POLICIES,
    Config,
    LimitsConfig,
    StoreConfig,
    load_config,
    read_secret,
    settings,
    user_cache_dir,
)
from kvstore.errors import ConfigError
from kvstore.quota_config import QuotaConfig
from kvstore.radix.tree import POLICIES
from kvstore.store import StoreSettings
from kvstore.tier_config import HostConfig
from kvstore.transport.limits import ServiceLimits


def write(folder: Path, text: str) -> Path:
    file = folder / "kvstore.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path):
    file = write(
        tmp_path,
        """
        [server]
        grace_seconds = 1
        [tiers.host]
        capacity_bytes = "1GiB"
        [log]
        level = "error"
        """,
    )
    environ = {"KVSTORE_TIERS__HOST__CAPACITY_BYTES": "2GiB", "KVSTORE_LOG__LEVEL": "warning"}

    loaded = load_config(file=file, environ=environ, flags={"log.level": "debug"})

    assert (1.0, 2 * 2**30, "debug") == (
        loaded.config.server.grace_seconds,
        loaded.config.tiers.host.capacity_bytes,
        loaded.config.log.level,
    )
    origins = {row.key: row.origin for row in loaded.origins}
    assert str(file) == origins["server.grace_seconds"]
    assert "environment" == origins["tiers.host.capacity_bytes"]
    assert "flag" == origins["log.level"]
    assert "default" == origins["log.format"]


def test_no_source_gives_the_defaults():
    assert Config() == load_config(environ={}).config


def test_every_setting_can_be_given_as_its_own_default_by_its_variable():
    plain = [item for item in settings() if "<name>" not in item.key and item.default is not None]
    environ = {item.variable: item.default_text for item in plain if item.default_text}

    loaded = load_config(environ=environ)

    assert Config() == loaded.config
    assert {item.key for item in plain if item.default_text} == {
        row.key for row in loaded.origins if row.origin == "environment"
    }


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"flags": {"tiers.host.capacity": "1GiB"}}, "tiers.host.capacity_bytes"),
        ({"environ": {"KVSTORE_LOG__LEVLE": "info"}}, "log.level"),
        ({"flags": {"tenants.team-a.secret_file": "x"}}, "tenants.<name>.secret_files"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_one(source, named):
    with pytest.raises(ConfigError, match=f"nearest one is '{named}'"):
        load_config(**{"environ": {}, **source})


def test_variables_that_kubernetes_makes_for_a_service_are_left_alone():
    environ = {"KVSTORE_PORT": "tcp://10.0.0.1:7070", "KVSTORE_SERVICE_HOST": "10.0.0.1", "KVSTORE_DATA_DIR": "/data"}

    assert Config(data_dir="/data") == load_config(environ=environ).config


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("tiers.host.capacity_bytes", "12XB", "unknown unit 'XB'"),
        ("tiers.host.capacity_bytes", "lots", "expected a size such as"),
        ("tiers.host.capacity_bytes", "4KiB", "expected at least 1MiB"),
        ("server.grace_seconds", "3d", "expected at most 3600s"),
        ("server.grace_seconds", "soon", "expected a duration such as"),
        ("log.level", "loud", "expected one of debug, info, warning, error"),
        ("limits.sessions", "0", "expected at least 1"),
        ("limits.sessions", "many", "expected a whole number"),
        ("store.pinned_ratio_max", "1.5", "expected at most 1"),
        ("store.pinned_ratio_max", "half", "expected a number from 0 to 1"),
        ("server.listen", "a,,b", "expected a list of texts"),
    ],
)
def test_a_bad_value_is_one_line_with_key_value_and_what_is_expected(key, text, expected):
    with pytest.raises(ConfigError) as caught:
        load_config(environ={}, flags={key: text})
    assert str(caught.value).startswith(f"{key} is {text!r} (flag): ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["tiers.host.capacity_bytes = true", "server.grace_seconds = nan", "server.grace_seconds = inf", "log.level = 3",
     "limits.sessions = 1.5", "server.listen = [1]", "store.pinned_ratio_max = true"],
)  # fmt: skip
def test_a_value_of_the_wrong_type_in_a_file_is_refused(tmp_path, line):
    with pytest.raises(ConfigError, match=line.partition(" ")[0]):
        load_config(file=write(tmp_path, line), environ={})


def test_a_syntax_error_names_file_and_line(tmp_path):
    file = write(tmp_path, "[server]\nlisten = = 3\n")

    with pytest.raises(ConfigError) as caught:
        load_config(file=file, environ={})

    assert str(caught.value).startswith(f"{file}:2: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    file = tmp_path / "kvstore.toml"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError, match=r"kvstore\.toml"):
        load_config(file=file, environ={})


def test_tenants_are_read_by_name(tmp_path):
    file = write(tmp_path, '[tenants."team.a"]\nsecret_files = ["new", "old"]\n[tenants.b]\nsecret_files = "one"\n')

    tenants = load_config(file=file, environ={}).config.tenants

    assert {"team.a": ("new", "old"), "b": ("one",)} == {name: known.secret_files for name, known in tenants.items()}


def test_quotas_keep_the_order_of_the_file_and_can_be_overridden_by_number(tmp_path):
    tables = [f'[[quota]]\ntenant = "t{number}"\nhost_max = "{number}MiB"\npriority = 2\n' for number in range(1, 12)]
    file = write(tmp_path, "\n".join(tables))

    loaded = load_config(file=file, environ={"KVSTORE_QUOTA__2__HOST_MIN": "1MiB"}, flags={"quota.11.priority": "0.5"})

    quotas = loaded.config.quotas
    assert [f"t{number}" for number in range(1, 12)] == [quota.tenant for quota in quotas]
    assert (2**20, 2 * 2**20, 2.0, 0.5) == (
        quotas[1].host_min,
        quotas[1].host_max,
        quotas[1].priority,
        quotas[10].priority,
    )
    assert QuotaConfig(tenant="t1", host_max=2**20, priority=2.0) == quotas[0]
    assert "environment" == {row.key: row.origin for row in loaded.origins}["quota.2.host_min"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('host_min = "2MiB"\nhost_max = "1MiB"', "quota.1.host_min is 2097152, expected at most host_max"),
        ('disk_min = "1MiB"', "quota.1.disk_min is 1048576, expected at most the tier's capacity, which is 0"),
        ("priority = 0", "quota.1.priority is 0 .*expected a number above 0"),
        ("priority = nan", "quota.1.priority is nan .*expected a number above 0"),
        ("priority = true", "quota.1.priority is True .*expected a number above 0"),
        ('host_max = "-1"', "quota.1.host_max is '-1' .*expected a size"),
        ("host_maximum = 1", "unknown setting 'quota.1.host_maximum' .*nearest one is 'quota.<name>.host_max'"),
    ],
)
def test_a_quota_that_cannot_be_is_named_by_its_number(tmp_path, text, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config(file=write(tmp_path, f"[[quota]]\n{text}\n"), environ={})


def test_the_policies_that_can_be_chosen_are_those_of_the_index():
    assert EVICTION_POLICIES == POLICIES
    with pytest.raises(
        ConfigError, match=r"eviction_policy is 'mru' .*expected one of survival, survival_flops, lru, lfu"
    ):
        load_config(environ={}, flags={"store.eviction_policy": "mru"})


def test_disk_is_off_without_a_data_dir_and_on_with_one():
    assert load_config(environ={}).config.disk_bytes == 0
    assert load_config(environ={}, flags={"data_dir": "/d"}).config.disk_bytes == 10 * 2**30
    assert load_config(environ={}, flags={"data_dir": "/d", "tiers.disk.capacity_bytes": "0"}).config.disk_bytes == 0
    with pytest.raises(ConfigError, match="--data-dir"):
        load_config(environ={}, flags={"tiers.disk.capacity_bytes": "1GiB"})


def test_host_capacity_is_decided_at_start_unless_given():
    assert HostConfig(capacity_bytes=None) == load_config(environ={}).config.tiers.host


def test_the_limits_are_those_of_the_transport_and_the_store_with_the_same_defaults():
    assert asdict(ServiceLimits()) == asdict(LimitsConfig())
    others = ("events_bytes", "quotas", "codecs", "node_secret")
    assert {k: v for k, v in asdict(StoreSettings()).items() if k not in others} == asdict(StoreConfig())
    assert StoreSettings().events_bytes == Config().events.capacity_bytes


def test_each_setting_has_a_sentence_and_a_variable_of_its_own():
    known = settings()

    assert len(known) == len({item.variable for item in known})
    assert [] == [item.key for item in known if not item.rule.sentence.endswith(".")]


def test_a_secret_is_the_file_without_its_final_line_end(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"two\nlines\r\n")

    assert b"two\nlines" == read_secret(file)


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 1025, None])
def test_a_missing_empty_or_long_secret_is_refused_without_being_shown(tmp_path, content):
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError, match="secret file") as caught:
        read_secret(file)

    assert "xxx" not in str(caught.value)


def test_the_cache_folder_follows_xdg():
    assert Path("/c/kvstore") == user_cache_dir({"XDG_CACHE_HOME": "/c"})
    assert Path.home() / ".cache/kvstore" == user_cache_dir({"XDG_CACHE_HOME": "relative"})
