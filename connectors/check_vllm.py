"""Checks vLLM: its version, its settings, a model and the layout that its KV would have, a block there and back.

No engine is started and no weights are loaded. The model is built on torch's meta device, where it takes no memory,
and asked as an engine does what its layers want to cache. Written for vLLM 0.32; imports it only when it checks.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
import tempfile
import time
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from kvstore.connectors.check import Finding, Verdict
from kvstore.connectors.checkpoint_files import has_weights, read_config
from kvstore.connectors.common import UnsupportedModelError, gives_back_what_it_takes
from kvstore.connectors.vllm import CONNECTOR
from kvstore.connectors.vllm.layout import checkpoint_folder, describe_layout, rank_layout
from kvstore.connectors.vllm.settings import VllmSettings, parse_settings
from kvstore.errors import ConfigError, KvstoreError, NoSpaceError
from kvstore.quantities import format_size
from kvstore.types import Namespace

# ruff: noqa: ANN401  # vLLM's own classes, of which it tells no types

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore.api import KvStore
    from kvstore.connectors.check import CheckOptions
    from kvstore.types import KvLayout

# The versions that the test suite runs with; the interface of others may differ.
TESTED = ("0.32",)
MINIMUM = (0, 32)
MODULE = "kvstore.connectors.vllm"
RECOMMENDED = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": MODULE,
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
# What the code of a model raises where it cannot be built here.
_BUILD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
_HYBRID_HINT = "with --disable-hybrid-kv-cache-manager vLLM keeps every token of every layer, and then it works"


def check(options: CheckOptions, store: KvStore) -> Iterator[Finding]:
    """See kvstore.connectors.check.Checker. `options.engine_arguments` are those of `vllm serve`."""
    with redirect_stdout(sys.stderr):  # whatever vLLM prints is not our answer
        yield from _findings(options, store)


def _findings(options: CheckOptions, store: KvStore) -> Iterator[Finding]:
    engine = check_version(_version())
    yield engine
    if engine.verdict is Verdict.FAILED:
        return
    try:
        check_folder(options.model)
    except ValueError as error:
        yield Finding("model", Verdict.FAILED, f"{options.model}: {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = _engine_config(options, folder)
        except _BUILD_ERRORS as error:
            yield Finding("model", Verdict.FAILED, f"vLLM refuses to start: {_first_line(error)}")
            return
        yield Finding("model", Verdict.OK, _model_sentence(config, options.model))
        for finding in check_transfer(config.kv_transfer_config):
            yield finding
            if finding.verdict is Verdict.FAILED:
                return
        settings = parse_settings(config.kv_transfer_config.kv_connector_extra_config)
        if options.model is not None:
            yield _check_weights(config, settings)
        yield from _check_cache(config, settings, store)


def check_version(version: str) -> Finding:
    """Whether this version of vLLM has the interface that the connector is written for."""
    numbers = tuple(int(number) for number in version.split(".")[:2])
    if numbers < MINIMUM:
        wanted = ".".join(str(number) for number in MINIMUM)
        return Finding("engine", Verdict.FAILED, f"vLLM {version}: expected vLLM {wanted}, install that")
    if f"{numbers[0]}.{numbers[1]}" not in TESTED:
        return Finding("engine", Verdict.WARNING, f"vLLM {version}: not tested, only {', '.join(TESTED)} is")
    return Finding("engine", Verdict.OK, f"vLLM {version}")


def check_folder(model: str | None) -> None:
    """Raise ValueError for a path to no model; names of models, and files of many formats, are left to vLLM."""
    if model is None or (Path(model) / "params.json").is_file():
        return
    if Path(model).is_dir() or (model.startswith(("/", "./", "../")) and not Path(model).exists()):
        read_config(Path(model))


def check_transfer(transfer: Any) -> Iterator[Finding]:
    """Whether `--kv-transfer-config` names the connector, and with settings that can be."""
    if transfer.kv_connector != CONNECTOR:
        sentence = f"kv_connector is {transfer.kv_connector!r}, expected {CONNECTOR!r}"
        yield Finding("settings", Verdict.FAILED, sentence)
        return
    try:
        settings = parse_settings(transfer.kv_connector_extra_config)
        settings.secret()
    except ConfigError as error:
        yield Finding("settings", Verdict.FAILED, f"kv_connector_extra_config: {error}")
        return
    if transfer.kv_role != "kv_both":
        sentence = f'kv_role is {transfer.kv_role!r}: the connector loads and stores whatever the role; set "kv_both"'
        yield Finding("settings", Verdict.WARNING, sentence)
    policy = transfer.kv_load_failure_policy
    if policy != "recompute":
        sentence = (
            f"kv_load_failure_policy is {policy!r}: a request whose blocks cannot be loaded ends with an error; "
            'set "recompute"'
        )
        yield Finding("settings", Verdict.WARNING, sentence)
    else:
        yield Finding("settings", Verdict.OK, f"the engine would ask {settings.address}, and recompute what fails")


def _check_weights(config: Any, settings: VllmSettings) -> Finding:
    """Whether there is a name for the weights: one that was given, or files to take a fingerprint of."""
    if settings.revision is not None:
        return Finding("weights", Verdict.OK, f"named by the setting revision: {settings.revision}")
    folder = checkpoint_folder(config.model_config.model, config.model_config.revision)
    if str(config.load_config.load_format).endswith("dummy") or not has_weights(folder):
        sentence = f'there are no weights at {folder!r} to take a fingerprint of: put them there, or set "revision"'
        return Finding("weights", Verdict.WARNING, sentence)
    return Finding("weights", Verdict.OK, "a fingerprint of their files names them, read at the engine's start")


def _check_cache(config: Any, settings: VllmSettings, store: KvStore) -> Iterator[Finding]:
    try:
        specs = _cache_specs(config)
    except (*_BUILD_ERRORS, UnsupportedModelError) as error:
        yield Finding("layout", Verdict.FAILED, f"the model cannot be built: {_first_line(error)}")
        return
    try:
        layout = describe_layout(config, cache_config(specs))
    except KvstoreError as error:
        hint = f"; {_HYBRID_HINT}" if _works_without_hybrid_manager(config, specs) else ""
        yield Finding("layout", Verdict.FAILED, f"the KV of this model cannot be cached: {error}{hint}")
        return
    yield Finding("layout", Verdict.OK, layout_sentence(layout))
    ranks = layout.tensor_parallel
    part = rank_layout(layout) if ranks > 1 else layout  # as each rank checks it at its start
    namespace = Namespace(
        model="kvstore check", revision="random", layout=part, tenant=settings.tenant, secret=settings.secret()
    )
    yield _check_block(store, namespace)


def _check_block(store: KvStore, namespace: Namespace) -> Finding:
    start = time.perf_counter()
    try:
        equal = gives_back_what_it_takes(store, namespace)
    except NoSpaceError as error:
        return Finding("block", Verdict.FAILED, f"{error}: {_MORE_ROOM}")
    milliseconds = 1e3 * (time.perf_counter() - start)
    if equal is None:
        return Finding("block", Verdict.FAILED, f"the store had no room for a random block: {_MORE_ROOM}")
    if not equal:
        return Finding("block", Verdict.FAILED, "a random block came back with other bytes than were stored")
    return Finding("block", Verdict.OK, f"a random block was stored and came back the same, in {milliseconds:.1f} ms")


_MORE_ROOM = "give the store more host memory (tiers.host.capacity_bytes), or this tenant a larger quota"


def cache_config(specs: Mapping[str, Any]) -> Any:
    """Layers grouped by what they cache, with the attributes of vLLM's KVCacheConfig that describe_layout reads."""
    groups: list[Any] = []
    for name, spec in specs.items():
        group = next((group for group in groups if group.kv_cache_spec == spec), None)
        if group is None:
            groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=[name]))
        else:
            group.layer_names.append(name)
    return SimpleNamespace(kv_cache_groups=groups)


