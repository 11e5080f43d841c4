"""What a load consists of."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.transport.credentials import CredentialFiles
from kvstore.types import KvLayout, Namespace

CLIENTS_MAX = 1024
_BLOCK_BYTES_MIN = 64


class Operation(enum.Enum):
    """One thing that a client does: a lookup, a lookup with lease and load, or a store of a prompt of its own."""

    MATCH = "match"
    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Raises ConfigError for a value that cannot be. `mix` are the shares of operations, in any unit.

    `files` are what clients show the sidecar.
    """

    address: str
    clients: int = 4
    processes: int = 1
    seconds: float = 10.0
    seed: int = 0
    mix: tuple[tuple[Operation, int], ...] = ((Operation.MATCH, 8), (Operation.LOAD, 1), (Operation.STORE, 1))
    prompts: int = 64
    prompt_tokens: int = 2048
    block_tokens: int = 16
    block_bytes: int = 32 * 1024
    files: CredentialFiles = field(default_factory=CredentialFiles)

    def __post_init__(self) -> None:
        _check("clients", self.clients, 1, CLIENTS_MAX)
        _check("processes", self.processes, 1, self.clients)
        _check("prompts", self.prompts, 1, 2**20)
        _check("block_tokens", self.block_tokens, 1, 4096)
        _check("prompt_tokens", self.prompt_tokens, self.block_tokens, 2**22)
        _check("block_bytes", self.block_bytes, _BLOCK_BYTES_MIN, 2**30)
        if not 0 < self.seconds < 1e7:
            raise ConfigError(f"seconds is {self.seconds!r}, expected more than 0")
        if not sum(share for _, share in self.mix) or any(share < 0 for _, share in self.mix):
            raise ConfigError(f"mix is {self.mix}, expected shares of at least 0, not all of them 0")
        if self.block_bytes % (2 * self.block_tokens):
            raise ConfigError(f"block_bytes is {self.block_bytes}, expected a multiple of {2 * self.block_tokens}")

    @property
    def namespace(self) -> Namespace:
        """Where the blocks lie: a namespace of its own for each seed and shape."""
        layout = KvLayout(
            layers=1,
            kv_heads=1,
            head_dim=self.block_bytes // (2 * self.block_tokens),
            dtype="int8",
            block_tokens=self.block_tokens,
        )
        return Namespace(model="kvstore bench load", revision=f"seed {self.seed}", layout=layout)

    @property
    def prompt_blocks(self) -> int:
        """Whole blocks of a prompt."""
        return self.prompt_tokens // self.block_tokens


def parse_mix(text: str) -> tuple[tuple[Operation, int], ...]:
    """Shares as people write them: match=8,load=1,store=1. Raises ConfigError."""
    shares: dict[Operation, int] = {}
    for item in text.split(","):
        name, _, share = item.strip().partition("=")
        known = {operation.value: operation for operation in Operation}
        if name not in known or not (share.isascii() and share.isdigit()):
            raise ConfigError(f"mix has {item.strip()!r}, expected shares such as match=8,load=1,store=1")
        shares[known[name]] = int(share)
    return tuple(shares.items())


def _check(name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise ConfigError(f"{name} is {value}, expected {lowest}..{highest}")
