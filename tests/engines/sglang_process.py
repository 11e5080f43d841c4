"""One SGLang engine as a process: `python sglang_process.py OPTIONS`, options and commands as JSON, an answer a line.

generate   prompts (token ids), max_tokens   -> of each its tokens, and its cached tokens by where they came from
clear      drop the engine's own cache, on the device and in host memory
"""

from __future__ import annotations

import json
import os
import sys

import sglang_shim  # noqa: F401  # here, so that processes which SGLang spawns import it, too

# SGLang empties its cache only when it is idle, and it stores behind its answers.
IDLE_SECONDS_MAX = 120.0
OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "page_size": 16,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.05,
    "log_level": "info",
}


def generate(engine, prompts, max_tokens):
    params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    answers = []
    for prompt in prompts:
        answer = engine.generate(input_ids=[prompt], sampling_params=params)[0]
        meta = answer["meta_info"]
        answers.append({"tokens": answer["output_ids"], "cached": meta.get("cached_tokens_details")})
    return answers


def clear(engine):
    flush = engine.tokenizer_manager.flush_cache(timeout_s=IDLE_SECONDS_MAX)
    return engine.loop.run_until_complete(flush).success


def serve(engine, answers):
    for line in sys.stdin:
        command = json.loads(line)
        do = {"generate": generate, "clear": clear}[command.pop("do")]
        print(json.dumps(do(engine, **command)), file=answers, flush=True)


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is log, and no answer
    import sglang

    engine = sglang.Engine(**(OPTIONS | json.loads(sys.argv[1])))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    serve(engine, answers)
    engine.shutdown()


if __name__ == "__main__":
    main()
