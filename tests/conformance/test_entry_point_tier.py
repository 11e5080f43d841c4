"""A tier of another package, found by its entry point: the suite, and a store that uses it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.errors import ConfigError
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.tier_conformance import TierConformance
from kvstore.tiers.persistent import find_factory
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from kvstore.testing.tier_conformance import OpenTier

SOURCE = Path(__file__).with_name("tiny_tier.py")
NAMESPACE = Namespace(
    model="model",
    revision="revision",
    layout=KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=4),
)
PROMPTS = [list(range(start, start + 160)) for start in range(0, 8 * 160, 160)]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two entry points, as an installed package declares them: one that works, one that names nothing."""
    folder = tmp_path / "site"
    information = folder / "tiny_tier-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "tiny_tier.py").write_text(SOURCE.read_text())
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-tier\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[kvstore.tiers]\ntiny = tiny_tier:open_tier\nbroken = tiny_tier:nothing\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    return folder


class TestTinyTier(TierConformance):
    survives_restart = False

    @pytest.fixture
    def open_tier(self, installed: Path, tmp_path: Path) -> OpenTier:
        return lambda capacity_bytes: find_factory("tiny")(
            tmp_path, capacity_bytes=capacity_bytes, further_paths=(), free_floor_bytes=None
        )


@pytest.mark.usefixtures("installed")
def test_a_store_keeps_its_blocks_in_the_tier_that_is_named(tmp_path: Path) -> None:
    sizes = {"host_bytes": 256 << 10, "disk_bytes": 4 << 20}
    with kvstore.open(tmp_path / "data", **sizes, disk_kind="tiny") as store:
        for prompt in PROMPTS:
            assert 0 == store_prompt(store, NAMESPACE, prompt).refused_blocks
        assert Tier.DISK in store.match(NAMESPACE, PROMPTS[0]).tiers
        assert [40] * len(PROMPTS) == [verified_blocks(store, NAMESPACE, prompt) for prompt in PROMPTS]
        assert 40 * len(PROMPTS) == store.evict(NAMESPACE, []) + store.clear(NAMESPACE)
    assert not (tmp_path / "data").exists()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("kind", "problem"), [("huge", "'huge', expected one of slabs, broken, tiny"), ("broken", "cannot be loaded")]
)
def test_a_tier_that_nobody_offers_is_refused_by_name(tmp_path: Path, kind: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        kvstore.open(tmp_path, host_bytes=1 << 20, disk_bytes=4 << 20, disk_kind=kind)
