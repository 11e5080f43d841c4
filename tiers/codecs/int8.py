"""Lossy: elements as whole numbers from -127 to 127, scaled."""

from __future__ import annotations

from kvstore.tiers.codecs.quantised import QuantisedCodec

_INT8 = 2
INT8 = QuantisedCodec("int8", 3, _INT8)
