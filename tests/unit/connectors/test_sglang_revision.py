from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.sglang.revision import find_revision


@pytest.fixture
def folder(tmp_path):
    def make(name, weights, file="model.safetensors", config="config.json"):
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / file).write_bytes(weights)
        (path / config).write_text("{}")
        return str(path)

    return make


def arguments(path, **others):
    defaults = {"load_format": "auto", "dtype": "float16", "revision": None, "lora_paths": None}
    return SimpleNamespace(model_path=path, **(defaults | others))


def adapter(folder, weights):
    path = folder("adapter", weights, "adapter_model.safetensors", "adapter_config.json")
    return SimpleNamespace(lora_name="mine", lora_path=path)


def test_a_revision_is_of_what_decides_the_bytes_of_pages(folder):
    path, draft = folder("model", b"weights"), folder("draft", b"drafts")
    seen = [
        find_revision(arguments(path), "0.5.23"),
        find_revision(arguments(path), "0.5.24"),
        find_revision(arguments(path, dtype="bfloat16"), "0.5.23"),
        find_revision(arguments(path, kv_cache_dtype="fp8_e5m2"), "0.5.23"),
        find_revision(arguments(path, speculative_draft_model_path=draft), "0.5.23"),
        find_revision(arguments(path, lora_paths=[adapter(folder, b"one")]), "0.5.23"),
        find_revision(arguments(path, lora_paths=[adapter(folder, b"two, at the same path")]), "0.5.23"),
        find_revision(arguments(folder("model", b"other weights")), "0.5.23"),
    ]
    assert len(set(seen)) == len(seen)
    assert find_revision(arguments(folder("model", b"weights")), "0.5.23") == seen[0]


def test_weights_that_cannot_be_read_are_refused_by_what_to_do(folder, tmp_path):
    with pytest.raises(UnsupportedModelError, match="revision"):
        find_revision(arguments(str(tmp_path / "none")), "0.5.23")
    with pytest.raises(UnsupportedModelError, match="revision"):
        find_revision(arguments(folder("model", b"weights"), load_format="dummy"), "0.5.23")
    with pytest.raises(UnsupportedModelError, match="revision"):
        find_revision(arguments(folder("model", b"weights"), lora_paths=["name=somewhere"]), "0.5.23")
