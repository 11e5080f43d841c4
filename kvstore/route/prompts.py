"""What a request asks: the token ids of its prompt where they can be had, and its beginning as text.

A chat becomes tokens by the engine's own template, with its tools and options, so either the engine is asked
(`/tokenize`, as vLLM serves it: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html) or a tokenizer
of the same model renders it here.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from kvstore.errors import ConfigError
from kvstore.tokens import TOKEN_MAX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CHAT_PATH = "/v1/chat/completions"
PROMPT_PATHS = ("/v1/completions", CHAT_PATH)
HEAD_CHARACTERS = 1024  # of a text that say where it goes when its tokens are not known
_CHARACTERS_PER_TOKEN = 4
_AFFINITY_TOKENS = 256
_CHAT_FIELDS = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_TEXT_FIELDS = ("model", "prompt", "add_special_tokens")


class Tokenizer(Protocol):
    """Turns the body of a request into token ids."""

    async def tokens(self, path: str, body: dict[str, Any]) -> list[int] | None:
        """The ids of the prompt; None where they cannot be had."""
        ...


class NoTokenizer:
    """Knows prompts of token ids alone."""

    async def tokens(self, path: str, body: dict[str, Any]) -> list[int] | None:  # noqa: ARG002  # the Protocol's
        """The ids that the body itself has."""
        return given_tokens(body)


class EngineTokenizer:
    """Asks an engine; `post` sends a body to a path of one that is well, and gives what it answers, or None."""

    def __init__(self, post: Callable[[str, dict[str, Any]], Awaitable[object]]) -> None:
        self._post = post

    async def tokens(self, path: str, body: dict[str, Any]) -> list[int] | None:
        """The ids as the engine has them."""
        given = given_tokens(body)
        if given is not None:
            return given
        names = _CHAT_FIELDS if path == CHAT_PATH else _TEXT_FIELDS
        answer = await self._post("/tokenize", {name: body[name] for name in names if name in body})
        return _as_ids(answer.get("tokens")) if isinstance(answer, dict) else None


class LocalTokenizer:
    """A tokenizer of transformers, on one thread of its own. Raises ConfigError where it cannot be loaded."""

    def __init__(self, path: str) -> None:
        try:
            from jinja2 import TemplateError
            from transformers import AutoTokenizer

            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (ImportError, OSError, ValueError) as err:
            raise ConfigError(f"there is no tokenizer at {path}: {err}; give its folder, `engine` or `none`") from err
        self._refusals = (TemplateError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
        self._own = frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters)
        self._thread = ThreadPoolExecutor(1, "kvstore-tokenizer")

    async def tokens(self, path: str, body: dict[str, Any]) -> list[int] | None:
        """The ids as the tokenizer gives them; None for what its template refuses."""
        given = given_tokens(body)
        if given is not None:
            return given
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._render, path, body)

    def _render(self, path: str, body: dict[str, Any]) -> list[int] | None:
        try:
            if path == CHAT_PATH:
                given = body.get("chat_template_kwargs") or {}
                options = {name: value for name, value in given.items() if name not in self._own}
                return _as_ids(
                    self._tokenizer.apply_chat_template(
                        body["messages"],
                        tools=body.get("tools"),
                        add_generation_prompt=body.get("add_generation_prompt", True),
                        return_dict=False,
                        **options,
                    )
                )
            prompt = body.get("prompt")
            return _as_ids(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else None
        except self._refusals:
            return None


def given_tokens(body: dict[str, Any]) -> list[int] | None:
    """The ids of a prompt that is given as ids."""
    return _as_ids(body.get("prompt"))


def read_body(raw: bytes) -> dict[str, Any]:
    """The body of a request; empty for what is no JSON object, which the engine may refuse itself."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def head_of(body: dict[str, Any]) -> str:
    """The beginning of a prompt as text."""
    asked = body.get("messages", body.get("prompt", ""))
    return (asked if isinstance(asked, str) else json.dumps(asked))[:HEAD_CHARACTERS]


def affinity_of(tokens: list[int] | None, body: dict[str, Any]) -> bytes:
    """What prompts that begin alike have in common."""
    head = head_of(body) if tokens is None else json.dumps(tokens[:_AFFINITY_TOKENS])
    return hashlib.blake2b(head.encode(errors="replace"), digest_size=16).digest()


def length_of(tokens: list[int] | None, raw: bytes) -> int:
    """How many tokens a prompt has, or about as many."""
    return len(raw) // _CHARACTERS_PER_TOKEN if tokens is None else len(tokens)


def _as_ids(value: object) -> list[int] | None:
    if not isinstance(value, list) or not value:
        return None
    is_ids = set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= TOKEN_MAX  # 0.2 ms for 8k
    return value if is_ids else None
