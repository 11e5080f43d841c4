"""Answers a question twice under one long system prompt, through kvstore, and shows what was reused.

    python generate.py --address unix:///tmp/kvstore.sock [--model FOLDER]

Exits with 1 if an answer differs from that of transformers alone.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvstore.connectors.huggingface import cached, connector_of, uncache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SYSTEM_PROMPT = "You answer questions about a library. " + "Be brief, be kind, and name the opening hours. " * 20
QUESTIONS = ("When do you close on Saturdays?", "How many books may I borrow at a time?")


def load(folder: str | None) -> tuple[PreTrainedModel, list[torch.Tensor]]:
    """The model, and a prompt for each question."""
    if folder is None:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
        made_up = [torch.tensor([list(f"{SYSTEM_PROMPT}{question}".encode())]) for question in QUESTIONS]
        return LlamaForCausalLM(config).eval(), made_up
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    prompts = [tokenizer(f"{SYSTEM_PROMPT}\n{question}\n", return_tensors="pt").input_ids for question in QUESTIONS]
    return model.eval(), prompts


def first_token_seconds(model: PreTrainedModel, prompt: torch.Tensor) -> float:
    began = time.perf_counter()
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True, help="of the sidecar, as in `kvstore serve --listen`")
    parser.add_argument("--model", metavar="FOLDER", help="folder of a model and its tokenizer (default: made up)")
    parser.add_argument("--patience", metavar="SECONDS", type=float, help="wait so long for the store, not briefly")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
    logging.getLogger("kvstore").setLevel(logging.INFO)

    model, prompts = load(arguments.model)
    asked = {"max_new_tokens": 16, "do_sample": False}
    masks = [torch.ones_like(prompt) for prompt in prompts]
    expected = [
        model.generate(prompt, attention_mask=mask, **asked) for prompt, mask in zip(prompts, masks, strict=True)
    ]
    patience = arguments.patience
    limits = {} if patience is None else {"lookup_seconds": patience, "load_seconds": patience}
    cached(model, arguments.address, model_name="example", **limits)
    connector = connector_of(model)
    print("call  prompt  reused  first token  answer is that of transformers alone")
    same = []
    for number, (prompt, mask) in enumerate(zip(prompts, masks, strict=True)):
        before = connector.stats().loaded_tokens
        seconds = first_token_seconds(model, prompt)
        reused = connector.stats().loaded_tokens - before
        answer = model.generate(prompt, attention_mask=mask, **asked)
        connector.flush()  # a server has no need of this: it happens in the background
        same.append(torch.equal(expected[number], answer))
        took = f"{1e3 * seconds:.0f} ms"
        print(f"{number + 1:<4}  {prompt.shape[1]:>6}  {reused:>6}  {took:>11}  {'yes' if same[-1] else 'no'}")
    for reason, calls in {**connector.stats().bypassed, **connector.stats().failures}.items():
        print(f"computed without the store, {reason}: {calls}")
    uncache(model)
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
