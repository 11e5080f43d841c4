"""Settings of how blocks are stored: compressed, in 8 bits, encrypted, in packed memory; a part of kvstore.config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.errors import ConfigError
from kvstore.quantities import format_size
from kvstore.setting_values import Kind, setting

if TYPE_CHECKING:
    from collections.abc import Mapping

# Those of kvstore.tiers, which is too high up to be imported here.
COMPRESSIONS = ("none", "blosc2", "fp8", "int8")
LOSSY_COMPRESSIONS = ("fp8", "int8")
ENCRYPTIONS = ("none", "aes-gcm")
CODEC_TIERS = ("disk", "packed")
PACKED_BYTES_MIN = 2**20
_SIZE_BYTES_MAX = 2**60
REFUSE, ACCEPT = "refuse", "accept"
DISK_KIND = "slabs"  # the disk tier that has codecs: ours


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecConfig:
    """How the blocks of namespaces that fit are stored in a tier. The first one that fits holds."""

    tier: str = setting("disk", Kind.TEXT, "Which tier; packed is memory (tiers.packed).", choices=CODEC_TIERS)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedConfig:
    """Memory in the place of a disk."""

    capacity_bytes: int = setting(
        0,
        Kind.SIZE,
        "Memory for blocks that left host memory, stored as `codec` says, in the place of a disk tier; 0: none.",
        maximum=_SIZE_BYTES_MAX,
    )


class DiskSettings(Protocol):
    """What codecs ask of the settings of the disk tier."""

    @property
    def kind(self) -> str:
        """Which tier."""
        ...

    @property
    def key_file(self) -> str:
        """File with keys, or empty."""
        ...


def check_codecs(codecs: Mapping[str, CodecConfig], disk: DiskSettings, capacities: Mapping[str, int]) -> None:
    """Raise ConfigError where codecs, by name, contradict themselves or the tiers, whose bytes are given by name."""
    if (codecs or disk.key_file) and disk.kind != DISK_KIND:
        raise ConfigError(
            f"codec and tiers.disk.key_file are for tiers.disk.kind {DISK_KIND!r}, but that is {disk.kind!r}; "
            "leave them out"
        )
    for name, codec in codecs.items():
        if not capacities[codec.tier]:
            needed = "data_dir" if codec.tier == "disk" else "tiers.packed.capacity_bytes"
            raise ConfigError(f"codec.{name} is set without a {codec.tier} tier; set {needed} too")
        if codec.encryption != "none" and codec.tier != "disk":
            raise ConfigError(
                f"codec.{name}.encryption is {codec.encryption!r}, expected 'none': packed memory has no keys"
            )
        if codec.compression in LOSSY_COMPRESSIONS and codec.lossy != ACCEPT:
            raise ConfigError(
                f"codec.{name}.compression is {codec.compression!r}, which does not give back just what was stored; "
                f"set codec.{name}.lossy to {ACCEPT!r} too, or choose 'blosc2'"
            )
        if codec.encryption != "none" and not disk.key_file:
            raise ConfigError(f"codec.{name}.encryption is {codec.encryption!r}, expected tiers.disk.key_file too")


def check_packed(packed: PackedConfig, *, disk_bytes: int) -> int:
    """The bytes of packed memory. Raises ConfigError where there cannot be so many, or a disk is there too."""
    if packed.capacity_bytes and disk_bytes:
        raise ConfigError(
            f"tiers.packed.capacity_bytes is {packed.capacity_bytes} and tiers.disk.capacity_bytes is {disk_bytes}, "
            "expected one of them to be 0: packed memory stands in the place of a disk (with data_dir: --disk-bytes 0)"
        )
    if 0 < packed.capacity_bytes < PACKED_BYTES_MIN:
        raise ConfigError(
            f"tiers.packed.capacity_bytes is {packed.capacity_bytes}, expected at least "
            f"{format_size(PACKED_BYTES_MIN)}, or 0 for none"
        )
    return packed.capacity_bytes
