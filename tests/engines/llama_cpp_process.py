"""One llama.cpp engine as a process: `python llama_cpp_process.py OPTIONS`, all as JSON, an answer a line.

generate   prompt (token ids), new_tokens; with `split` the prompt is computed in two pieces, as behind a restored state
complete   text, new_tokens, through create_completion(); `forget` drops what the engine holds first
chat       messages, new_tokens, through create_chat_completion()
tokenize   text
versions   of the engine
counts     what the connector has counted, when everything is stored

The engine has one thread: several that wait for each other on a busy machine make it many times slower.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from contextlib import closing
from itertools import islice


class Engine:
    """A Llama, with a connector where there is an address."""

    def __init__(self, model, address=None, hook="cached", tokens_min=16, salt=None, **options):
        from llama_cpp import Llama

        kinds = {name: options.pop(name) for name in ("type_k", "type_v") if name in options}
        self.llm = Llama(
            model, n_threads=1, n_threads_batch=1, verbose=False, seed=1, **{"n_ctx": 512} | options, **kinds
        )
        self.connector = None
        if address is not None:
            import kvstore
            from kvstore.connectors.llama_cpp import KvstoreCache, Settings, cached, connector_of
            from kvstore.connectors.llama_cpp_cache import Limits

            # Patient, since what is asked here is whether an answer is right.
            limits = Limits(lookup_seconds=20.0, load_seconds=20.0, tokens_min=tokens_min)
            settings = Settings(limits=limits, salt=salt, digests=None)
            store = kvstore.connect(address, lookup_seconds=20.0, bulk_seconds=20.0)
            if hook == "cached":
                self.connector = connector_of(cached(self.llm, store, settings))
            else:
                cache = KvstoreCache(self.llm, store, settings)
                self.llm.set_cache(cache)
                self.connector = cache.connector

    def generate(self, prompt, new_tokens, split=0):
        self.llm.reset()
        if split:
            self.llm.eval(prompt[:split])
        before, began = self.loaded(), time.perf_counter()
        with closing(self.llm.generate(prompt, temp=0.0)) as answer:
            tokens = [next(answer)]
            first_seconds = time.perf_counter() - began
            tokens += islice(answer, new_tokens - 1)
        return {"tokens": tokens, "loaded": self.loaded() - before, "first_seconds": first_seconds}

    def complete(self, text, new_tokens, forget=True):
        if forget:
            self.llm.reset()
        before = self.loaded()
        answer = self.llm.create_completion(text, max_tokens=new_tokens, temperature=0)
        return {"text": answer["choices"][0]["text"], "loaded": self.loaded() - before}

    def chat(self, messages, new_tokens):
        self.llm.reset()
        before = self.loaded()
        answer = self.llm.create_chat_completion(messages, max_tokens=new_tokens, temperature=0)
        return {"text": answer["choices"][0]["message"]["content"], "loaded": self.loaded() - before}

    def tokenize(self, text):
        return {"tokens": self.llm.tokenize(text.encode())}

    def versions(self):
        import llama_cpp

        return {"versions": f"llama-cpp-python {llama_cpp.__version__}"}

    def loaded(self):
        return 0 if self.connector is None else self.connector.stats().loaded_tokens

    def counts(self):
        return {"flushed": self.connector.flush()} | dataclasses.asdict(self.connector.stats())


def main():
    # What llama.cpp writes to stdout goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(engine, command.pop("do"))(**command)), file=answers, flush=True)


if __name__ == "__main__":
    main()
