"""Settings of a node among others; a part of kvstore.config."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.peer_config import PeerConfig
from kvstore.setting_values import Kind, setting

LEASES_PER_ENTRY_MIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(PeerConfig):
    """The directory, and this node's place in it."""

    directory: str = setting(
        "",
        Kind.TEXT,
        "Valkey or Redis that nodes share: valkey://host:port, valkey+sentinel://host,host/service, "
        "valkey+cluster://host,host, valkeys for TLS; empty: this node is alone.",
    )
    name: str = setting("kvstore", Kind.TEXT, "The cluster: what its keys in the directory begin with.")
    node: str = setting(
        "", Kind.TEXT, "What this node is called; empty: the host's name and what tells data_dir from others."
    )
    advertise: tuple[str, ...] = setting(
        (), Kind.LIST, "Addresses where peers reach this node; empty: those of server.listen."
    )
    directory_user: str = setting("", Kind.TEXT, "As whom the directory is asked; empty: that of its address.")
    directory_password_file: str = setting(
        "", Kind.TEXT, "File with the password for it; empty: that of its address, if any."
    )
    sentinel_password_file: str = setting(
        "", Kind.TEXT, "File with the password of the Sentinels before it; empty: they ask for none."
    )
    directory_tls_ca: str = setting("", Kind.TEXT, "PEM file with the CA of its certificate; empty: the system's.")
    directory_tls_cert: str = setting("", Kind.TEXT, "PEM file with the certificate that it is shown.")
    directory_tls_key: str = setting("", Kind.TEXT, "PEM file with the key of cluster.directory_tls_cert.")
    directory_seconds_max: float = setting(
        0.25, Kind.DURATION, "How long one answer of the directory is waited for.", maximum=60
    )
    lease_seconds: float = setting(
        15.0, Kind.DURATION, "A node that was not heard of for so long is taken for gone.", minimum=1, maximum=3600
    )
    entry_seconds: float = setting(
        3600.0,
        Kind.DURATION,
        "What a node does not repeat for so long is forgotten; all nodes need the same.",
        minimum=10,
        maximum=7 * 86400,
    )
    announce_tokens: int = setting(
        512,
        Kind.COUNT,
        "Tokens from one block that the directory is told of to the next; all nodes need the same.",
        minimum=1,
        maximum=2**20,
    )
    announce_after_seconds: float = setting(
        2.0, Kind.DURATION, "How old a block is when the directory is told of it.", maximum=3600
    )


def check_cluster(config: ClusterConfig) -> None:
    """Raise ConfigError where settings do not fit together."""
    if config.entry_seconds < LEASES_PER_ENTRY_MIN * config.lease_seconds:
        raise ConfigError(
            f"cluster.entry_seconds is {config.entry_seconds:g}, expected at least {LEASES_PER_ENTRY_MIN} times "
            f"cluster.lease_seconds, which is {config.lease_seconds:g}"
        )
    if not config.directory_seconds_max > 0:
        raise ConfigError("cluster.directory_seconds_max is 0, expected more: no directory answers at once")
    if not config.name or any(char in config.name for char in "{}: \n") or not config.name.isascii():
        raise ConfigError(
            f"cluster.name is {config.name!r:.80}, expected ASCII without braces, colons and spaces, such as kvstore"
        )
    if len(config.node.encode()) > 200 or not config.node.isprintable():
        raise ConfigError(f"cluster.node is {config.node!r:.80}, expected at most 200 bytes of printable text")
