"""Lets SGLang 0.5.23 run on a CPU without the kernels of its own, for tests alone. Import it before SGLang.

- torchvision on PyPI is built for CUDA: the names of its operators are declared, so that it can be imported.
- SGLang's rope layer imports an operator of vLLM that it then does not use.
- Its host pools register memory with CUDA and copy by CUDA kernels: nothing, and copies by index, in their place.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import re
import sys
import types
from pathlib import Path

import torch

_KEPT = []


def declare_torchvision():
    library = torch.library.Library("torchvision", "DEF")
    folder = Path(importlib.util.find_spec("torchvision").submodule_search_locations[0])
    for name in sorted(
        set(re.findall(r'register_fake\("torchvision::(\w+)"\)', (folder / "_meta_registrations.py").read_text()))
    ):
        library.define(f"{name}(Tensor a, Tensor b, float c) -> Tensor")
    _KEPT.append(library)


def stand_in_for_vllm():
    operators = types.ModuleType("vllm._custom_ops")
    operators.rotary_embedding = None
    package = types.ModuleType("vllm")
    package._custom_ops = operators
    sys.modules |= {"vllm": package, "vllm._custom_ops": operators}


def _register_nothing(module):
    module._cuda_host_register = lambda *_, **__: None


def _place(pool, which, layer, indices):
    """The tensor of a layer's keys or values in a host pool, and the index of tokens in it."""
    buffer = pool.k_buffer if which == 0 else pool.v_buffer
    if pool.layout == "layer_first":
        return buffer[layer], indices
    if pool.layout == "page_first":
        return buffer[:, layer], indices
    if pool.layout == "page_first_direct":
        return buffer[:, layer], (indices // pool.page_size, indices % pool.page_size)
    raise NotImplementedError(pool.layout)


def _load(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
    if 0 <= layer_id < self.target_layer_num:
        for which, device in enumerate((self.device_k_buffers, self.device_v_buffers)):
            host, at = _place(self, which, layer_id, host_indices)
            device[layer_id][device_indices] = host[at]


def _backup(self, device_pool, host_indices, device_indices, io_backend):
    for layer in range(self.target_layer_num):
        for which, device in enumerate((self.device_k_buffers, self.device_v_buffers)):
            host, at = _place(self, which, layer, host_indices)
            host[at] = device[layer][device_indices]


def _copy_by_index(module):
    module.MHATokenToKVPoolHost.load_to_device_per_layer = _load
    module.MHATokenToKVPoolHost.backup_from_device_all_layer = _backup


PATCHES = {
    "sglang.srt.mem_cache.pool_host.common": _register_nothing,
    "sglang.srt.mem_cache.pool_host.mha": _copy_by_index,
}


class _Patches(importlib.abc.MetaPathFinder):
    """Changes a module right after it was executed."""

    def __init__(self):
        self.searching = False

    def find_spec(self, name, path, target=None):
        if name not in PATCHES or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        execute, patch = spec.loader.exec_module, PATCHES[name]

        def execute_and_patch(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


declare_torchvision()
stand_in_for_vllm()
sys.meta_path.insert(0, _Patches())
