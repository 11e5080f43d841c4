"""`kvstore check hf` says before a server starts whether it will work, and what to do where it will not."""

from __future__ import annotations

import json
import sys

import pytest
import transformers

import kvstore
from kvstore.cli import main
from kvstore.connectors import check_huggingface
from kvstore.connectors.check import CHECKERS, CheckOptions, Finding, Verdict, check_engine
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.testing.serving import ServedStore

STORE = Finding("store", Verdict.OK, "a store")


@pytest.fixture(scope="module")
def real_store():
    with kvstore.open(None, host_bytes=64 << 20) as store:
        yield store


def verdicts(report):
    return {finding.subject: finding.verdict.value for finding in report.findings}


def test_a_tiny_model_is_made_up_and_works(real_store):
    report = check_engine("hf", CheckOptions(), real_store, STORE)
    assert dict.fromkeys(["store", "engine", "model", "layout", "block", "prompt"], "ok") == verdicts(report)
    assert report.works


@pytest.mark.parametrize("make", ["new_llama", "new_gemma3", "new_mistral", "new_gpt2"])
def test_a_model_of_a_folder_works_and_leaves_no_block(make, request, tmp_path):
    request.getfixturevalue(make)().save_pretrained(tmp_path)
    with kvstore.open(None, host_bytes=64 << 20) as store:
        report = check_engine("hf", CheckOptions(model=str(tmp_path), block_tokens=32), store, STORE)
        assert 0 == store.stats().tiers["host"].blocks
    assert report.works, report
    assert str(tmp_path) in report.findings[2].sentence


def test_a_configuration_without_weights_is_enough(new_llama, real_store, tmp_path):
    new_llama().config.save_pretrained(tmp_path)
    assert check_engine("hf", CheckOptions(model=str(tmp_path)), real_store, STORE).works


def test_a_model_that_cannot_be_cached_fails_with_the_reason(new_llama, real_store, tmp_path):
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    new_llama(rope_parameters=parameters).save_pretrained(tmp_path)
    report = check_engine("hf", CheckOptions(model=str(tmp_path)), real_store, STORE)
    assert "failed" == verdicts(report)["layout"]
    assert "dynamic" in report.findings[-1].sentence
    assert not report.works


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (None, "there is no config.json in that folder"),
        ('{"model_type": ', "config.json is no JSON"),
        ("[]", "config.json is a list, expected a table"),
        ('{"model_type": "llama"}', "there are no weights, and random ones would take"),
    ],
    ids=["none", "broken", "a list", "7 billion parameters by default"],
)
def test_a_configuration_that_cannot_be_tried_is_one_clear_finding(config, sentence, real_store, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    report = check_engine("hf", CheckOptions(model=str(tmp_path)), real_store, STORE)
    assert ("model", Verdict.FAILED) == (report.findings[-1].subject, report.findings[-1].verdict)
    assert sentence in report.findings[-1].sentence


def test_a_folder_without_a_model_fails(real_store, tmp_path):
    report = check_engine("hf", CheckOptions(model=str(tmp_path)), real_store, STORE)
    assert ("model", Verdict.FAILED) == (report.findings[-1].subject, report.findings[-1].verdict)


@pytest.mark.parametrize(
    ("version", "verdict"), [("5.3.0", "failed"), ("5.99.0", "warning"), ("6.0.0.dev0", "warning")]
)
def test_the_version_of_the_engine_is_looked_at(version, verdict, real_store, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", version)
    report = check_engine("hf", CheckOptions(), real_store, STORE)
    assert verdict == verdicts(report)["engine"]
    assert (verdict != "failed") == report.works


def test_an_engine_that_is_not_installed_fails_with_its_name(real_store, monkeypatch):
    monkeypatch.setitem(sys.modules, CHECKERS["hf"].partition(":")[0], None)
    report = check_engine("hf", CheckOptions(), real_store, STORE)
    assert ["ok", "failed"] == [finding.verdict.value for finding in report.findings]
    assert "install" in report.findings[-1].sentence


def test_a_store_that_changes_bytes_fails(store):
    store.faults.flip = True
    report = check_engine("hf", CheckOptions(), store, STORE)
    assert "failed" == verdicts(report)["block"]


@pytest.mark.parametrize("method", ["stage", "match", "load_into"])
def test_a_store_that_fails_is_a_finding(method, store):
    store.faults.errors[method] = UnavailableError("gone")
    report = check_engine("hf", CheckOptions(), store, STORE)
    assert not report.works
    assert "gone" in report.findings[-1].sentence


def test_a_store_without_room_fails_with_what_to_do(store):
    store.faults.stored_blocks_max = 0
    report = check_engine("hf", CheckOptions(), store, STORE)
    assert "host memory" in report.findings[-1].sentence


def test_an_engine_that_is_not_known_is_refused(store):
    with pytest.raises(InvalidArgumentError, match=r"'vlm'.*hf"):
        check_engine("vlm", CheckOptions(), store, STORE)


def test_the_command_tells_people_and_machines(tmp_path, capsys, real_store):
    address = f"unix://{tmp_path}/s"
    with ServedStore(real_store, [address]):
        assert 0 == main(["check", "hf", "--address", address])
        assert capsys.readouterr().out.splitlines()[-1] == "hf: works with kvstore here"
        assert 0 == main(["check", "hf", "--address", address, "--json"])
        told = json.loads(capsys.readouterr().out)
    assert (True, "hf") == (told["works"], told["engine"])
    assert {"subject", "verdict", "sentence"} == set(told["findings"][0])


def test_the_command_fails_where_nobody_listens_and_says_what_to_do(tmp_path, capsys):
    assert 1 == main(["check", "hf", "--address", f"unix://{tmp_path}/nobody"])
    told = capsys.readouterr().out
    assert "kvstore serve" in told
    assert "--embedded" in told


def test_the_command_works_without_a_sidecar(capsys):
    assert 0 == main(["check", "hf", "--embedded"])
    assert "embedded" in capsys.readouterr().out


def test_other_engines_are_a_mistake_on_the_command_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "nothing"])
    assert 2 == ended.value.code


def test_tested_versions_are_those_of_the_minimum_or_newer():
    assert all(tuple(map(int, version.split("."))) >= check_huggingface.MINIMUM for version in check_huggingface.TESTED)
