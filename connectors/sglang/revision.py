"""Which weights an engine of SGLang has loaded, and how it computes with them."""

from __future__ import annotations

import json
from typing import Any

from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.vllm.fingerprint import model_fingerprint

_COMPUTING = (
    "dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args",
    "model_loader_extra_config", "attention_backend", "speculative_algorithm", "speculative_draft_model_path",
)  # fmt: skip


def find_revision(server_args: Any, version: str) -> str:  # noqa: ANN401  # SGLang's own class
    """A fingerprint of the weights' files and of how they are computed with.

    Reads every file once; raises UnsupportedModelError where there are none.
    """
    if str(server_args.load_format).endswith("dummy"):
        raise UnsupportedModelError('the weights are dummies; give them a name in the setting "revision"')
    detail = {name: str(getattr(server_args, name, None)) for name in _COMPUTING}
    text = json.dumps({"sglang": version, **detail}, sort_keys=True)
    return model_fingerprint(_checkpoint_folder(server_args.model_path, server_args.revision), text)


def _checkpoint_folder(model: str, revision: str | None) -> str:
    """Where the engine found its weights: the folder it was given, or the snapshot that it downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return model
