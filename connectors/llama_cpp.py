"""llama.cpp through llama-cpp-python: prompts go on from the stored state that shares most with them.

    from kvstore.connectors.llama_cpp import cached

    llm = cached(Llama(model_path="model.gguf", n_ctx=8192), "unix:///run/kvstore.sock")

What is served and what is bypassed stands in connectors/README.md. As with llama-cpp-python itself, one engine serves
one prompt at a time.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llama_cpp import BaseLlamaCache, Llama

from kvstore.clock import SystemClock
from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.llama_cpp_cache import Limits, PrefixCache
from kvstore.connectors.llama_cpp_context import ContextSequence
from kvstore.connectors.llama_cpp_fingerprint import default_digest_file
from kvstore.connectors.llama_cpp_model import adapter_of, bypass_reason, kv_types, layout_of, name_of, revision_of
from kvstore.errors import InvalidArgumentError
from kvstore.types import Namespace, Root

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from llama_cpp import LlamaState

    from kvstore.api import KvStore
    from kvstore.clock import Clock

__all__ = ["KvstoreCache", "Settings", "UnsupportedModelError", "cached", "connector_of", "uncache"]

logger = logging.getLogger(__name__)

_ATTRIBUTE = "kvstore_connector"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Whose states they are, and how long an engine waits for them.

    A lookup that takes over `lookup_seconds`, or a load over `load_seconds`, is given up and the prompt computed; up
    to `queue_bytes_max` wait to be stored. Below `tokens_min` tokens that need not be computed nothing is loaded, nor
    stored. `digests` is a file that remembers the digests of models; None reads them each time.
    """

    tenant: str = "default"
    secret: bytes | None = None
    model_name: str | None = None
    salt: str | None = None
    limits: Limits = field(default_factory=Limits)
    digests: Path | None = field(default_factory=default_digest_file)


def cached(llm: Llama, store: KvStore | str, settings: Settings | None = None, *, clock: Clock | None = None) -> Llama:
    """Let `llm` go on from what `store` holds of its prompts, and store what it computes. Returns `llm`.

    `store` is a KvStore, which stays the caller's, or the address of a sidecar, which may be down now and come later.
    Serves generate(), and with it create_completion(), create_chat_completion() and the engine's own server.

    Reads the model's files for a digest, once for each model on this machine. Raises UnsupportedModelError when
    the states of this engine are of no use to others, InvalidArgumentError when it is cached already, and ConfigError
    for an address that cannot be. Afterwards no fault of the store reaches the engine. Undone by uncache().
    """
    if _ATTRIBUTE in vars(llm):
        raise InvalidArgumentError("the engine is cached already; call uncache(llm) first")
    connector = _connect(llm, store, settings or Settings(), clock or SystemClock())
    plain = llm.generate
    signature = inspect.signature(plain)

    def generate(*args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:  # noqa: ANN401  # llama_cpp's
        asked = signature.bind(*args, **kwargs).arguments
        reason = bypass_reason(llm, asked)
        if reason is None:
            connector.restore(asked["tokens"])
        else:
            connector.bypass(reason)
        try:
            yield from plain(*args, **kwargs)
        except GeneratorExit:  # the caller has enough
            connector.keep()
            raise
        connector.keep()

    vars(llm)[_ATTRIBUTE] = connector
    vars(llm)["generate"] = generate
    return llm


def connector_of(llm: Llama) -> PrefixCache:
    """The connector of a cached engine: its counts and flush(). Raises InvalidArgumentError for others."""
    connector = vars(llm).get(_ATTRIBUTE)
    if not isinstance(connector, PrefixCache):
        raise InvalidArgumentError("the engine is not cached; call cached(llm, store) first")
    return connector


def uncache(llm: Llama) -> Llama:
    """Undo cached(): queued stores are finished for a few seconds, and the engine is again what it was."""
    connector = connector_of(llm)
    del vars(llm)["generate"], vars(llm)[_ATTRIBUTE]
    connector.close()
    return llm


class KvstoreCache(BaseLlamaCache):  # type: ignore[misc]  # not typed
    """The same through the engine's own hook: `llm.set_cache(KvstoreCache(llm, store))`.

    cached() is the better way: it serves generate() too, and for a cache the engine copies its whole context and its
    logits after every answer, which this one has no use for. States go straight into the engine's context, so the
    engine is told that there is none to load.
    """

    def __init__(
        self, llm: Llama, store: KvStore | str, settings: Settings | None = None, *, clock: Clock | None = None
    ) -> None:
        super().__init__(0)
        self._llm = llm
        self.connector = _connect(llm, store, settings or Settings(), clock or SystemClock())

    @property
    def cache_size(self) -> int:
        """Bytes that this object holds itself: the states are the store's."""
        return 0

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        reason = bypass_reason(self._llm, {})
        if reason is None:
            self.connector.restore(key)
        else:
            self.connector.bypass(reason)
        raise KeyError("what there was is in the engine's context already")

    def __contains__(self, key: object) -> bool:
        return False

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        self.connector.keep()


def _connect(llm: Llama, store: KvStore | str, settings: Settings, clock: Clock) -> PrefixCache:
    namespace = Namespace(
        model=settings.model_name or name_of(llm),
        layout=layout_of(llm),
        revision=revision_of(llm, settings.digests),
        tenant=settings.tenant,
        secret=settings.secret,
    )
    root = Root(adapter=adapter_of(llm, settings.digests), salt=settings.salt)
    connector = PrefixCache(ContextSequence(llm), store, namespace, root=root, limits=settings.limits, clock=clock)
    kinds = kv_types(llm)
    logger.info(
        "kvstore serves llama.cpp: model=%s layers=%d k=%s v=%s n_ctx=%d",
        namespace.model,
        namespace.layout.layers,
        *kinds,
        llm.n_ctx(),
    )
    return connector
