"""Token ids of the prompts in a log, by the tokenizer and the chat template of their model."""

from __future__ import annotations

from typing import Any

from kvstore.errors import ConfigError, InvalidArgumentError


class LogTokenizer:
    """A tokenizer of transformers (extra `hf`), from its folder. Raises ConfigError where it cannot be loaded."""

    def __init__(self, path: str) -> None:
        try:
            from jinja2 import TemplateError
            from transformers import AutoTokenizer

            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        except (ImportError, OSError, ValueError) as err:
            raise ConfigError(
                f"there is no tokenizer at {path}: {err}; give the folder of one, and install kvstore[hf]"
            ) from err
        self._refusals = (TemplateError, ValueError, TypeError, LookupError, AttributeError)

    def chat(self, messages: object, tools: object) -> list[int]:
        """The ids of a conversation, as its template writes it. Raises InvalidArgumentError where it refuses."""
        try:
            ids = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, return_dict=False
            )
        except self._refusals as err:
            raise InvalidArgumentError(f"the chat template refuses the messages: {err}") from err
        return list(ids)

    def text(self, prompt: str) -> list[int]:
        """The ids of a text."""
        return list(self._tokenizer.encode(prompt))
