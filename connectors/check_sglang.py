"""Checks SGLang: its version and interface, the weights and pages of a model, pages there and back."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.connectors.check import Finding, Verdict
from kvstore.connectors.checkpoint_files import model_fingerprint, read_config, require_table
from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.sglang.backend import SglangBackend
from kvstore.connectors.sglang.layout import KV_POOL, Rank
from kvstore.connectors.sglang.settings import SglangSettings
from kvstore.quantities import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.api import KvStore
    from kvstore.connectors.check import CheckOptions
    from kvstore.connectors.sglang.pages import Indices

# The version whose interface was read, and with which the test suite runs.
TESTED = "0.5.23"
_PAGES = 4
_PAGE_TOKENS = 16
_PATIENT_SECONDS = 30.0
_MADE_UP = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "torch_dtype": "float16"}
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def check(options: CheckOptions, store: KvStore) -> Iterator[Finding]:
    """See kvstore.connectors.check.Checker."""
    engine = _engine()
    yield engine
    if engine.verdict is Verdict.FAILED:
        return
    interface = _interface()
    yield interface
    if interface.verdict is Verdict.FAILED:
        return
    try:
        geometry, sentence = _model(options)
    except (OSError, ValueError, UnsupportedModelError) as error:
        yield Finding("model", Verdict.FAILED, f"{options.model}: {error}")
        return
    yield Finding("model", Verdict.OK, sentence)
    yield Finding("layout", Verdict.OK, geometry.sentence())
    yield _pages_there_and_back(store, geometry)


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The pages of a model on one rank."""

    layers: int
    token_bytes: int
    planes: int
    dtype: str
    page_tokens: int

    @property
    def page_bytes(self) -> int:
        return self.layers * self.token_bytes * self.planes * self.page_tokens

    def sentence(self) -> str:
        form = "one latent" if self.planes == 1 else "keys and values"
        return (
            f"a page of {self.page_tokens} tokens has {format_size(self.page_bytes)} on one rank: {form} of "
            f"{self.layers} layers in {self.dtype}; start SGLang with --page-size {self.page_tokens}"
        )


class _Memory:
    """Pages of that geometry, as SGLang's page_first has them: a piece for keys and one for values."""

    layout = "page_first"

    def __init__(self, geometry: _Geometry) -> None:
        self.page_size = geometry.page_tokens
        self.dtype = geometry.dtype
        self.layer_num = geometry.layers
        pieces = geometry.planes
        self.bytes = np.zeros((pieces, 2 * _PAGES, geometry.page_bytes // pieces), dtype=np.uint8)

    def get_page_buffer_meta(self, indices: Indices) -> tuple[list[int], list[int]]:
        pages = [int(index) // self.page_size for index in indices[:: self.page_size]]
        rows = [plane[page] for page in pages for plane in self.bytes]
        return [row.ctypes.data for row in rows], [row.nbytes for row in rows]


def _engine() -> Finding:
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return Finding("engine", Verdict.FAILED, "sglang is not installed in this Python environment")
    if found != TESTED:
        return Finding("engine", Verdict.WARNING, f"sglang {found}: not tested, only {TESTED} is")
    return Finding("engine", Verdict.OK, f"sglang {found}")


def _interface() -> Finding:
    """Whether SGLang's own classes, which the backend builds on, are what it expects."""
    try:
        from kvstore.connectors.sglang.storage import KvstoreStorage
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        # What SGLang imports has native code for the devices that it was built for.
        return Finding("interface", Verdict.FAILED, f"SGLang cannot be imported here: {error}"[:400])
    missing = sorted(getattr(KvstoreStorage, "__abstractmethods__", ()))
    if missing:
        return Finding("interface", Verdict.WARNING, f"HiCacheStorage asks for more: {', '.join(missing)}")
    return Finding("interface", Verdict.OK, "HiCacheStorage is as the backend expects it")


def _model(options: CheckOptions) -> tuple[_Geometry, str]:
    page_tokens = _PAGE_TOKENS if options.block_tokens is None else options.block_tokens
    if options.model is None:
        return _geometry(_MADE_UP, page_tokens), "made up, to try the rest (--model PATH checks yours)"
    config = read_config(Path(options.model))
    geometry = _geometry(require_table(config.get("text_config") or config, "text_config of config.json"), page_tokens)
    revision = model_fingerprint(options.model, "check")
    return geometry, f"{config.get('model_type', 'a model')} from {options.model}, weights read: {revision[:8]}..."


def _count(config: dict[str, Any], name: str) -> int:
    if name not in config:
        raise ValueError(f"config.json has no {name!r}, which tells how large a page is")
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name!r} is {value!r:.80}, expected a whole number from 1 on")
    return value


def _geometry(config: dict[str, Any], page_tokens: int) -> _Geometry:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    layers, bytes_each = _count(config, "num_hidden_layers"), _DTYPE_BYTES.get(dtype, 2)
    if config.get("kv_lora_rank"):
        rope = _count(config, "qk_rope_head_dim") if config.get("qk_rope_head_dim") else 0
        return _Geometry(layers, (_count(config, "kv_lora_rank") + rope) * bytes_each, 1, dtype, page_tokens)
    all_heads = _count(config, "num_attention_heads")
    heads = _count(config, "num_key_value_heads") if config.get("num_key_value_heads") else all_heads
    head_dim = _count(config, "head_dim") if config.get("head_dim") else _count(config, "hidden_size") // all_heads
    return _Geometry(layers, heads * head_dim * bytes_each, 2, dtype, page_tokens)


def _pages_there_and_back(store: KvStore, geometry: _Geometry) -> Finding:
    """Store random pages as the backend does, under weights that nobody else has, and load them elsewhere."""
    memory = _Memory(geometry)
    memory.bytes[:, :_PAGES] = np.frombuffer(
        secrets.token_bytes(memory.bytes[:, :_PAGES].nbytes), dtype=np.uint8
    ).reshape(memory.bytes[:, :_PAGES].shape)
    settings = SglangSettings(lookup_seconds=_PATIENT_SECONDS, bulk_seconds=_PATIENT_SECONDS)
    rank = Rank(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, cp_rank=0, cp_size=1, replicated=geometry.planes == 1)
    backend = SglangBackend(settings, rank, "kvstore check sglang", store, epoch=lambda: None)
    indices = np.arange(2 * _PAGES * memory.page_size)
    backend.add_pool(KV_POOL, memory, indices[: memory.page_size])
    backend.use_revision(secrets.token_hex(16))
    keys = [hashlib.sha256(secrets.token_bytes(32)).hexdigest() for _ in range(_PAGES)]
    half = _PAGES * memory.page_size
    stored = backend.save(KV_POOL, keys, indices[:half], [])
    loaded = backend.load(KV_POOL, keys, indices[half:], [])
    backend.clear()
    if not all(stored):
        failures = ", ".join(backend.stats().failures) or "the store refused them"
        return Finding("pages", Verdict.FAILED, f"{sum(stored)} of {_PAGES} random pages were stored: {failures}")
    if not all(loaded) or not np.array_equal(memory.bytes[:, :_PAGES], memory.bytes[:, _PAGES:]):
        return Finding("pages", Verdict.FAILED, "random pages did not come back byte for byte")
    return Finding("pages", Verdict.OK, f"{_PAGES} random pages were stored, loaded and compared")
