"""The indexes that bench_radix.py compares: ours, a floor in C++, a dict of hashes, and engines' own where installed.

ImportError at construction means that a peer is not installed, and its `install` says how to get it.
"""

# ruff: noqa: ANN401  # what a peer wants to be given differs from peer to peer

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from array import array
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xxhash

from kvstore.radix.tree import RadixTree
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from radix_workload import Workload

ROOT = bytes(16)
FLOOR_SOURCE = Path(__file__).with_name("floor.cpp")
# What CMake gives the product: no flag that asks for more than the plain architecture.
FLOOR_FLAGS = ("-O3", "-DNDEBUG", "-std=gnu++17", "-fPIC", "-shared")


class Peer(ABC):
    """An index under test. What `prepare` and `prepare_insert` do is not timed; times are in nanoseconds."""

    install: ClassVar[str] = ""

    @abstractmethod
    def __init__(self, workload: Workload) -> None: ...

    def prepare(self, tokens: NDArray[np.uint32]) -> Any:
        """Tokens in the form that a lookup takes."""
        return tokens

    def prepare_insert(self, tokens: NDArray[np.uint32]) -> Any:
        """Tokens in the form that an insertion takes."""
        return self.prepare(tokens)

    @abstractmethod
    def store(self, prepared: Any) -> None:
        """Store a prompt."""

    @abstractmethod
    def find(self, prepared: Any) -> int:
        """Leading blocks stored."""

    def timed_store(self, prepared: Any) -> int:
        """Store a prompt; returns the time."""
        start = time.perf_counter_ns()
        self.store(prepared)
        return time.perf_counter_ns() - start

    def timed_find(self, prepared: Any) -> tuple[int, int]:
        """(Leading blocks stored, the time)."""
        start = time.perf_counter_ns()
        blocks = self.find(prepared)
        return blocks, time.perf_counter_ns() - start


class Kvstore(Peer):
    """The tree of this repository, called from Python: stage, place and release; match. With the store's policy."""

    policy: ClassVar[str] = "survival"

    def __init__(self, workload: Workload) -> None:
        self.tree = RadixTree(workload.block_tokens, ns_key=bytes(range(16)), hash_seed=0x5EED, policy=self.policy)
        self._slots = np.arange(workload.blocks, dtype=np.uint32)
        self._used = 0
        self._tick = 0

    def store(self, prepared: Any) -> None:
        self._tick += 1_000_000
        existing, ids = self.tree.stage(ROOT, prepared, 0, self._tick)
        fresh = ids[existing:]
        self.tree.place(fresh, Tier.HOST, self._slots[self._used : self._used + fresh.size])
        self._used += fresh.size
        self.tree.release(ids)

    def find(self, prepared: Any) -> int:
        return int(self.tree.match(ROOT, prepared).size)


class KvstoreLru(Kvstore):
    """The same, with the policy that remembers least."""

    policy = "lru"


@cache
def floor_library() -> ctypes.CDLL:
    """floor.cpp, compiled."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "floor.so"
        subprocess.run(["g++", *FLOOR_FLAGS, str(FLOOR_SOURCE), "-o", str(file)], check=True)
        library = ctypes.CDLL(str(file))
    library.floor_new.restype = ctypes.c_void_p
    return library


class Floor(Peer):
    """floor.cpp, timed inside."""

    def __init__(self, workload: Workload) -> None:
        self._library = floor_library()
        self._tree = ctypes.c_void_p(self._library.floor_new(workload.block_tokens))
        self._block_tokens = workload.block_tokens
        self._ns = ctypes.c_uint64()

    def __del__(self) -> None:
        self._library.floor_delete(self._tree)

    def store(self, prepared: Any) -> None:
        self._call(self._library.floor_insert, prepared)

    def find(self, prepared: Any) -> int:
        return self._call(self._library.floor_match, prepared)

    def timed_store(self, prepared: Any) -> int:
        self.store(prepared)
        return self._ns.value

    def timed_find(self, prepared: Any) -> tuple[int, int]:
        return self.find(prepared), self._ns.value

    def _call(self, function: Callable[..., int], tokens: NDArray[np.uint32]) -> int:
        blocks = tokens.size // self._block_tokens
        return int(function(self._tree, ctypes.c_void_p(tokens.ctypes.data), blocks, ctypes.byref(self._ns)))


class DictOfHashes(Peer):
    """A chained XXH3 of each block into a Python dict: the flat index at its simplest. It trusts its hashes."""

    def __init__(self, workload: Workload) -> None:
        self._step = 4 * workload.block_tokens
        self._ids: dict[int, int] = {}

    def prepare(self, tokens: NDArray[np.uint32]) -> Any:
        return tokens.tobytes()

    def store(self, prepared: Any) -> None:
        parent = 0
        for at in range(0, len(prepared) - self._step + 1, self._step):
            parent = xxhash.xxh3_64_intdigest(prepared[at : at + self._step], parent)
            self._ids.setdefault(parent, len(self._ids))

    def find(self, prepared: Any) -> int:
        parent = 0
        for at in range(0, len(prepared) - self._step + 1, self._step):
            parent = xxhash.xxh3_64_intdigest(prepared[at : at + self._step], parent)
            if parent not in self._ids:
                return at // self._step
        return len(prepared) // self._step


class Dynamo(Peer):
    """The router's index of NVIDIA Dynamo: hashes of blocks, then RadixTree. Events are made outside of the time."""

    install = "pip install ai-dynamo-runtime"

    def __init__(self, workload: Workload) -> None:
        from dynamo import _core

        self._core = _core
        self._tree = _core.RadixTree()
        self._block_tokens = workload.block_tokens
        self._known: set[int] = set()
        self._event_id = 0

    def prepare(self, tokens: NDArray[np.uint32]) -> Any:
        return tokens.tolist()

    def prepare_insert(self, tokens: NDArray[np.uint32]) -> Any:
        hashes = self._core.compute_block_hash_for_seq(tokens.tolist(), self._block_tokens)
        chain = [0]
        for block_hash in hashes:
            chain.append(xxhash.xxh3_64_intdigest(block_hash.to_bytes(8, "little"), chain[-1]))
        first = next((at for at in range(len(hashes)) if chain[at + 1] not in self._known), len(hashes))
        self._known.update(chain[first + 1 :])
        self._event_id += 1
        blocks = [{"block_hash": chain[at + 1], "tokens_hash": hashes[at]} for at in range(first, len(hashes))]
        stored = {"parent_hash": chain[first] if first else None, "blocks": blocks}
        return json.dumps({"event_id": self._event_id, "data": {"stored": stored}}).encode()

    def store(self, prepared: Any) -> None:
        self._tree.apply_event(0, prepared)

    def find(self, prepared: Any) -> int:
        hashes = self._core.compute_block_hash_for_seq(prepared, self._block_tokens)
        return max(self._tree.find_matches(hashes).scores.values(), default=0)


