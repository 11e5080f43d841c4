from __future__ import annotations

import json

import pytest

import kvstore
from kvstore.connectors import check_sglang
from kvstore.connectors.check import CheckOptions, Finding, Verdict, check_engine

SOUND = Finding("store", Verdict.OK, "in this process")


@pytest.fixture
def store():
    with kvstore.open(None, host_bytes=64 << 20) as opened:
        yield opened


@pytest.fixture
def installed(monkeypatch):
    """SGLang, as far as the checker asks whether it is there."""
    monkeypatch.setattr(check_sglang, "version", lambda _: check_sglang.TESTED)
    monkeypatch.setattr(check_sglang, "_interface", lambda: Finding("interface", Verdict.OK, "as expected"))


def test_an_engine_that_is_not_installed_is_said_so(store):
    report = check_engine("sglang", CheckOptions(), store, SOUND)
    assert (report.works, report.findings[-1].subject) == (False, "engine")
    assert "not installed" in report.findings[-1].sentence


def test_an_engine_that_cannot_be_imported_ends_the_check(store, monkeypatch):
    monkeypatch.setattr(check_sglang, "version", lambda _: check_sglang.TESTED)
    report = check_engine("sglang", CheckOptions(), store, SOUND)
    assert [finding.verdict for finding in report.findings] == [Verdict.OK, Verdict.OK, Verdict.FAILED]
    assert "cannot be imported" in report.findings[-1].sentence


@pytest.mark.usefixtures("installed")
def test_pages_of_a_made_up_model_go_there_and_back(store):
    report = check_engine("sglang", CheckOptions(), store, SOUND)
    assert [finding.verdict for finding in report.findings] == [Verdict.OK] * 6
    assert sum(tier.blocks for tier in store.stats().tiers.values()) == 0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("config", "page_bytes"),
    [
        (
            {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128},
            4 * 2 * 2 * 16 * 2,
        ),
        ({"num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32, "dtype": "float32"}, 3 * 2 * 4 * 32 * 4),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "kv_lora_rank": 48, "qk_rope_head_dim": 16}, 2 * 64 * 2),
        ({"text_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}}, 2 * 2 * 8 * 2),
    ],
    ids=["grouped heads", "float32", "latent", "text of many modes"],
)
def test_a_models_pages_are_told_from_its_configuration(store, tmp_path, config, page_bytes):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    report = check_engine("sglang", CheckOptions(model=str(tmp_path), block_tokens=32), store, SOUND)
    assert report.works
    assert check_sglang._geometry(config.get("text_config", config), 32).page_bytes == 32 * page_bytes


@pytest.mark.usefixtures("installed")
def test_a_folder_without_a_model_fails_by_name(store, tmp_path):
    report = check_engine("sglang", CheckOptions(model=str(tmp_path)), store, SOUND)
    assert (report.works, report.findings[-1].subject) == (False, "model")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (None, "there is no config.json in that folder"),
        ('{"num_hidden_layers": ', "config.json is no JSON"),
        ("[]", "config.json is a list, expected a table"),
        ('{"text_config": 7}', "text_config of config.json is 7, expected a table"),
        ('{"num_attention_heads": 2}', "config.json has no 'num_hidden_layers'"),
        ('{"num_hidden_layers": "many", "num_attention_heads": 2, "head_dim": 8}', "'num_hidden_layers' is 'many'"),
        ('{"num_hidden_layers": 0, "num_attention_heads": 2, "head_dim": 8}', "'num_hidden_layers' is 0"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 0, "hidden_size": 8}', "'num_attention_heads' is 0"),
    ],
    ids=["none", "broken", "a list", "a number inside", "no layers", "words", "zero layers", "zero heads"],
)
def test_a_folder_without_a_configuration_that_can_be_is_one_clear_finding(config, sentence, store, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    report = check_engine("sglang", CheckOptions(model=str(tmp_path)), store, SOUND)
    assert (report.findings[-1].subject, report.findings[-1].verdict) == ("model", Verdict.FAILED)
    assert sentence in report.findings[-1].sentence
    assert "\n" not in report.findings[-1].sentence
