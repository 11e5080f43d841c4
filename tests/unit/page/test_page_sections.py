"""The node's page: what it shows of the counters, to whom, and as it changes."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from kvstore.clock import SystemClock
from kvstore.cluster_metrics import NO_PEERS
from kvstore.doctor import Cause, Finding, Report
from kvstore.errors import DirectoryUnavailableError
from kvstore.metrics import CallMetrics
from kvstore.node_pages import NodeHealth, NodePages
from kvstore.nodes import Node
from kvstore.page import PATHS, NodePage, PageSources, ShownPrefix
from kvstore.page.history import READINGS_MAX, History
from kvstore.page.sections import render
from kvstore.page.wsgi import STREAMS_MAX
from kvstore.stats import StoreStats, TierStats, WhatIf

if TYPE_CHECKING:
    from collections.abc import Iterator

WELL = NodeHealth(lambda: None, lambda: None)
STATS = StoreStats(
    tiers={"host": TierStats(2**30, 2**29, 1500)},
    namespaces=1,
    lookups=12,
    lookup_tokens=10_000,
    hit_tokens={"host": 4_000, "disk": 1_000},
    loaded_tokens={"host": 4_000, "disk": 900},
    stored_blocks=0,
    present_blocks=0,
    rejected_blocks={},
    evicted_blocks={},
    corrupt_blocks=0,
    disk_faults={},
    prefetches={},
    prefetched_blocks=0,
    written_bytes=0,
    moves=0,
    leases=3,
    stages=0,
    pins=0,
    index_bytes=0,
    policy_bytes=0,
)


class HandClock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds

    def unix(self) -> float:
        return 0.0


class Told:
    """What the page is told, to be changed by a test."""

    def __init__(self) -> None:
        self.stats = STATS
        self.calls = CallMetrics()
        self.prefixes = [ShownPrefix("acme", "<model>", 2048, 2**20)]
        self.nodes: list[Node] = []
        self.clock = HandClock()

    def sources(self, **changes: Any) -> PageSources:
        sources = PageSources(
            stats=lambda: self.stats,
            peers=lambda: NO_PEERS,
            calls=self.calls,
            prefixes=lambda: self.prefixes,
            nodes=lambda: self.nodes,
            node_name="node-a",
            version="1.2.3",
            clock=self.clock,
        )
        return replace(sources, **changes)


def looked_up(stats: StoreStats, tokens: int, **found: int) -> StoreStats:
    hits = {tier: stats.hit_tokens.get(tier, 0) + found.get(tier, 0) for tier in {*stats.hit_tokens, *found}}
    return replace(stats, lookup_tokens=stats.lookup_tokens + tokens, hit_tokens=hits)


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


def sections_of(told: Told, turns: int = 1, **changes: Any) -> dict[str, str]:
    sources = told.sources(**changes)
    history = History(sources)
    for _ in range(turns):
        history.read()
        told.clock.seconds += 5
    return {name: text_of(html) for name, html in render(sources, history).items()}


def test_hit_rates_are_those_of_the_counters():
    told = Told()
    sources = told.sources()
    history = History(sources)
    history.read()
    told.stats = looked_up(told.stats, 1_000, host=700, disk=100)
    told.clock.seconds += 5
    history.read()
    hits = text_of(render(sources, history)["hits"])
    assert "Last 5 minutes 80.0% Since the start 52.7% Tokens looked up 11.0 k" in hits
    assert "now 70.0% 10.0%" in hits


def test_what_would_raise_the_hit_rate_is_told_with_its_place_and_its_advice():
    finding = Finding("acme", "<m>", Cause.VOLATILE, 34, 2, 30, 0.75, 45_600_000, "move <it>")
    report = Report(7200.0, 40, 3, {Cause.VOLATILE: 30, Cause.COLD: 10}, (finding,))
    told = sections_of(Told(), doctor=lambda: report)["doctor"]
    assert "of 40 lookups in 2.0 hours, and 3 that were not looked at" in told
    assert "volatile acme, &lt;m&gt; token 34 (block 2) 75.0% 45.6 M move &lt;it&gt;" in told


def test_where_nothing_stands_out_and_where_nobody_looks_the_page_says_so():
    report = Report(3600.0, 5, 0, {Cause.FOUND: 5}, ())
    assert "Nothing stands out in 5 lookups in 1.0 hours." == sections_of(Told(), doctor=lambda: report)["doctor"]
    assert "Nobody looks at prompts: doctor.enabled is false." == sections_of(Told())["doctor"]


@pytest.mark.parametrize("label", ["packed", "a third-party tier"])
def test_a_tier_of_any_name_is_shown(label: str):
    told = Told()
    told.stats = replace(
        looked_up(STATS, 100, **{label: 100}),
        tiers=STATS.tiers | {label: TierStats(2**20, 2**19, 3)},
        loaded_tokens=STATS.loaded_tokens | {label: 100},
        what_if=(WhatIf(label, 1.0, 2**20, 0.5),),
    )
    shown = sections_of(told, turns=2)
    assert [label in shown[name] for name in ("hits", "occupancy", "moved", "what-if")] == [True] * 4


def test_an_hour_is_kept_and_no_more():
    told = Told()
    history = History(told.sources())
    for _ in range(READINGS_MAX + 10):
        history.read()
        told.clock.seconds += 5
    assert (READINGS_MAX - 1, 3600) == (len(history.steps()), history.last(1e9).seconds)
    assert 300 == history.last(300).seconds


def test_a_clock_that_stands_still_gives_no_step():
    history = History(Told().sources())
    history.read()
    history.read()
    assert ([], None) == (history.steps(), history.last(300))


def test_every_section_says_so_where_it_knows_nothing():
    told = Told()
    told.prefixes = []
    shown = sections_of(told)
    assert "the first reading is on its way" in shown["hits"]
    assert "No call in the last 5 minutes." == shown["latency"]
    assert "Nothing is stored yet." == shown["prefixes"]
    assert "before a tier is full" in shown["what-if"]
    assert "This node is in no cluster." == shown["nodes"]


def test_latency_is_that_of_the_calls_of_the_last_minutes():
    told = Told()
    sources = told.sources()
    history = History(sources)
    told.calls.observe("Match", 5.0, "OK")
    history.read()
    for status in ("OK", "UNAVAILABLE"):
        for _ in range(50):
            told.calls.observe("Match", 0.00007, status)
    told.clock.seconds += 5
    history.read()
    assert "Match 100 75 µs 100 µs" in text_of(render(sources, history)["latency"])


def test_what_more_memory_would_bring_is_drawn_with_todays_point():
    told = Told()
    rows = [WhatIf("host", scale, int(scale * 2**30), ratio) for scale, ratio in ((0.5, 0.3), (1.0, 0.5), (2.0, 0.6))]
    told.stats = replace(told.stats, what_if=tuple(rows))
    html = render(told.sources(), History(told.sources()))["what-if"]
    assert "512 MiB 30.0% 1.00 GiB 50.0% 2.00 GiB 60.0%" in text_of(html)
    assert 1 == html.count('class="marked"')


def test_names_that_others_chose_are_text():
    told = Told()
    told.nodes = [Node("<b>", 1, 1, ("tcp://<i>",), 1, 1, 0)]
    sources = told.sources(node_name="<node>")
    html = "".join(render(sources, History(sources)).values())
    assert ("&lt;model&gt;" in html, "<b>" in html, "<i>" in html) == (True, False, False)


def test_a_directory_that_does_not_answer_is_said_and_the_rest_is_shown():
    def nodes() -> list[Node]:
        raise DirectoryUnavailableError("valkey://x does not answer; start it")

    shown = sections_of(Told(), nodes=nodes)
    assert "valkey://x does not answer; start it" in shown["nodes"]
    assert "Since the start 50.0%" in shown["hits"]


@pytest.fixture
def told() -> Told:
    told = Told()
    told.clock = SystemClock()
    return told


@pytest.fixture
def address(told: Told) -> Iterator[str]:
    with (
        closing(NodePage(told.sources(), reading_seconds=0.01)) as page,
        closing(NodePages(CollectorRegistry(), WELL, "127.0.0.1:0", dict.fromkeys(PATHS, page))) as pages,
    ):
        yield f"http://{pages.address}"


def asked(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_is_whole_without_a_script_and_loads_nothing_from_elsewhere(address: str):
    with urllib.request.urlopen(address) as response:
        policy, html = response.headers["Content-Security-Policy"], response.read().decode()
    assert "Since the start 50.0%" in text_of(html)
    assert [] == re.findall(r"@[a-z-]+@|https?://", html)
    assert "default-src 'none'" in policy
    assert {200} == {asked(f"{address}/{name}")[0] for name in re.findall(r'(?:href|src)="(page\.\w+)"', html)}


@pytest.mark.parametrize(("host", "status"), [("localhost:9464", 200), ("[::1]:9464", 200), ("evil.example:9464", 403)])
def test_a_browser_that_was_led_here_by_a_foreign_name_is_refused(address: str, host: str, status: int):
    assert status == asked(address, Host=host)[0]


def events(stream: Any) -> Iterator[dict[str, str]]:
    for line in stream:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


def test_what_changes_is_streamed_and_what_does_not_is_not(told: Told, address: str):
    with urllib.request.urlopen(f"{address}/stream") as stream:
        heard = events(stream)
        assert {"hits", "occupancy", "moved", "latency", "prefixes", "what-if", "doctor", "nodes"} == set(next(heard))
        told.stats = replace(told.stats, leases=77)
        changed = next(sections for sections in heard if "occupancy" in sections)
        assert "Leases 77" in text_of(changed["occupancy"])
        assert "prefixes" not in changed


def test_browsers_are_few_and_one_that_leaves_makes_room(told: Told, address: str):
    streams = [urllib.request.urlopen(f"{address}/stream") for _ in range(STREAMS_MAX)]
    for stream in streams:
        next(events(stream))
    assert 503 == asked(f"{address}/stream")[0]
    streams.pop().close()
    while asked_once(f"{address}/stream") == 503:  # its thread notices when it next writes
        told.stats = replace(told.stats, leases=told.stats.leases + 1)
    for stream in streams:
        stream.close()


def asked_once(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def method_of(address: str, method: bytes, path: bytes) -> tuple[int, bytes]:
    """The status and the body of an answer, which ends."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(method + b" " + path + b" HTTP/1.0\r\nHost: localhost\r\n\r\n")
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_who_asks_for_headers_alone_gets_no_body_and_no_stream(address: str):
    paths = [b"/", b"/page.css", b"/livez", *[b"/stream"] * (STREAMS_MAX + 1)]
    assert [(200, b"")] * len(paths) == [method_of(address, b"HEAD", path) for path in paths]


def test_pages_are_read_and_nothing_else(address: str):
    found = [
        method_of(address, method, path)[0] for method in (b"POST", b"PUT") for path in (b"/", b"/stream", b"/livez")
    ]
    assert [405] * 6 == found


def test_closing_ends_the_streams_and_the_thread(told: Told):
    page = NodePage(told.sources(), reading_seconds=60)
    answer = page({"PATH_INFO": "/stream"}, lambda status, headers: None)
    heard = iter(answer)
    next(heard)
    waiting = threading.Thread(target=lambda: list(heard))
    waiting.start()
    page.close()
    page.close()
    waiting.join(10)
    assert (False, False) == (waiting.is_alive(), page.is_alive)
