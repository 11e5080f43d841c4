"""A whole store whose blocks are coded on disk: by settings, over restarts, when it is full, after changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvstore
from kvstore.config import load_config
from kvstore.errors import ConfigError
from kvstore.layer_groups import Recurrent, SlidingWindow
from kvstore.metrics import STORE_METRICS
from kvstore.server import codec_rules
from kvstore.store import CodecRule, Store, StoreSettings, open_store
from kvstore.store.codecs import coding, part_forms
from kvstore.testing.blocks import store_prompt, verified_blocks
from kvstore.testing.states import STATE_LAYOUT, loaded_state
from kvstore.tiers.codecs.base import OPAQUE, PartForm
from kvstore.types import KvLayout, Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float16", block_tokens=16)
NAMESPACE = Namespace(model="org/Llama-8B", revision="r", tenant="team-a", layout=LAYOUT)
OTHER = Namespace(model="org/Llama-8B", revision="r", tenant="batch", layout=LAYOUT)
SPARSE = Namespace(
    model="org/Hybrid",
    revision="r",
    tenant="team-a",
    layout=KvLayout(
        layers=2,
        kv_heads=2,
        head_dim=32,
        dtype="float16",
        block_tokens=16,
        groups=(
            SlidingWindow(layers=2, window=40, kv_heads=2, head_dim=32, dtype="bfloat16"),
            Recurrent(layers=1, state_bytes=5000),
        ),
    ),
)
BLOSC = CodecRule(tenant="team-*", compression="blosc2")
SEALED = CodecRule(tenant="team-*", compression="blosc2", encryption="aes-gcm")


def prompts(count: int, first: int = 0) -> list[list[int]]:
    return [[*range(64), *range(1000 * n, 1000 * n + 96)] for n in range(first + 1, first + count + 1)]


@pytest.fixture
def key_path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"key {'5a' * 32}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def reopen(tmp_path: Path, key_path: Path) -> Iterator[Callable[..., Store]]:
    opened: list[Store] = []

    def open_again(*rules: CodecRule, disk_bytes: int = 16 * MIB) -> Store:
        for store in opened:
            store.close()
        settings = StoreSettings(codecs=rules)
        sizes = {"host_bytes": 4 * MIB, "disk_bytes": disk_bytes, "free_floor_bytes": 0}
        opened.append(open_store(tmp_path / "data", **sizes, settings=settings, key_file=key_path))
        return opened[-1]

    yield open_again
    for store in opened:
        store.close()


def everything(path: Path) -> bytes:
    return b"".join(found.read_bytes() for found in path.rglob("*") if found.is_file())


@pytest.mark.parametrize("rule", [BLOSC, SEALED, CodecRule(encryption="aes-gcm")])
@pytest.mark.parametrize("namespace", [NAMESPACE, SPARSE], ids=["dense", "sparse"])
def test_what_was_stored_is_found_after_a_restart(
    reopen: Callable[..., Store], rule: CodecRule, namespace: Namespace
) -> None:
    store = reopen(rule)
    for prompt in prompts(8):
        store_prompt(store, namespace, prompt)
    store.flush()
    for _ in range(2):
        store = reopen(rule)
        for prompt in prompts(8):
            assert Tier.DISK in store.match(namespace, prompt).tiers or store.match(namespace, prompt).host_blocks
            assert 10 == verified_blocks(store, namespace, prompt)
        stats = store.stats()
        assert (0, {}) == (stats.corrupt_blocks, stats.disk_faults)
        assert stats.codecs[rule.pipeline.name].read_blocks > 0  # type: ignore[union-attr]
        assert () == store.verify().problems


def test_no_token_of_a_prompt_is_readable_in_the_data_directory(reopen: Callable[..., Store], tmp_path: Path) -> None:
    # The policy's snapshot is written at close.
    store = reopen(SEALED, disk_bytes=3 * MIB)
    for prompt in prompts(2):
        store_prompt(store, NAMESPACE, prompt)
        store_prompt(store, SPARSE, prompt)
        store_prompt(store, OTHER, [token + 7_000_000 for token in prompt])
    store.flush()
    during = everything(tmp_path / "data")
    store.close()
    found = during + everything(tmp_path / "data")
    assert b"KVSPOLCY" in found
    for prompt in prompts(2):
        for start in range(0, 160, 16):
            tokens = np.array(prompt[start : start + 16], dtype="<u4").tobytes()
            assert tokens[:16] not in found
        seen = np.array(prompt[:16], dtype="<u4") + np.uint32(7_000_000)
        assert seen.tobytes() in found  # the other tenant's are there to be found


def test_fp8_gives_back_nearly_what_was_stored_and_says_how_nearly(reopen: Callable[..., Store]) -> None:
    rule = CodecRule(model="*/Llama-*", compression="fp8", lossy="accept")
    prompt = list(range(160))
    rows = np.random.default_rng(1).normal(size=(10, LAYOUT.block_bytes // 2)).astype(np.float16)
    store = reopen(rule)
    with store.stage(NAMESPACE, prompt) as stage:
        stage.write_from(rows.view(np.uint8))
    store.flush()
    store = reopen(rule)
    back = np.zeros_like(rows)
    with store.lease(store.match(NAMESPACE, prompt)) as lease:
        assert 10 == lease.load_into(back.view(np.uint8)).blocks
    off = np.abs(back.astype(np.float64) - rows)
    assert 0 < off.max() <= np.abs(rows).max() / 16
    assert np.sqrt((off**2).sum() / (rows.astype(np.float64) ** 2).sum()) < 0.03


def test_a_full_disk_holds_more_blocks_when_they_are_smaller(reopen: Callable[..., Store], tmp_path: Path) -> None:
    layout = KvLayout(layers=4, kv_heads=2, head_dim=64, dtype="float16", block_tokens=16)
    held = {}
    for number, rule in enumerate((CodecRule(), BLOSC)):
        namespace = Namespace(model=f"m{number}", revision="r", tenant="team-a", layout=layout)
        store = reopen(rule, disk_bytes=3 * MIB)
        store.clear(NAMESPACE)
        rows = np.random.default_rng(1).integers(0, 8, (10, layout.block_bytes), dtype=np.uint8)
        for prompt in prompts(40, first=100 * number):
            with store.stage(namespace, prompt[64:]) as stage:
                stage.write_from(rows[:6])
            store.flush()
            assert store.stats().tiers["disk"].used_bytes <= 3 * MIB
        held[number] = store.stats().tiers["disk"].blocks
        assert "disk_error" not in store.stats().rejected_blocks
        assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "data").rglob("*")) <= 3 * MIB
        store.clear(namespace)
    assert held[1] > 1.6 * held[0]


def test_blocks_of_a_former_codec_stay_readable(reopen: Callable[..., Store]) -> None:
    ways = ((), (BLOSC,), (SEALED,), (CodecRule(encryption="aes-gcm"),), (BLOSC,), ())
    for number, rules in enumerate(ways):
        store = reopen(*rules)
        store_prompt(store, NAMESPACE, prompts(1, first=number)[0])
        store.flush()
    store = reopen()
    assert [10] * 6 == [verified_blocks(store, NAMESPACE, prompt) for prompt in prompts(6)]


def test_metrics_and_statistics_tell_what_codecs_did(reopen: Callable[..., Store]) -> None:
    store = reopen(BLOSC)
    store_prompt(store, OTHER, prompts(1)[0])
    store.flush()
    assert {} == store.stats().codecs
    store_prompt(store, NAMESPACE, prompts(1)[0])
    store.flush()
    stats = store.stats()
    assert (10, 10 * LAYOUT.block_bytes) == (stats.codecs["blosc2"].written_blocks, stats.codecs["blosc2"].raw_bytes)
    samples = {m.name: dict(m.read(stats)) for m in STORE_METRICS if m.name.startswith("kvstore_codec_")}
    assert 10 == samples["kvstore_codec_blocks_total"]["blosc2", "written"]
    assert 0 < samples["kvstore_codec_bytes_total"]["blosc2", "slot"]
    assert {("blosc2", "max_absolute"): 0, ("blosc2", "rms_relative"): 0} == samples["kvstore_codec_error"]


def test_the_first_rule_that_fits_holds() -> None:
    rules = (CodecRule(tenant="team-a", model="org/Small*"), BLOSC, CodecRule(encryption="aes-gcm"))
    small = Namespace(model="org/Small-1B", revision="r", tenant="team-a", layout=LAYOUT)
    names = [coding(rules, namespace).pipeline for namespace in (small, NAMESPACE, OTHER)]
    assert [None, "blosc2", "none+aes-gcm"] == [pipeline and pipeline.name for pipeline in names]


@pytest.mark.parametrize(
    ("axes", "channels"), [("LKHTD", 32), ("LKTHD", 64), ("LKHDT", 1), ("LHTKD", 0), ("pages", 0), ("LKHT", 0)]
)
def test_codecs_know_channels_where_the_order_of_axes_tells(axes: str, channels: int) -> None:
    layout = KvLayout(layers=2, kv_heads=4, head_dim=32, dtype="bfloat16", tensor_parallel=2, axis_order=axes)
    assert (PartForm("bfloat16", 16 if channels else 0, channels),) * 2 == part_forms(layout, None)


def test_states_are_opaque_and_windows_have_their_own_type() -> None:
    assert (PartForm("bfloat16", 16, 32),) == part_forms(SPARSE.layout, 0)
    assert (OPAQUE,) == part_forms(SPARSE.layout, 1)
    latent = KvLayout(layers=2, kv_heads=1, head_dim=576, dtype="bfloat16", kv_form="latent")
    assert (PartForm("bfloat16", 16, 576),) == part_forms(latent, None)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"compression": "fp8"}, 'say lossy = "accept" too'),
        ({"compression": "zip"}, "codec is 'zip', expected one of none, blosc2, fp8, int8"),
        ({"lossy": "maybe"}, "lossy is 'maybe', expected refuse or accept"),
        ({"encryption": "rot13"}, "encryption is 'rot13', expected one of none, aes-gcm"),
    ],
)
def test_rules_that_cannot_be_are_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CodecRule(**given)
    assert complaint in str(refused.value)


def test_a_store_that_would_not_do_as_it_is_told_does_not_open(tmp_path: Path, key_path: Path) -> None:
    sizes = {"host_bytes": MIB, "disk_bytes": 2 * MIB}
    with pytest.raises(ConfigError, match="there is no key_file"):
        kvstore.open(tmp_path / "data", **sizes, settings=StoreSettings(codecs=(SEALED,)))
    for given in ({"key_file": key_path}, {"settings": StoreSettings(codecs=(BLOSC,))}):
        with pytest.raises(ConfigError, match="are for disk_kind 'slabs', but that is 'tiny'"):
            kvstore.open(tmp_path / "data", **sizes, disk_kind="tiny", **given)
    key_path.chmod(0o644)
    with pytest.raises(ConfigError, match="has mode 0644"):
        kvstore.open(tmp_path / "data", **sizes, key_file=key_path)


SETTINGS = """
data_dir = "/data"
[tiers.disk]
key_file = "/keys"
[[codec]]
tenant = "team-*"
encryption = "aes-gcm"
[[codec]]
model = "*/Llama-*"
compression = "int8"
lossy = "accept"
"""


def test_settings_say_which_codecs_there_are(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(SETTINGS)
    config = load_config(file=tmp_path / "settings.toml", environ={}).config
    expected = (
        CodecRule(tenant="team-*", encryption="aes-gcm"),
        CodecRule(model="*/Llama-*", compression="int8", lossy="accept"),
    )
    assert ("/keys", expected) == (config.tiers.disk.key_file, codec_rules(config))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"codec.a.compression": "fp8"}, "set codec.a.lossy to 'accept' too"),
        ({"codec.a.encryption": "aes-gcm"}, "expected tiers.disk.key_file too"),
        ({"codec.a.tier": "host"}, "expected one of disk"),
        ({"codec.a.compression": "zstd"}, "expected one of none, blosc2, fp8, int8"),
        ({"codec.a.compression": "blosc2", "data_dir": ""}, "codec.a is set without a disk tier"),
        ({"tiers.disk.key_file": "/keys", "data_dir": ""}, "tiers.disk.key_file is set without a disk tier"),
        ({"codec.a.compression": "blosc2", "tiers.disk.kind": "tiny"}, "are for tiers.disk.kind 'slabs'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(environ={}, flags={"data_dir": "/data", **flags})
    assert complaint in str(refused.value)


@pytest.mark.parametrize("lossy", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lossy_codecs_touch_neither_the_bytes_nor_the_paths_of_sequence_states(
    reopen: Callable[..., Store], lossy: str, dtype: str
) -> None:
    layout = replace(STATE_LAYOUT, dtype=dtype)
    namespace = replace(NAMESPACE, layout=layout)
    rule = CodecRule(compression=lossy, lossy="accept")
    store = reopen(rule)
    # As floating-point numbers these ids and bytes are finite and of one size: a codec could round them.
    path = list(range(0x3F80_0000, 0x3F80_0000 + 900, 3))
    blob = np.linspace(1, 2, 3000, dtype="<f4").view(np.uint8)
    with store.stage_state(namespace, path, state_bytes=blob.size) as stage:
        stage.write_from(blob)
    store.flush()
    store = reopen(rule)
    tokens, state_tokens, loaded = loaded_state(store, namespace, path)
    assert (300, 300, blob.tobytes()) == (tokens, state_tokens, loaded.tobytes())
    assert 0 == store.match(namespace, [token + 1 for token in path]).tokens


def test_of_states_and_marks_nobody_knows_what_their_bytes_mean() -> None:
    marks = KvLayout(layers=0, kv_heads=1, head_dim=1, dtype="float32", groups=(Recurrent(layers=1, state_bytes=8),))
    assert [(OPAQUE,), (OPAQUE,)] == [part_forms(layout, None) for layout in (STATE_LAYOUT, marks)]