def layout_sentence(layout: KvLayout) -> str:
    """What would be stored of each block."""
    ranks = f", {layout.tensor_parallel} ranks" if layout.tensor_parallel > 1 else ""
    windows = "".join(f", {group.layers} with a window" for group in layout.groups)
    return (
        f"{layout.layers} layers{windows}, {layout.kv_heads} KV heads of {layout.head_dim}, {layout.dtype}{ranks}; "
        f"a block of {layout.block_tokens} tokens has {format_size(layout.block_bytes)}"
    )


def _version() -> str:
    import vllm

    logging.getLogger("vllm").setLevel(logging.ERROR)
    return str(vllm.__version__)


def _engine_config(options: CheckOptions, folder: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = shlex.split(options.engine_arguments)
    model = options.model if options.model is not None else _made_up_model(folder)
    arguments = ["--model", model, "--skip-tokenizer-init", *given]
    if options.block_tokens is not None:
        arguments += ["--block-size", str(options.block_tokens)]
    if not any(argument.startswith("--kv-transfer-config") for argument in given):
        arguments += ["--kv-transfer-config", json.dumps(RECOMMENDED)]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    parser.error = _refuse
    return EngineArgs.from_cli_args(parser.parse_args(arguments)).create_engine_config()


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _made_up_model(folder: str) -> str:
    from transformers import LlamaConfig

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=256,
        hidden_size=256,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    config.save_pretrained(folder)
    return folder


def _cache_specs(config: Any) -> dict[str, Any]:
    """What each layer of the model wants to cache, by its name."""
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model

    with _one_rank(config), torch.device("meta"):
        initialize_model(config)
    with set_current_vllm_config(config):
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        shared = {name for name, layer in layers.items() if getattr(layer, "kv_sharing_target_layer_name", None)}
        found = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items() if name not in shared}
    specs = {name: spec for name, spec in found.items() if spec is not None}
    if not specs:
        raise UnsupportedModelError("no layer of it caches anything")
    return _unified(specs) if config.scheduler_config.disable_hybrid_kv_cache_manager else specs


def _unified(specs: dict[str, Any]) -> dict[str, Any]:
    """What the layers cache without the hybrid KV cache manager: all tokens, if vLLM can have it so."""
    from vllm.v1.core.kv_cache_utils import is_kv_cache_spec_uniform, unify_hybrid_kv_cache_specs

    unified = dict(specs)
    unify_hybrid_kv_cache_specs(unified)
    if is_kv_cache_spec_uniform(unified):
        found = list(unified.values())
        return dict.fromkeys(unified, type(found[0]).merge(found))
    return unified


@contextmanager
def _one_rank(config: Any) -> Iterator[None]:
    """A world of this process alone, which layers ask for their rank in it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{Path(folder) / 'world'}", 0, "gloo")
        try:
            with set_current_vllm_config(config):
                ensure_model_parallel_initialized(1, 1)
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def _works_without_hybrid_manager(config: Any, specs: dict[str, Any]) -> bool:
    try:
        describe_layout(config, cache_config(_unified(specs)))
    except (KvstoreError, ValueError, NotImplementedError):
        return False
    return True


def _model_sentence(config: Any, folder: str | None) -> str:
    model = config.model_config
    origin = "made up, to try the rest (--model PATH checks yours)" if folder is None else f"from {folder}"
    hybrid = "off" if config.scheduler_config.disable_hybrid_kv_cache_manager else "on"
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{', '.join(model.architectures)} in {dtype}, {origin}; hybrid KV cache manager {hybrid}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return " ".join(lines[:3]) if lines else type(error).__name__
