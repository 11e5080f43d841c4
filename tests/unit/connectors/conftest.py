"""A store in a dict, with faults on demand, and tiny random models."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.tokens import as_token_array
from kvstore.types import PLAIN_ROOT, CommitResult, LoadResult, PrefixMatch, Tier, TierRun


@dataclass
class Faults:
    """What goes wrong next: errors by method name, a gate that methods wait at, loads cut short, bytes flipped."""

    errors: dict[str, Exception] = field(default_factory=dict)
    gate: threading.Event | None = None
    load_blocks_max: int | None = None
    stored_blocks_max: int | None = None
    flip: bool = False


class DictStore:
    """The part of KvStore that connectors use. Blocks are kept as bytes by (namespace, root, prefix tokens)."""

    def __init__(self):
        self.blocks = {}
        self.faults = Faults()
        self.calls = Counter()
        self.loaded_blocks = 0
        self.open_leases = 0

    def _enter(self, method):
        self.calls[method] += 1
        if self.faults.gate is not None:
            assert self.faults.gate.wait(ANSWER_SECONDS)
        if method in self.faults.errors:
            raise self.faults.errors[method]

    def keys(self, namespace, root, tokens):
        size = namespace.layout.block_tokens
        ends = range(size, len(tokens) + 1, size)
        return [(namespace, namespace.secret, root or PLAIN_ROOT, tokens[:end].tobytes()) for end in ends]

    def match(self, namespace, tokens, *, root=None, touch=True, request_id=None):
        self._enter("match")
        prompt = as_token_array(tokens)
        held = [key in self.blocks for key in self.keys(namespace, root, prompt)]
        blocks = held.index(False) if False in held else len(held)
        return PrefixMatch(namespace, root or PLAIN_ROOT, prompt, blocks, (TierRun(Tier.HOST, blocks),))

    @contextmanager
    def lease(self, match):
        self._enter("lease")
        self.open_leases += 1
        try:
            yield DictLease(self, match)
        finally:
            self.open_leases -= 1

    def stage(self, namespace, tokens, *, root=None, from_block=0, turn_ends=()):
        self._enter("stage")
        return DictStage(self, self.keys(namespace, root, as_token_array(tokens)), from_block)

    def evict(self, namespace, tokens, *, root=None, from_block=0):
        self._enter("evict")
        gone = [key for key in self.keys(namespace, root, as_token_array(tokens))[from_block:] if key in self.blocks]
        for key in gone:
            del self.blocks[key]
        return len(gone)


class DictLease:
    def __init__(self, store, match):
        self.store = store
        self.keys = store.keys(match.namespace, match.root, match.prompt)[: match.blocks]
        self.blocks = len(self.keys)

    def load_into(self, buffer, *, from_block=0, part=None):
        self.store._enter("load_into")
        faults = self.store.faults
        rows = buffer.view(torch.uint8).reshape(len(buffer), -1)
        good = len(rows) if faults.load_blocks_max is None else min(len(rows), faults.load_blocks_max)
        for row, key in zip(rows[:good], self.keys[from_block:], strict=False):
            row.copy_(torch.frombuffer(bytearray(self.store.blocks[key]), dtype=torch.uint8))
        if faults.flip:
            rows[:good, 0] ^= 1
        self.store.loaded_blocks += good
        return LoadResult(good, len(rows), rows[:good].numel())


class DictStage:
    def __init__(self, store, keys, from_block):
        self.store = store
        self.keys = keys
        self.from_block = from_block
        self.blocks = len(keys) - from_block
        self.rows = None

    def write_from(self, buffer, *, from_block=None, part=None):
        self.store._enter("write_from")
        rows = buffer.view(torch.uint8).reshape(len(buffer), -1)
        self.rows = [bytes(np.asarray(row)) for row in rows]
        return len(rows)

    def commit(self):
        self.store._enter("commit")
        wanted = self.keys[self.from_block :]
        room = self.store.faults.stored_blocks_max
        taken = wanted if room is None else wanted[:room]
        new = [key for key in taken if key not in self.store.blocks]
        self.store.blocks |= {key: row for key, row in zip(wanted, self.rows, strict=True) if key in new}
        return CommitResult(len(new), len(taken) - len(new), len(wanted) - len(taken))

    def abort(self):
        self.store.calls["abort"] += 1

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.commit()


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    # More threads than free cores make small models many times slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def store():
    return DictStore()


SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 40}


def make_llama(seed=0, **changes):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SMALL | changes)).eval()


def make_mistral(**changes):
    """All of its layers have a window."""
    torch.manual_seed(2)
    return MistralForCausalLM(MistralConfig(**SMALL | WINDOW | changes)).eval()


def make_gemma3(**changes):
    """One layer of full attention among others with a window, and a rope for each kind."""
    torch.manual_seed(3)
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL | WINDOW | {"layer_types": kinds} | changes)).eval()


def make_gpt2(**changes):
    torch.manual_seed(1)
    config = {
        "vocab_size": 128,
        "n_positions": 512,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "initializer_range": 0.3,
        "eos_token_id": None,
    }
    return GPT2LMHeadModel(GPT2Config(**config | changes)).eval()


@pytest.fixture
def llama():
    return make_llama()


@pytest.fixture
def gpt2():
    return make_gpt2()


@pytest.fixture
def new_llama():
    return make_llama


@pytest.fixture
def new_mistral():
    return make_mistral


@pytest.fixture
def new_gemma3():
    return make_gemma3


@pytest.fixture
def new_gpt2():
    return make_gpt2
