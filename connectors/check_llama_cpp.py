"""Checks llama.cpp: llama-cpp-python's version, a GGUF model and its layout, a state there and back, a prompt twice."""

from __future__ import annotations

import secrets
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import llama_cpp
from llama_cpp import Llama

from kvstore.connectors.check import Finding, Verdict, came_again, round_trip
from kvstore.connectors.common import UnsupportedModelError
from kvstore.connectors.llama_cpp import Settings, cached, connector_of, uncache
from kvstore.connectors.llama_cpp_cache import Limits
from kvstore.connectors.llama_cpp_model import kv_types
from kvstore.connectors.llama_cpp_states import gives_back_what_it_takes
from kvstore.types import Root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.api import KvStore
    from kvstore.connectors.check import CheckOptions

# The versions that the tests run with; newer ones are likely to do, of older ones nothing is known.
TESTED = ("0.3.36",)
MINIMUM = (0, 3, 36)
_PROMPT_TOKENS = 129
_NEW_TOKENS = 4
_CONTEXT_TOKENS = 256
_PATIENT_SECONDS = 30.0


def check(options: CheckOptions, store: KvStore) -> Iterator[Finding]:
    """See kvstore.connectors.check.Checker."""
    engine = _engine()
    yield engine
    if engine.verdict is Verdict.FAILED:
        return
    if options.model is None or not Path(options.model).is_file():
        named = "no model was named" if options.model is None else f"there is no file {options.model}"
        yield Finding("model", Verdict.FAILED, f"{named}; expected a GGUF file: --model FILE.gguf")
        return
    try:
        llm = Llama(options.model, n_ctx=_CONTEXT_TOKENS, n_batch=_CONTEXT_TOKENS, verbose=False)
    except (OSError, ValueError, RuntimeError) as error:
        yield Finding("model", Verdict.FAILED, f"{options.model}: {error}")
        return
    try:
        yield Finding("model", Verdict.OK, _model_sentence(llm, options.model))
        yield from _check_engine(llm, store)
    finally:
        llm.close()


def _check_engine(llm: Llama, store: KvStore) -> Iterator[Finding]:
    salt = f"kvstore check {secrets.token_hex(16)}"
    limits = Limits(lookup_seconds=_PATIENT_SECONDS, load_seconds=_PATIENT_SECONDS, tokens_min=1)
    try:
        cached(llm, store, Settings(salt=salt, limits=limits))
    except UnsupportedModelError as error:
        yield Finding("layout", Verdict.FAILED, f"the states of this model cannot be cached: {error}")
        return
    try:
        yield Finding("layout", Verdict.OK, _layout_sentence(llm))
        namespace = connector_of(llm).namespace
        state = round_trip("state", lambda: gives_back_what_it_takes(store, namespace))
        yield state
        if state.verdict is not Verdict.FAILED:
            yield _generate_twice(llm, store, salt)
    finally:
        uncache(llm)


def _engine() -> Finding:
    version = llama_cpp.__version__
    sentence = f"llama-cpp-python {version}"
    if tuple(int(number) for number in version.split(".")[:3]) < MINIMUM:
        oldest = ".".join(map(str, MINIMUM))
        return Finding("engine", Verdict.FAILED, f"{sentence}: expected {oldest} or newer")
    if version not in TESTED:
        return Finding("engine", Verdict.WARNING, f"{sentence}: not tested, only {', '.join(TESTED)} is")
    return Finding("engine", Verdict.OK, sentence)


def _model_sentence(llm: Llama, model: str) -> str:
    mebibytes = llama_cpp.llama_model_size(llm.model) / 2**20
    return f"{llm.metadata.get('general.architecture')} of {mebibytes:,.0f} MiB from {model}"


def _layout_sentence(llm: Llama) -> str:
    layout = connector_of(llm).namespace.layout
    keys, values = kv_types(llm)
    return (
        f"{layout.layers} layers; {layout.kv_heads} KV heads of {layout.head_dim}, keys in {keys}, values in {values}; "
        "states of whole sequences, cut down to what a prompt shares"
    )


def _generate_twice(llm: Llama, store: KvStore, salt: str) -> Finding:
    """Whether a prompt that comes again to an engine that has forgotten it is reused, and gives the same tokens."""
    connector = connector_of(llm)
    prompt = [number * 7919 % (llm.n_vocab() // 2) for number in range(_PROMPT_TOKENS)]
    answers = []
    for _ in range(2):
        llm.reset()
        answers.append(list(islice(llm.generate(prompt, temp=0.0), _NEW_TOKENS)))
        connector.flush(_PATIENT_SECONDS)
    stats = connector.stats()
    store.evict(connector.namespace, prompt, root=Root(salt=salt))
    return came_again(
        stats,
        reusable_tokens=_PROMPT_TOKENS - 1,
        prompt_tokens=len(prompt),
        same=answers[0] == answers[1],
        excuse="rounding of quantised weights may do that",
    )
