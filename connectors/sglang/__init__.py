"""SGLang: a storage backend of its hierarchical cache (HiCache), which keeps KV pages in a kvstore server.

    python -m sglang.launch_server --model-path MODEL --page-size 64 --enable-hierarchical-cache
        --hicache-mem-layout page_first --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "kvstore", "interface_v1": 1,
            "module_path": "kvstore.connectors.sglang", "class_name": "KvstoreStorage",
            "hicache_storage_pass_prefix_keys": true, "kvstore": {"address": "unix:///run/kvstore.sock"}}'

SGLang hands over a hash of each page and no token ids, so pages lie in opaque namespaces, one for each pool and rank.
What is served stands in connectors/README.md. Importing this package does not import SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.connectors.sglang.storage import KvstoreStorage

__all__ = ["KvstoreStorage"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  # the type of a lazily imported name is not known here
    if name != "KvstoreStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore.connectors.sglang import storage

    return storage.KvstoreStorage
