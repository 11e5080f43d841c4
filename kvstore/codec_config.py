"""Settings of how blocks are stored: compressed, in 8 bits, encrypted; a part of kvstore.config."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.setting_values import Kind, setting

# Those of kvstore.tiers, which is too high up to be imported here.
COMPRESSIONS = ("none", "blosc2", "fp8", "int8")
LOSSY_COMPRESSIONS = ("fp8", "int8")
ENCRYPTIONS = ("none", "aes-gcm")
CODEC_TIERS = ("disk",)
REFUSE, ACCEPT = "refuse", "accept"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecConfig:
    """How the blocks of namespaces that fit are stored in a tier. The first one that fits holds."""

    tier: str = setting("disk", Kind.TEXT, "Which tier.", choices=CODEC_TIERS)
    tenant: str = setting("", Kind.TEXT, "Fits namespaces of tenants that this pattern matches (`*`, `?`); empty: any.")
    model: str = setting("", Kind.TEXT, "Fits namespaces of models that this pattern matches (`*`, `?`); empty: any.")
    compression: str = setting(
        "none",
        Kind.TEXT,
        "none, blosc2 (lossless, extra `blosc`), or fp8 and int8 (8 bits and a scale for each channel; not lossless).",
        choices=COMPRESSIONS,
    )
    lossy: str = setting(
        REFUSE,
        Kind.TEXT,
        "accept: what is loaded may differ from what was stored; must be said for fp8 and int8.",
        choices=(REFUSE, ACCEPT),
    )
    encryption: str = setting(
        "none",
        Kind.TEXT,
        "none, or aes-gcm with the keys of tiers.disk.key_file (extra `encryption`).",
        choices=ENCRYPTIONS,
    )
