"""vLLM: a KV connector that loads the prefixes a kvstore server holds, and stores what the engine computes.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvstoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvstore.connectors.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": "unix:///run/kvstore.sock"}}'

Where kvstore is installed beside vLLM the module path may be left out: an entry point registers the name. What is
served and what is bypassed stands in connectors/README.md. Importing this package does not import vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.connectors.vllm.connector import KvstoreConnector

__all__ = ["KvstoreConnector", "register"]

CONNECTOR = "KvstoreConnector"


def register() -> None:
    """Tell vLLM the connector's name; for its plug-in entry point, which calls this once or more in each process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    except ValueError:
        KVConnectorFactory.register_connector(CONNECTOR, "kvstore.connectors.vllm", CONNECTOR)


def __getattr__(name: str) -> Any:  # noqa: ANN401  # the type of a lazily imported name is not known here
    if name != CONNECTOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore.connectors.vllm import connector

    return connector.KvstoreConnector
