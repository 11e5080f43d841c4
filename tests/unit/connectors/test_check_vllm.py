"""What `kvstore check vllm` says of versions, settings and layouts; the whole of it runs in tests/engines."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import kvstore
from kvstore.connectors import check_vllm
from kvstore.connectors.check import CheckOptions, Finding, Verdict, check_engine
from kvstore.connectors.check_vllm import (
    MINIMUM,
    RECOMMENDED,
    TESTED,
    cache_config,
    check_folder,
    check_transfer,
    check_version,
    layout_sentence,
)
from kvstore.types import KvLayout


@dataclass
class Spec:
    window: int | None


def transfer_of(**changes):
    return SimpleNamespace(**RECOMMENDED | {"kv_connector_extra_config": {}} | changes)


@pytest.mark.parametrize(
    ("version", "verdict"), [("0.31.9", "failed"), ("0.32.0", "ok"), ("0.33.1", "warning"), ("1.0.0rc1", "warning")]
)
def test_the_version_of_the_engine_is_looked_at(version, verdict):
    found = check_version(version)
    assert verdict == found.verdict.value
    assert version in found.sentence


def test_tested_versions_are_those_of_the_minimum_or_newer():
    assert all(tuple(map(int, version.split("."))) >= MINIMUM for version in TESTED)


@pytest.mark.parametrize(
    ("changes", "verdict", "word"),
    [
        ({}, "ok", "unix:///run/kvstore.sock"),
        ({"kv_load_failure_policy": "fail"}, "warning", "recompute"),
        ({"kv_connector": "OtherConnector"}, "failed", "KvstoreConnector"),
        ({"kv_connector_extra_config": {"adress": "x"}}, "failed", "adress"),
        ({"kv_connector_extra_config": {"secret_file": "/nowhere/secret"}}, "failed", "/nowhere/secret"),
    ],
)
def test_the_settings_of_the_connector_are_looked_at(changes, verdict, word):
    found = list(check_transfer(transfer_of(**changes)))[-1]
    assert ("settings", verdict) == (found.subject, found.verdict.value)
    assert word in found.sentence


def test_a_role_of_one_direction_is_a_warning():
    found = list(check_transfer(transfer_of(kv_role="kv_producer")))
    assert ["warning", "ok"] == [finding.verdict.value for finding in found]


def test_layers_that_cache_the_same_are_one_group():
    specs = {"a": Spec(None), "b": Spec(64), "c": Spec(None)}
    groups = cache_config(specs).kv_cache_groups
    assert [(Spec(None), ["a", "c"]), (Spec(64), ["b"])] == [(g.kv_cache_spec, g.layer_names) for g in groups]


def test_the_layout_is_told_with_the_bytes_of_a_block():
    layout = KvLayout(layers=2, kv_heads=4, head_dim=64, dtype="float32", block_tokens=128, tensor_parallel=2)
    assert "2 layers, 4 KV heads of 64, float32, 2 ranks; a block of 128 tokens has 512KiB" == layout_sentence(layout)


def test_without_vllm_the_engine_fails_with_what_to_do(store):
    report = check_engine("vllm", CheckOptions(), store, Finding("store", Verdict.OK, "a store"))
    assert ["ok", "failed"] == [finding.verdict.value for finding in report.findings]
    assert "install" in report.findings[-1].sentence


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (None, "there is no config.json in that folder"),
        ('{"model_type": ', "config.json is no JSON"),
        ("[]", "config.json is a list, expected a table"),
    ],
    ids=["none", "broken", "a list"],
)
def test_a_folder_without_a_configuration_that_can_be_is_one_clear_finding(config, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(check_vllm, "_version", lambda: "0.32.0")
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with kvstore.open(None, host_bytes=16 << 20) as store:
        report = check_engine("vllm", CheckOptions(model=str(tmp_path)), store, Finding("store", Verdict.OK, "here"))
    assert ("model", Verdict.FAILED) == (report.findings[-1].subject, report.findings[-1].verdict)
    assert sentence in report.findings[-1].sentence


def test_a_path_to_nothing_is_one_clear_finding_and_names_are_left_to_vllm(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder; expected a folder with a model"):
        check_folder(str(tmp_path / "nowhere"))
    check_folder("owner/name")
    check_folder(None)


def test_the_format_of_mistral_needs_no_other_configuration(tmp_path):
    (tmp_path / "params.json").write_text("{}", encoding="utf-8")
    check_folder(str(tmp_path))
