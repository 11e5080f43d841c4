"""Codecs by themselves: what comes back, how far off it is, and what they leave alone."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.tiers.codecs import quantised
from kvstore.tiers.codecs.base import OPAQUE, PartForm
from kvstore.tiers.codecs.blosc import BloscCodec
from kvstore.tiers.codecs.fp8 import FP8
from kvstore.tiers.codecs.int8 import INT8
from kvstore.tiers.codecs.registry import CODECS, ENCRYPTED, Pipeline, make_codec, pipeline_of

if TYPE_CHECKING:
    from kvstore.tiers.codecs.quantised import QuantisedCodec

DTYPES = ["float32", "float16", "bfloat16"]
BYTE_DTYPES = ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
LOSSY = [FP8, INT8]
HERE = Path(__file__).parent
CSRC = Path(quantised.__file__).parents[1] / "csrc"
NO_AVX2 = 77


def as_bytes(values: np.ndarray, dtype: str) -> np.ndarray:
    """Elements of a type, rounded to it, as bytes."""
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)
    return values.astype(dtype).reshape(-1).view(np.uint8)


def as_values(data: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view(dtype).astype(np.float64)


def channels_like_keys(seed: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Normal values whose size differs from channel to channel."""
    generator = np.random.default_rng(seed)
    return generator.normal(size=shape) * np.exp(2 * generator.normal(size=(shape[0], 1, shape[2])))


# What a byte of each codec may stand for, in ascending order, from the definitions of the two formats.
def values_of(codec: QuantisedCodec) -> np.ndarray:
    if codec is INT8:
        return np.arange(-127, 128, dtype=np.float64)
    small = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    large = [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    magnitudes = [*small, *large][:-1]  # the last code is no number
    return np.unique([*magnitudes, *(-value for value in magnitudes)])


def naive(codec: QuantisedCodec, values: np.ndarray) -> np.ndarray:
    """The nearest values that a codec can store, with the scale that it may choose."""
    grid = values_of(codec)
    largest = np.abs(values).max(axis=1, keepdims=True)
    exact = (largest / grid[-1]).astype(np.float32)
    scale = ((exact.view(np.uint32) + 0xFFFF) & 0xFFFF0000).view(np.float32).astype(np.float64)
    scaled = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)
    above = np.clip(np.searchsorted(grid, scaled), 1, len(grid) - 1)
    lower, upper = grid[above - 1], grid[above]
    return np.where(scaled - lower <= upper - scaled, lower, upper) * scale


@pytest.mark.parametrize("dtype", [*DTYPES, *BYTE_DTYPES, None])
@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 70_000), bits=st.integers(0, 8), seed=st.integers(0, 1000))
def test_blosc_gives_back_every_byte(dtype: str | None, size: int, bits: int, seed: int) -> None:
    codec = BloscCodec()
    part = np.random.default_rng(seed).integers(0, 1 << bits, size, dtype=np.uint8)
    encoded = codec.encode(part, PartForm(dtype))
    if encoded is None:
        return
    assert len(encoded.data) < size
    back = np.zeros(size, dtype=np.uint8)
    assert codec.decode(encoded.data, back, PartForm(dtype))
    np.testing.assert_array_equal(part, back)


def test_blosc_gives_up_where_nothing_is_gained_and_refuses_what_is_no_frame() -> None:
    codec = BloscCodec()
    noise = np.random.default_rng(1).integers(0, 256, 65_536, dtype=np.uint8)
    assert codec.encode(noise, PartForm("bfloat16")) is None
    assert not codec.decode(noise[:1000], np.zeros(65_536, dtype=np.uint8), PartForm("bfloat16"))
    frame = codec.encode(np.zeros(65_536, dtype=np.uint8), OPAQUE)
    assert frame is not None
    assert not codec.decode(frame.data, np.zeros(100, dtype=np.uint8), OPAQUE)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 4),
    tokens=st.integers(3, 33),
    channels=st.integers(1, 70),
    size=st.sampled_from([1e-6, 1.0, 50.0]),
    seed=st.integers(0, 1000),
)
def test_lossy_codecs_are_as_near_as_their_formats_allow(
    codec: QuantisedCodec, dtype: str, groups: int, tokens: int, channels: int, size: float, seed: int
) -> None:
    part = as_bytes(np.clip(channels_like_keys(seed, (groups, tokens, channels)) * size, -6e4, 6e4), dtype)
    form = PartForm(dtype, tokens, channels)
    encoded = codec.encode(part, form)
    assert encoded is not None
    assert len(encoded.data) == groups * channels * (2 + tokens) < len(part)
    back = np.zeros(len(part), dtype=np.uint8)
    assert codec.decode(encoded.data, back, form)
    values, given = as_values(part, dtype), as_values(back, dtype)
    expected = naive(codec, values.reshape(groups, tokens, channels)).reshape(-1)
    # The native part divides and rounds in float32: at a tie, and in the type of the part, it may go the other way.
    ulp = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    tolerance = np.abs(values) * ulp + np.abs(expected - values) * 1e-5 + (6e-8 if dtype == "float16" else 0)
    assert np.all(np.abs(given - values) <= np.abs(expected - values) + tolerance)
    off = np.abs(given - values)
    assert encoded.error.max_absolute == pytest.approx(off.max(), rel=1e-5)
    assert encoded.error.rms_relative == pytest.approx(np.sqrt((off**2).sum() / (values**2).sum()), rel=1e-4)


