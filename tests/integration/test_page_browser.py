"""The node's page in a real Chromium: it loads, follows a workload, shows the right numbers, and works by keyboard.

Where Chromium is missing: apt-get install chromium chromium-driver, and pip install --group dev for selenium.
With KVSTORE_SCREENSHOTS=FOLDER in the environment pictures of it are kept.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import kvstore
from kvstore.clock import SystemClock
from kvstore.cluster_metrics import NO_PEERS
from kvstore.metrics import CallMetrics
from kvstore.node_pages import NodeHealth, NodePages
from kvstore.page import PATHS, HotPrefixes, NodePage, PageSources

webdriver = pytest.importorskip("selenium.webdriver", reason="there is no selenium: pip install --group dev")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402  # only where it is there
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.store import Store

LAYOUT = kvstore.KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=16)
NAMESPACE = kvstore.Namespace(model="llama", revision="r1", layout=LAYOUT, tenant="acme")
PROMPT = list(range(1024))
WAIT_SECONDS = 60
pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="there is no chromium: apt-get install chromium chromium-driver",
)


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(None, host_bytes=1 << 24) as store:
        yield store


@pytest.fixture
def address(store: Store) -> Iterator[str]:
    clock = SystemClock()
    sources = PageSources(
        store.stats, lambda: NO_PEERS, CallMetrics(), HotPrefixes(store, clock), tuple, "node-a", "1.2.3", clock
    )
    health = NodeHealth(lambda: None, lambda: None)
    with (
        closing(NodePage(sources, reading_seconds=0.1)) as page,
        closing(NodePages(CollectorRegistry(), health, "127.0.0.1:0", dict.fromkeys(PATHS, page))) as pages,
    ):
        yield f"http://{pages.address}/"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    options.add_argument("--window-size=1400,1500")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = shutil.which("chromium")
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as browser:
        browser.set_page_load_timeout(WAIT_SECONDS)
        yield browser


def serve_prompts(store: Store, times: int) -> None:
    for _ in range(times):
        with store.lease(store.match(NAMESPACE, PROMPT)) as lease:
            lease.load_into(np.empty((lease.blocks, LAYOUT.block_bytes), dtype=np.uint8))
        with store.stage(NAMESPACE, PROMPT) as stage:
            if stage.blocks:
                stage.write_from(np.zeros((stage.blocks, LAYOUT.block_bytes), dtype=np.uint8))


def text(browser: webdriver.Chrome, section: str) -> str:
    return " ".join(browser.find_element(By.ID, section).text.split())


def wait_for(browser: webdriver.Chrome, section: str, part: str) -> None:
    WebDriverWait(browser, WAIT_SECONDS).until(
        lambda _: part in text(browser, section), f"{part!r} is not in {section}: {text(browser, section)}"
    )


def press(browser: webdriver.Chrome, selector: str, key: str) -> None:
    """Press a key on what has the focus then, whatever is drawn anew meanwhile."""
    browser.execute_script("document.querySelector(arguments[0]).focus()", selector)
    ActionChains(browser).send_keys(key).perform()


def keep_picture(browser: webdriver.Chrome, name: str) -> None:
    folder = os.environ.get("KVSTORE_SCREENSHOTS")
    if folder:
        browser.save_screenshot(str(Path(folder) / name))


def prefer(browser: webdriver.Chrome, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def test_the_page_follows_a_workload_and_its_numbers_are_those_of_the_store(
    browser: webdriver.Chrome, address: str, store: Store
):
    browser.get(address)
    assert "kvstore: node-a" == browser.title
    WebDriverWait(browser, WAIT_SECONDS).until(lambda _: "live" == browser.find_element(By.ID, "state").text)
    wait_for(browser, "hits", "Since the start -")
    serve_prompts(store, 4)  # one miss and three hits
    wait_for(browser, "hits", "Last 5 minutes 75.0% Since the start 75.0% Tokens looked up 4.10 k Lookups 4")
    wait_for(browser, "occupancy", "16.0 MiB 64")
    serve_prompts(store, 6)
    wait_for(browser, "hits", "Last 5 minutes 90.0%")
    assert [] == browser.get_log("browser")


def test_hot_prefixes_are_named_by_length_and_owner_alone(browser: webdriver.Chrome, address: str, store: Store):
    serve_prompts(store, 2)
    browser.get(address)
    wait_for(browser, "prefixes", "acme llama 1.02 k")


def test_what_was_opened_stays_open_and_the_keyboard_stays_where_it_is(
    browser: webdriver.Chrome, address: str, store: Store
):
    serve_prompts(store, 2)
    browser.get(address)
    wait_for(browser, "hits", "The same as a table")
    press(browser, "#hits summary", Keys.ENTER)
    browser.execute_script("document.querySelector('#hits table').dataset.mark = 'old'")
    serve_prompts(store, 2)
    wait_for(browser, "hits", "Lookups 4")
    look = "const q = (s) => document.querySelector(s); return [q('#hits table').dataset.mark, q('#hits details').open,"
    assert [None, True, "SUMMARY"] == browser.execute_script(f"{look} document.activeElement.tagName]")


def test_the_first_key_leads_past_the_header(browser: webdriver.Chrome, address: str):
    browser.get(address)
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    assert "Skip to the figures" == browser.switch_to.active_element.text


@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 26)")])
def test_the_page_is_light_or_dark_as_its_reader_prefers(
    browser: webdriver.Chrome, address: str, store: Store, scheme: str, ground: str
):
    prefer(browser, scheme)
    serve_prompts(store, 3)
    browser.get(address)
    wait_for(browser, "hits", "Lookups 3")
    shown = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == shown
    keep_picture(browser, f"page-{scheme}.png")


def test_contrast_of_text_is_enough_in_both_schemes(browser: webdriver.Chrome, address: str):
    """WCAG 2.1, 1.4.3: a ratio of 4.5 or more; https://www.w3.org/TR/WCAG21/#contrast-minimum."""
    for scheme in ("light", "dark"):
        prefer(browser, scheme)
        browser.get(address)
        found = WebDriverWait(browser, WAIT_SECONDS).until(colours)
        text, faint, link, trouble, *grounds = map(luminance, found)
        ratios = [contrast(one, ground) for one in (text, faint, link, trouble) for ground in grounds]
        assert min(ratios) >= 4.5, (scheme, ratios)


def colours(browser: webdriver.Chrome) -> list[str] | None:
    """Those of text, then those of grounds, once the style sheet is there."""
    names = ("--text", "--faint", "--link", "--trouble", "--panel", "--ground")
    style = "getComputedStyle(document.documentElement)"
    found = browser.execute_script(f"return arguments[0].map(name => {style}.getPropertyValue(name).trim())", names)
    return found if all(found) else None


def luminance(colour: str) -> float:
    digits = colour.removeprefix("#")
    digits = "".join(one * 2 for one in digits) if len(digits) == 3 else digits
    red, green, blue = (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    linear = [one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