class SglangPython(Peer):
    """SGLang's radix cache in Python. Its matching splits nodes, so it writes."""

    install = "pip install sglang"

    def __init__(self, workload: Workload) -> None:
        import torch
        from sglang.srt.mem_cache import base_prefix_cache, radix_cache

        self._block_tokens = workload.block_tokens
        self._key = radix_cache.RadixKey
        self._insert_params = base_prefix_cache.InsertParams
        self._match_params = base_prefix_cache.MatchPrefixParams
        self._tree = radix_cache.RadixCache.create_simulated(page_size=workload.block_tokens)
        self._values = torch.arange(1 << 18, dtype=torch.int64)

    def prepare(self, tokens: NDArray[np.uint32]) -> Any:
        return array("q", tokens.astype(np.int64).tobytes())

    def store(self, prepared: Any) -> None:
        self._tree.insert(self._insert_params(key=self._key(prepared), value=self._values[: len(prepared)]))

    def find(self, prepared: Any) -> int:
        found = self._tree.match_prefix(self._match_params(key=self._key(prepared)))
        return int(found.device_prefix_len) // self._block_tokens


class SglangRust(SglangPython):
    """SGLang's tree in Rust, through its own binding."""

    def __init__(self, workload: Workload) -> None:
        import torch
        from sglang.srt.mem_cache.rust_tree_core import mem_cache

        self._block_tokens = workload.block_tokens
        self._core = mem_cache
        parameters = mem_cache.TreeCoreInitParamsBinding(
            eviction_policy="lru",
            page_size=workload.block_tokens,
            is_write_back=False,
            enable_hicache=False,
            write_through_threshold=256,
            device="cpu",
            swa_sliding_window_size=None,
            enable_kv_cache_events=False,
        )
        self._tree = mem_cache.RustUnifiedTreeCoreBinding(parameters, [0])
        self._values = torch.arange(1 << 18, dtype=torch.int64)

    def store(self, prepared: Any) -> None:
        self._tree.insert(self._core.InsertParamsBinding(key=prepared, value=self._values[: len(prepared)]))

    def find(self, prepared: Any) -> int:
        found = self._tree.match_prefix(self._core.MatchParamsBinding(key=prepared))
        return int(found.device_prefix_len) // self._block_tokens


class Vllm(Peer):
    """vLLM's prefix cache: the hasher of requests (SHA-256) and its BlockPool."""

    install = "pip install vllm"

    def __init__(self, workload: Workload) -> None:
        os.environ.setdefault("PYTHONHASHSEED", "0")
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import block_pool, kv_cache_utils

        function = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(function)
        self._hasher = kv_cache_utils.get_request_block_hasher(workload.block_tokens, function)
        self._pool = block_pool.BlockPool(workload.blocks + 4096, True, workload.block_tokens)
        self._block_tokens = workload.block_tokens

    def prepare(self, tokens: NDArray[np.uint32]) -> Any:
        return tokens.tolist()

    def store(self, prepared: Any) -> None:
        request = self._request(prepared)
        request.block_hashes = self._hasher(request)
        hits = self._hits(request.block_hashes)
        whole = len(prepared) // self._block_tokens
        if whole > len(hits):
            blocks = [*hits, *self._pool.get_new_blocks(whole - len(hits))]
            self._pool.cache_full_blocks(request, blocks, len(hits), whole, self._block_tokens, 0)

    def find(self, prepared: Any) -> int:
        return len(self._hits(self._hasher(self._request(prepared))))

    def _request(self, tokens: list[int]) -> SimpleNamespace:
        absent = dict.fromkeys(("lora_request", "cache_salt", "prompt_embeds", "session_id"))
        return SimpleNamespace(
            request_id="0", all_token_ids=tokens, num_tokens=len(tokens), block_hashes=[], mm_features=[], **absent
        )

    def _hits(self, hashes: list[Any]) -> list[Any]:
        hits = []
        for block_hash in hashes:
            cached = self._pool.get_cached_block(block_hash, [0])
            if not cached:
                break
            hits.append(cached[0])
        return hits


PEERS: dict[str, type[Peer]] = {
    "kvstore": Kvstore,
    "kvstore_lru": KvstoreLru,
    "floor": Floor,
    "dict_xxh3": DictOfHashes,
    "sglang_rust": SglangRust,
    "sglang_python": SglangPython,
    "dynamo": Dynamo,
    "vllm": Vllm,
}
