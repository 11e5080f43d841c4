"""One engine of the demo, a process of its own: requests and answers are JSON objects, one a line, on stdin and stdout.

    {"ask": QUESTION, "cache": true | false}  ->  {"tokens": [...], "ttft_seconds": ..., ...}
    {"attach": ADDRESS}                       ->  {"attached": ADDRESS}

It ends when stdin does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from kvstore.connectors.huggingface import cached, connector_of, uncache
from kvstore.demo.errors import DemoError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The demo proves what the cache does, on machines that may be busy: its deadlines are patient.
_LOOKUP_SECONDS = 10.0
_LOAD_SECONDS = 30.0
_WARM_UP_TOKENS = 64


class FirstTokenClock(BaseStreamer):
    """Notes when the first generated token came."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._prompt_seen = False
        self.ttft_seconds = 0.0

    def put(self, _value: torch.Tensor) -> None:
        """Called with the prompt first, then with each token."""
        if self._prompt_seen and not self.ttft_seconds:
            self.ttft_seconds = time.perf_counter() - self._start
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last token."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What one question gave. Token and block counts are the connector's, 0 without the cache."""

    prompt: list[int]
    tokens: list[int]
    text: str
    ttft_seconds: float
    reused_tokens: int = 0
    stored_blocks: int = 0
    present_blocks: int = 0
    failures: dict[str, int] | None = None


class DemoEngine:
    """A model, its tokenizer and a system prompt."""

    def __init__(self, model_dir: Path, system_prompt: str, new_tokens: int) -> None:
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, local_files_only=True
        )
        self._system_prompt = system_prompt
        self._new_tokens = new_tokens
        self._attached = False
        # Without this the first question would pay for what torch sets up once.
        self._generate(torch.arange(_WARM_UP_TOKENS)[None])

    def attach(self, address: str) -> None:
        """Use the sidecar at `address` from now on."""
        if self._attached:
            uncache(self._model)
        cached(
            self._model,
            address,
            model_name=self._model.config.model_type,
            lookup_seconds=_LOOKUP_SECONDS,
            load_seconds=_LOAD_SECONDS,
        )
        self._attached = True

    def ask_plainly(self, question: str) -> EngineAnswer:
        """Answer without the cache."""
        prompt = self._render(question)
        return self._answer(prompt, *self._generate(prompt))

    def ask(self, question: str) -> EngineAnswer:
        """Answer with the cache, and wait until what was computed is stored."""
        prompt = self._render(question)
        connector = connector_of(self._model)
        before = connector.stats()
        clock = FirstTokenClock()
        result = self._model.generate(prompt, max_new_tokens=self._new_tokens, do_sample=False, streamer=clock)  # type: ignore[operator]
        if not connector.flush():
            raise DemoError("the blocks were not stored within a minute")
        after = connector.stats()
        return self._answer(
            prompt,
            result,
            clock.ttft_seconds,
            reused_tokens=after.loaded_tokens - before.loaded_tokens,
            stored_blocks=after.stored_blocks - before.stored_blocks,
            present_blocks=after.present_blocks - before.present_blocks,
            failures=dict(after.failures),
        )

    def _generate(self, prompt: torch.Tensor) -> tuple[torch.Tensor, float]:
        clock = FirstTokenClock()
        # The generate() of the class knows nothing of the cache.
        plain_generate: Any = type(self._model).generate  # type: ignore[attr-defined]
        result = plain_generate(self._model, prompt, max_new_tokens=self._new_tokens, do_sample=False, streamer=clock)
        return result, clock.ttft_seconds

    def _answer(self, prompt: torch.Tensor, result: torch.Tensor, ttft_seconds: float, **counts: Any) -> EngineAnswer:  # noqa: ANN401
        tokens = result[0, prompt.shape[1] :]
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        return EngineAnswer(prompt[0].tolist(), tokens.tolist(), text, ttft_seconds, **counts)

    def _render(self, question: str) -> torch.Tensor:
        messages = [{"role": "system", "content": self._system_prompt}, {"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([ids])


def serve(engine: DemoEngine, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        request = json.loads(line)
        if "attach" in request:
            engine.attach(request["attach"])
            answer = {"attached": request["attach"]}
        else:
            ask = engine.ask if request["cache"] else engine.ask_plainly
            answer = asdict(ask(request["ask"]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Load the model, say that it is ready, and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--system-prompt", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries that print must not disturb the protocol
    torch.set_num_threads(arguments.threads)
    engine = DemoEngine(arguments.model_dir, arguments.system_prompt.read_text(encoding="utf-8"), arguments.new_tokens)
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    serve(engine, sys.stdin, answers)


if __name__ == "__main__":
    main()
