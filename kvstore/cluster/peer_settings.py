"""How a node takes blocks from its peers, and what it shows them. config.py says how users set it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING

from kvstore.cluster.plan import Path
from kvstore.cluster.prefill import PrefillModel
from kvstore.errors import ConfigError
from kvstore.transport.credentials import credentials_of

if TYPE_CHECKING:
    from kvstore.peer_config import PeerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Limits and assumptions, all above 0.

    `fetches_max` prompts are brought at a time, `waiting_max` more wait for that, and of one holder this node fetches
    `fetches_per_holder_max` at a time. A prompt is given up after `fetch_seconds_max`, a peer's answer after
    `answer_seconds_max`. Blocks come in chunks of about `chunk_bytes`, each of which is kept once it is whole. What is
    stored is in the directory after about `settle_seconds`; claims last for `claim_seconds_max` at most. `path` and
    `prefill` are what is assumed until something was measured or reported; `gpu_weight` is explained in plan.py.
    """

    fetches_max: int = 8
    waiting_max: int = 64
    fetches_per_holder_max: int = 4
    fetch_seconds_max: float = 10.0
    answer_seconds_max: float = 2.0
    chunk_bytes: int = 8 << 20
    settle_seconds: float = 2.5
    claim_seconds_max: float = 60.0
    gpu_weight: float = 1.0
    announce_tokens: int = 512
    path: Path = field(default_factory=lambda: Path(latency_seconds=0.002, bytes_per_second=1e9))
    prefill: PrefillModel = field(default_factory=PrefillModel)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and not value > 0:
                raise ConfigError(f"{item.name} is {value}, expected more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCredentials:
    """What this node shows its peers, and by what it knows them: files, as a client of kvstore names them."""

    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    token_file: str | None = None


def peer_settings(config: PeerConfig, *, announce_tokens: int) -> PeerSettings:
    """What the settings of a node say. Raises ConfigError."""
    return PeerSettings(
        fetches_max=config.fetches_max,
        waiting_max=config.fetches_waiting_max,
        fetches_per_holder_max=config.fetches_per_holder_max,
        fetch_seconds_max=config.fetch_seconds_max,
        answer_seconds_max=config.answer_seconds_max,
        chunk_bytes=config.fetch_chunk_bytes,
        gpu_weight=config.gpu_weight,
        announce_tokens=announce_tokens,
        path=Path(config.peer_latency_seconds, float(config.peer_bytes_per_second)),
        prefill=PrefillModel(1 / config.prefill_tokens_per_second, 1 / config.prefill_pairs_per_second),
    )


def peer_credentials(config: PeerConfig) -> PeerCredentials:
    """What the settings of a node say, its files read once. Raises ConfigError for one that cannot be used."""
    given = PeerCredentials(
        tls_ca=config.tls_ca or None,
        tls_cert=config.tls_cert or None,
        tls_key=config.tls_key or None,
        token_file=config.token_file or None,
    )
    try:
        credentials = credentials_of(**asdict(given))
        if credentials is not None:
            credentials.check()
    except ConfigError as err:
        raise ConfigError(f"what this node shows its peers, cluster.tls_* and cluster.token_file: {err}") from err
    return given
