"""Which weights an engine of SGLang has loaded, and how it computes with them."""

from __future__ import annotations

import json
from typing import Any

from kvstore.connectors.checkpoint_files import AdapterDigests, model_fingerprint
from kvstore.connectors.common import UnsupportedModelError

_COMPUTING = (
    "dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args",
    "model_loader_extra_config", "speculative_algorithm",
)  # fmt: skip


def find_revision(server_args: Any, version: str) -> str:  # noqa: ANN401  # SGLang's own class
    """A fingerprint of the weights' files, of how they are computed with, of a drafting model and of adapters.

    SGLang's page hashes tell adapters of its start apart by name and path alone, so what is in their files belongs
    here. Reads every file once; raises UnsupportedModelError where there are none.
    """
    if str(server_args.load_format).endswith("dummy"):
        raise UnsupportedModelError('the weights are dummies; give them a name in the setting "revision"')
    detail = {name: str(getattr(server_args, name, None)) for name in _COMPUTING}
    draft = getattr(server_args, "speculative_draft_model_path", None)
    if draft:
        folder = _checkpoint_folder(draft, getattr(server_args, "speculative_draft_model_revision", None))
        detail["draft"] = model_fingerprint(folder, "draft")
    detail |= _adapters(server_args)
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


def _adapters(server_args: Any) -> dict[str, str]:  # noqa: ANN401  # SGLang's own class
    digests = AdapterDigests()
    found = {}
    for adapter in getattr(server_args, "lora_paths", None) or ():
        path = getattr(adapter, "lora_path", None)
        if not isinstance(path, str):
            raise UnsupportedModelError(f"the adapter {adapter!r:.80} names no folder; give all weights a `revision`")
        found[f"adapter {adapter.lora_name}"] = digests.digest(_checkpoint_folder(path, None))
    return found
