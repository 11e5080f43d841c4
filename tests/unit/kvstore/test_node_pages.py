"""The pages of a node: what they answer, and on which addresses."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from contextlib import closing

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from kvstore.errors import ConfigError
from kvstore.node_pages import NodeHealth, NodePages

WELL = NodeHealth(lambda: None, lambda: None)


def answer(pages: NodePages, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{pages.address}{path}") as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_metrics_are_served_on_a_free_port_until_closed(host):
    registry = CollectorRegistry()
    Counter("kvstore_tries", "Tries.", registry=registry).inc(480)
    pages = NodePages(registry, WELL, f"{host}:0")
    status, text = answer(pages, "/metrics")
    pages.close()
    pages.close()

    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert (200, 480) == (status, families["kvstore_tries"].samples[0].value)
    with pytest.raises(urllib.error.URLError):
        answer(pages, "/metrics")


def test_each_page_tells_its_own_trouble():
    trouble: list[str] = []
    unready = ["starting"]
    health = NodeHealth(lambda: next(iter(trouble), None), lambda: next(iter(unready), None))
    with closing(NodePages(CollectorRegistry(), health, "127.0.0.1:0")) as pages:
        assert (200, "ok\n") == answer(pages, "/livez")
        assert (503, "starting\n") == answer(pages, "/readyz")

        unready.clear()
        assert (200, "ok\n") == answer(pages, "/readyz")

        trouble.append("the event loop stands still")
        assert (503, "the event loop stands still\n") == answer(pages, "/livez")
        assert (503, "the event loop stands still\n") == answer(pages, "/readyz")


def test_one_slow_reader_keeps_no_other_waiting():
    with closing(NodePages(CollectorRegistry(), WELL, "127.0.0.1:0")) as pages, socket.socket() as slow:
        host, port = pages.address.split(":")
        slow.connect((host, int(port)))
        slow.sendall(b"GET /livez")
        assert (200, "ok\n") == answer(pages, "/livez")


def test_a_taken_port_is_one_line_that_names_it():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"

        with pytest.raises(ConfigError, match=address):
            NodePages(CollectorRegistry(), WELL, address)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "0.0.0.0:0", "example.org:80"])
def test_an_address_that_is_malformed_or_not_on_loopback_is_refused(address):
    with pytest.raises(ConfigError, match=r"server\.metrics_address"):
        NodePages(CollectorRegistry(), WELL, address)
