"""python -m kvstore.demo.convert FOLDER TARGET: the GGUF file in FOLDER as float32 safetensors in TARGET."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from kvstore.demo.weights import GGUF_NAME


def convert(folder: str, target: str) -> None:
    """Write model and tokenizer to `target`; needs about 1.5 GB of memory."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_NAME, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=GGUF_NAME,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(*sys.argv[1:])