@pytest.mark.parametrize(("codec", "most"), [(FP8, 0.03), (INT8, 0.01)], ids=["fp8", "int8"])
def test_the_error_on_keys_and_values_is_small(codec: QuantisedCodec, most: float) -> None:
    part = as_bytes(channels_like_keys(3, (64, 16, 128)), "bfloat16")
    encoded = codec.encode(part, PartForm("bfloat16", 16, 128))
    assert encoded is not None
    assert 0 < encoded.error.rms_relative < most
    assert len(part) / len(encoded.data) == pytest.approx(32 / 18)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_zeros_come_back_as_zeros(codec: QuantisedCodec) -> None:
    part, form = np.zeros(2 * 4 * 16 * 8, dtype=np.uint8), PartForm("bfloat16", 16, 8)
    encoded = codec.encode(part, form)
    assert encoded is not None
    assert (0, 0) == (encoded.error.max_absolute, encoded.error.rms_relative)
    back = np.ones(len(part), dtype=np.uint8)
    assert codec.decode(encoded.data, back, form)
    np.testing.assert_array_equal(part, back)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    ("form", "size"),
    [
        (OPAQUE, 4096),
        (PartForm("bfloat16"), 4096),
        (PartForm("bfloat16", 16, 8), 4095),
        (PartForm("bfloat16", 16, 8), 128),
        (PartForm("bfloat16", 1, 8), 4096),
        *((PartForm(dtype, 16, 8), 4096) for dtype in BYTE_DTYPES),
    ],
)
def test_lossy_codecs_leave_alone_what_they_do_not_understand(codec: QuantisedCodec, form: PartForm, size: int) -> None:
    part = np.full(size, 60, dtype=np.uint8)
    assert codec.encode(part, form) is None
    assert not codec.decode(part[:100], part.copy(), form)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_lossy_codecs_leave_alone_what_is_not_finite(codec: QuantisedCodec, dtype: str, value: float) -> None:
    values = np.ones((2, 16, 8))
    part = as_bytes(values, dtype)
    last = as_bytes(np.array([value]), "float32" if dtype == "bfloat16" else dtype)
    part[-len(part) // 256 :] = last[-(len(part) // 256) :]
    assert codec.encode(part, PartForm(dtype, 16, 8)) is None


def test_every_pipeline_is_found_by_its_number_and_no_other() -> None:
    pipelines = [Pipeline(make_codec(name), encrypts) for name in CODECS for encrypts in (False, True)]
    assert len(pipelines) == len({pipeline.number for pipeline in pipelines})
    for pipeline in pipelines:
        found = pipeline_of(pipeline.number)
        assert found is not None
        assert (pipeline, pipeline.name) == (found, found.name)
        assert hash(pipeline) == hash(found)
    assert [None] * 3 == [pipeline_of(number) for number in (4, ENCRYPTED << 1, ENCRYPTED | 77)]


def test_numbers_stay_what_they_are_and_fingerprints_tell_forms_apart() -> None:
    assert {"none": 0, "blosc2": 1, "fp8": 2, "int8": 3} == {name: make_codec(name).number for name in CODECS}
    form = PartForm("bfloat16", 16, 128)
    prints = [Pipeline(make_codec(name), False).fingerprint((form,)) for name in CODECS]
    assert len(set(prints)) == len(prints)
    others = (OPAQUE, PartForm("float16", 16, 128), PartForm("bfloat16", 32, 128), PartForm("bfloat16", 16, 64))
    assert prints[2] not in [Pipeline(FP8, False).fingerprint((other,)) for other in others]


def test_an_unknown_codec_and_a_missing_library_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="codec is 'zip', expected one of none, blosc2, fp8, int8"):
        make_codec("zip")
    from kvstore.tiers.codecs import blosc

    blosc._library.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "blosc2", None)
    with pytest.raises(ConfigError, match=r"pip install \"prefix-kvstore\[blosc\]\""):
        make_codec("blosc2")
    assert pipeline_of(1) is None
    blosc._library.cache_clear()


def test_loops_for_wide_registers_give_the_bytes_of_the_plain_ones(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler, or no processor with two kinds of loops")
    program = tmp_path / "both_ways"
    flags = ["-std=c++17", "-O3", "-fno-trapping-math", "-fno-math-errno", f"-I{CSRC}"]
    subprocess.run([compiler, *flags, HERE / "quantised_rows_both_ways.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    if done.returncode == NO_AVX2:
        pytest.skip("this processor has no AVX2")
    assert (0, "") == (done.returncode, done.stdout)
