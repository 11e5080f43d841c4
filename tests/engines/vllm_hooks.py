"""Calls every hook of a connector that cannot work, in vLLM's own environment; prints what came of it as JSON."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kvstore.connectors.vllm import KvstoreConnector, register


def config(**extra):
    transfer = SimpleNamespace(kv_connector_extra_config=extra, kv_load_failure_policy="fail", is_kv_producer=True)
    return SimpleNamespace(kv_transfer_config=transfer)


def disabled_hooks(role):
    """What the hooks answer where the settings cannot be."""
    connector = KvstoreConnector(config(adress="unix:///nowhere"), role, SimpleNamespace())
    request = SimpleNamespace(request_id="r")
    step = SimpleNamespace(scheduled_new_reqs=[], kv_connector_worker_meta=None)
    connector.on_new_request(request)
    connector.register_kv_caches({})
    connector.bind_connector_metadata(connector.build_connector_meta(step))
    connector.handle_preemptions(None)
    connector.start_load_kv(None)
    connector.wait_for_layer_load("layer")
    connector.save_kv_layer("layer", None, None)
    connector.wait_for_save()
    connector.update_connector_output(step)
    connector.update_state_after_alloc(request, None, 0)
    answers = [
        connector.get_num_new_matched_tokens(request, 0),
        connector.get_external_cache_hit_sources(request, 0),
        connector.request_finished(request, []),
        connector.request_finished_all_groups(request, ([],)),
        connector.get_finished({"r"}),
        sorted(connector.get_block_ids_with_load_errors()),
        connector.has_pending_block_frees(),
        connector.requires_kv_delivery,
        connector.reset_cache(),
        connector.build_connector_worker_meta().soundness.name,
        connector.get_kv_connector_stats().data,
        connector.get_kv_connector_stats(),
    ]
    connector.shutdown()
    return answers


def strange_hooks():
    """Names of hooks whose parameters are not those of vLLM's class."""
    names = [name for name in vars(KvstoreConnector) if callable(getattr(KVConnectorBase_V1, name, None))]
    return [
        name
        for name in names
        if not name.startswith("__")
        and list(inspect.signature(getattr(KvstoreConnector, name)).parameters)
        != list(inspect.signature(getattr(KVConnectorBase_V1, name)).parameters)
    ]


def metrics():
    registry = CollectorRegistry()

    def made(**named):
        return Counter(**named, registry=registry)

    kinds = {Counter: made, Gauge: None, Histogram: None}
    prom = KvstoreConnector.build_prom_metrics(config(), kinds, ["model_name", "engine"], {0: ["tiny", "0"]})
    one = KvstoreConnector.build_kv_connector_stats({"loaded_tokens": 3, "bypassed:late": 1})
    two = KvstoreConnector.build_kv_connector_stats({"loaded_tokens": 4})
    prom.observe(two.aggregate(one).to_dict())
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "kvstore" in line and "_total{" in line and "created" not in line)


def main():
    with redirect_stdout(sys.stderr):
        logging.getLogger("vllm").addHandler(logging.StreamHandler())  # as engines do before they make connectors
        register()
        register()
        found = {
            "registered": KVConnectorFactory.get_connector_class_by_name("KvstoreConnector") is KvstoreConnector,
            "strange": strange_hooks(),
            "scheduler": disabled_hooks(KVConnectorRole.SCHEDULER),
            "worker": disabled_hooks(KVConnectorRole.WORKER),
            "metrics": metrics(),
        }
    print(json.dumps(found))  # noqa: T201  # the test reads it


if __name__ == "__main__":
    main()
