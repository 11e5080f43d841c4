"""What the settings say of a node among others: its directory, its name, and what keeps it there."""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.cluster.announcer import POLL_SECONDS, Announcer, AnnounceSettings
from kvstore.cluster.deletions import Deletions
from kvstore.cluster.directory import NodeProfile
from kvstore.cluster.drain import Drainer
from kvstore.cluster.memory_directory import MemoryDirectory, SharedDirectory
from kvstore.cluster.valkey_address import ValkeyMode, parse_valkey_address
from kvstore.cluster.valkey_directory import DirectoryTimes, ValkeyDirectory
from kvstore.cluster.valkey_link import LinkOptions, ValkeyLink
from kvstore.config import read_secret
from kvstore.errors import ConfigError, StorageError
from kvstore.transport.address import TcpAddress, parse_address
from kvstore.transport.credentials import credentials_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.clock import Clock
    from kvstore.cluster.announcer import AnnouncedStore
    from kvstore.cluster.deletions import DeletingStore
    from kvstore.cluster.directory import Membership
    from kvstore.cluster.handover import LeavingStore
    from kvstore.cluster.peers import ClusterPeers
    from kvstore.cluster.valkey_address import ValkeyAddress
    from kvstore.cluster_config import ClusterConfig
    from kvstore.nodes import NodeReport

_IDENTITY_BYTES = 16
_NODE_FILE = "node.json"
_DELETIONS_FILE = "deletions.json"


def open_membership(config: ClusterConfig, clock: Clock) -> Membership:
    """The directory of the settings; without one, a directory of this node alone. Asks no server yet.

    Raises ConfigError for what can never work, such as a file that is not there.
    """
    if not config.directory:
        return MemoryDirectory(SharedDirectory(clock, config.lease_seconds, config.entry_seconds))
    address = _address(config)
    options = LinkOptions(
        timeout_seconds=config.directory_seconds_max,
        retry_seconds=config.lease_seconds / 2,  # longer than from one renewal to the next, which tries anyway
        tls_ca=config.directory_tls_ca,
        tls_cert=config.directory_tls_cert,
        tls_key=config.directory_tls_key,
        sentinel_password=_sentinel_password(config, address),
    )
    _check_files(config, is_tls=address.is_tls)
    link = ValkeyLink(address, options, clock)
    return ValkeyDirectory(link, config.name, DirectoryTimes(config.lease_seconds, config.entry_seconds), clock)


def check_addresses(config: ClusterConfig, listen: Sequence[str]) -> None:
    """Raise ConfigError where peers would be told an address that nobody, or every node but this one, is found at."""
    if not config.directory:
        return
    for text in config.advertise or listen:
        address = parse_address(text)
        if not isinstance(address, TcpAddress):
            continue
        if address.is_any:
            here = "cluster.advertise" if config.advertise else "server.listen, which peers are told,"
            raise ConfigError(
                f"{here} names {text}, at which each node finds itself; set cluster.advertise (--advertise) to where "
                f"peers reach this one, such as {replace(address, host='node-7.example')}"
            )
        if config.advertise and not address.port:
            raise ConfigError(f"cluster.advertise names {text}, expected the port that peers reach, not 0")


def open_announcer(
    config: ClusterConfig,
    store: AnnouncedStore,
    membership: Membership,
    clock: Clock,
    *,
    report: Callable[[], NodeReport],
    upkeep: Callable[[], None],
) -> Announcer:
    """What keeps this node in its directory, not started yet. `report` is what it says of itself there."""
    settings = AnnounceSettings(
        announce_tokens=config.announce_tokens,
        announce_after_seconds=config.announce_after_seconds,
        lease_seconds=config.lease_seconds,
        entry_seconds=config.entry_seconds,
    )
    return Announcer(store, membership, settings=settings, clock=clock, report=report, upkeep=upkeep)


def open_drainer(
    config: ClusterConfig,
    name: str,
    store: LeavingStore,
    *,
    membership: Membership,
    peers: ClusterPeers,
    announcer: Announcer,
    clock: Clock,
) -> Drainer:
    """What drains this node."""
    return Drainer(
        name,
        store,
        membership,
        peers,
        (announcer, peers),
        announce_tokens=config.announce_tokens,
        settle_seconds=config.announce_after_seconds + 2 * POLL_SECONDS,
        clock=clock,
    )


def open_deletions(data_dir: str, store: DeletingStore, membership: Membership, clock: Clock) -> Deletions:
    """The deletions of namespaces that this node knows of, those that it missed applied if the directory answers."""
    deletions = Deletions(store, membership, Path(data_dir) / _DELETIONS_FILE if data_dir else None, clock)
    deletions.sync()
    return deletions


def node_profile(config: ClusterConfig, data_dir: str) -> NodeProfile:
    """Who this node is: after a restart the same, if it has a data directory. Raises StorageError."""
    given = config.node or socket.gethostname() or "node"
    if not config.directory or not data_dir:
        identity = secrets.token_bytes(_IDENTITY_BYTES)
        is_named = bool(config.node) or not config.directory
        return NodeProfile(given if is_named else f"{given}-{identity[:4].hex()}", identity)
    kept = _kept_profile(Path(data_dir) / _NODE_FILE, given if config.node else "")
    return kept if not config.node else replace(kept, name=config.node)


def _kept_profile(path: Path, name: str) -> NodeProfile:
    """What the data directory says of this node; written there at the first start."""
    try:
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            return NodeProfile(str(kept["name"]), bytes.fromhex(kept["identity"]))
        identity = secrets.token_bytes(_IDENTITY_BYTES)
        profile = NodeProfile(name or f"{socket.gethostname() or 'node'}-{identity[:4].hex()}", identity)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"name": profile.name, "identity": identity.hex()}), encoding="utf-8")
        fresh.replace(path)
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise StorageError(
            f"{path} cannot be used: {err}; it names this node in its cluster, so restore it, or delete it for a new "
            "name"
        ) from err
    return profile


def _address(config: ClusterConfig) -> ValkeyAddress:
    address = parse_valkey_address(config.directory)
    if config.directory_user:
        address = replace(address, username=config.directory_user)
    if config.directory_password_file:
        address = replace(address, password=_password(config.directory_password_file))
    return address


def _sentinel_password(config: ClusterConfig, address: ValkeyAddress) -> str:
    if not config.sentinel_password_file:
        return ""
    if address.mode is not ValkeyMode.SENTINEL:
        raise ConfigError("cluster.sentinel_password_file is set, but the directory's address has no +sentinel")
    return _password(config.sentinel_password_file)


def _password(file: str) -> str:
    return read_secret(Path(file)).decode("utf-8", "surrogateescape")


def _check_files(config: ClusterConfig, *, is_tls: bool) -> None:
    """Read the files once: later they would only be one more reason why the directory does not answer."""
    ca, cert, key = config.directory_tls_ca, config.directory_tls_cert, config.directory_tls_key
    if (ca or cert or key) and not is_tls:
        raise ConfigError("cluster.directory_tls_* are set, but the directory is asked without TLS; say valkeys://")
    try:
        credentials = credentials_of(tls_ca=ca or None, tls_cert=cert or None, tls_key=key or None, token_file=None)
        if credentials is not None:
            credentials.check()
    except ConfigError as err:
        raise ConfigError(f"cluster.directory_tls_*: {err}") from err
