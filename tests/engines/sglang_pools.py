"""SGLang's own host pools over a server: `python sglang_pools.py ADDRESS`; says of each memory layout how it went."""

from __future__ import annotations

import hashlib
import json
import os
import sys

import sglang_shim  # noqa: F401  # before SGLang
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from kvstore.connectors.sglang import storage

LAYERS, HEADS, HEAD_DIM, PAGE, PAGES = 4, 2, 64, 16, 4
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


class Serving:
    weight_version = "default"


def device_pool(dtype):
    def tensors():
        return tuple(torch.randn(256, HEADS, HEAD_DIM).to(dtype) for _ in range(LAYERS))

    def pointers(of):
        return torch.tensor([tensor.data_ptr() for tensor in of], dtype=torch.uint64)

    k, v = tensors(), tensors()
    buffers = KVBuffers(k=k, v=v, k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=KVBufferLayout.NHD)
    return MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=HEADS, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip


def host_pool(layout, dtype):
    return MHATokenToKVPoolHost(
        device_pool(dtype), 2.0, 0, PAGE, layout, pin_memory=False, device="cpu", device_capacity_tokens=256,
        start_layer=0, end_layer=LAYERS,
    )  # fmt: skip


def backend_of(address, pool):
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=pool.layout != "layer_first", model_name="tiny",
        extra_config={
            "backend_name": "kvstore", "module_path": "kvstore.connectors.sglang", "class_name": "KvstoreStorage",
            "interface_v1": 1,
            "kvstore": {"address": address, "revision": "random", "lookup_seconds": 20.0, "bulk_seconds": 20.0},
        },
    )  # fmt: skip
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


def chain(layout, dtype):
    """Hashes of pages that differ for each case, since other layouts of equal hashes are tried on purpose."""
    return [hashlib.sha256(f"{layout} {dtype} {page}".encode()).hexdigest() for page in range(PAGES)]


def try_layout(address, layout, dtype):
    pool = host_pool(layout, dtype)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape).to(dtype))
    backend, keys, extra = backend_of(address, pool), chain(layout, dtype), HiCacheStorageExtraInfo(prefix_keys=[])
    written, read = pool.alloc(PAGES * PAGE), pool.alloc(PAGES * PAGE)
    stored = backend.batch_set_v1(keys, written, extra)
    loaded = backend.batch_get_v1(keys, read, extra)
    pages = [(pool.get_data_page(int(at[page * PAGE])) for at in (written, read)) for page in range(PAGES)]
    others = {
        other: backend_of(address, host_pool(other, dtype)).batch_exists(keys, extra)
        for other in LAYOUTS
        if other != layout
    }
    return {
        "stored": stored,
        "found": backend.batch_exists([*keys, "0" * 64], extra),
        "loaded": loaded,
        "exact": all(torch.equal(first, second) for first, second in pages),
        "of_other_layouts": sum(others.values()),
        "moved": sum(backend.get_stats().prefetch_pgs),
    }


def main():
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    storage.get_serving = Serving
    address = sys.argv[1]
    results = {
        f"{layout} {dtype}": try_layout(address, layout, dtype)
        for layout in LAYOUTS
        for dtype in (torch.float32, torch.bfloat16)
    }
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.5"
    injected = backend_of(address, host_pool("page_first", torch.float32))
    json.dump({"layouts": results, "with injector": type(injected).__name__}, sys.stdout)


if __name__ == "__main__":
    main()
