"""Lossy: elements as FP8 E4M3 (OCP 8-bit Floating Point Specification, https://www.opencompute.org), scaled."""

from __future__ import annotations

from kvstore.tiers.codecs.quantised import QuantisedCodec

_E4M3 = 1
FP8 = QuantisedCodec("fp8", 2, _E4M3)
