"""Every setting of the sidecar and the command line, once: name, unit, default, limits and one sentence.

A value comes from a flag, else from the environment, else from the TOML file, else from the default. The variable of a
key is `KVSTORE_` and the key in capitals with `__` for each dot: `tiers.host.capacity_bytes` is
`KVSTORE_TIERS__HOST__CAPACITY_BYTES`. A key that is not listed here is an error that names the nearest one. This is
the only file of the product that reads the environment.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cluster_config import ClusterConfig, check_cluster
from kvstore.codec_config import CodecConfig, check_codecs, check_packed
from kvstore.engine_event_config import EngineEventConfig, check_engine_events
from kvstore.errors import ConfigError
from kvstore.insight_config import DoctorConfig, LogConfig
from kvstore.layer_groups import FIELD_BYTES_MAX
from kvstore.metrics_config import MetricsConfig, check_metrics
from kvstore.quantities import format_size
from kvstore.quota_config import SIZE_BYTES_MAX, QuotaConfig, check_quotas
from kvstore.security_config import AuthConfig, ClientConfig, TlsConfig
from kvstore.setting_values import PARSERS, Kind, Rule
from kvstore.setting_values import setting as _setting
from kvstore.tier_config import DEFAULT_DISK_BYTES, TiersConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DEFAULT_ADDRESS = "unix:///run/kvstore.sock"
DISK_BYTES_MIN = 2**20  # with less there is room for the tier's own files only
_ENV_PREFIX = "KVSTORE_"
_BY_NAME = "<name>"
_SECONDS_MAX = 30 * 86400
# Those of kvstore.radix, which is too high up to be imported here.
EVICTION_POLICIES = ("survival", "survival_flops", "lru", "lfu", "fifo", "s3fifo", "sieve")
HUGE_PAGES = ("auto", "never", "required")  # that of kvstore.tiers, likewise
BULK_CHOICES = ("socket", "nixl")  # those of kvstore.transport, likewise
ARENA_CHOICES = ("map", "off")  # likewise
DISK_ADMISSIONS = ("worth", "demotion", "reuse", "write_through")  # those of kvstore.store


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its full key (`<name>` stands for a name of the user's), its rule and its default."""

    key: str
    rule: Rule
    default: Any

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return _ENV_PREFIX + self.key.upper().replace(".", "__")

    @property
    def default_text(self) -> str:
        """The default as a user would write it."""
        return format_value(self, self.default)


def _limit(default: int, sentence: str, kind: Kind = Kind.COUNT) -> Any:  # noqa: ANN401  # as dataclasses.field
    return _setting(default, kind, sentence, minimum=1, maximum=2**31 - 1)


def _time_limit(default: float, sentence: str) -> Any:  # noqa: ANN401  # as dataclasses.field
    return _setting(default, Kind.DURATION, sentence, maximum=_SECONDS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the sidecar answers and how it stops."""

    listen: tuple[str, ...] = _setting(
        (DEFAULT_ADDRESS,),
        Kind.LIST,
        "Addresses to serve on: unix:///path, host:port on loopback, tls://host:port (port 0: any).",
    )
    unix_mode: str = _setting("0600", Kind.TEXT, "Mode of Unix sockets, octal; 0660 lets server.unix_group in.")
    unix_group: str = _setting("", Kind.TEXT, "Group of Unix sockets, by name or number; empty: the server's own.")
    metrics_address: str = _setting(
        "",
        Kind.TEXT,
        "host:port of the node's page, /metrics, /livez and /readyz, on loopback (port 0: any); empty: no pages.",
    )
    grace_seconds: float = _setting(
        5.0, Kind.DURATION, "How long open calls may still run after SIGTERM or SIGINT.", maximum=3600
    )
    stall_seconds_max: float = _setting(
        60.0,
        Kind.DURATION,
        "An event loop that stands still for so long ends the process, to be restarted by its supervisor; 0s: never.",
        maximum=3600,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What the service refuses to exceed; full means refused at once. The transport's ServiceLimits has the same."""

    message_bytes: int = _limit(20 * 2**20, "One message: 16MiB hold a prompt of 4 Mi tokens.", Kind.SIZE)
    frame_bytes: int = _limit(2 * 2**20, "One frame of raw bytes in a load or a store.", Kind.SIZE)
    bulk_buffer_bytes: int = _limit(4 * 2**20, "What one load or store holds in memory at a time.", Kind.SIZE)
    row_bytes: int = _limit(256 * 2**20, "One block, or one part of it, in a load or a store.", Kind.SIZE)
    sessions: int = _limit(1024, "Clients at a time.")
    leases_per_session: int = _limit(1024, "Leases that one client holds.")
    stages_per_session: int = _limit(64, "Stores that one client has begun and not ended.")
    prefetches_per_session: int = _limit(1024, "Prefetches that one client has begun and not ended.")
    namespaces_per_session: int = _limit(256, "Namespaces that one client has opened.")
    connections: int = _limit(4096, "Connections to addresses that carry both lanes.")
    calls_per_connection: int = _limit(256, "Calls that one connection of the fast lane has under way.")
    bulk_connections_per_session: int = _limit(16, "Connections for bytes that one client of the fast lane has.")
    arena_clients: int = _limit(256, "Clients that read blocks where they lie; each takes three descriptors.")
    prompt_bytes_per_session: int = _limit(
        4 * 2**20, "Prompts remembered for one client of the fast lane, which then sends only what is new.", Kind.SIZE
    )
    prompt_bytes: int = _limit(256 * 2**20, "Prompts remembered for all clients of the fast lane together.", Kind.SIZE)
    bulk_calls: int = _limit(16, "Loads and stores of bytes at a time, on each lane.")
    bulk_seconds_max: float = _time_limit(600.0, "How long one load or store of bytes may take.")
    short_calls: int = _limit(1024, "Lookups and other short calls at a time.")
    long_calls: int = _limit(16, "Flushes, evictions, clears and checks at a time.")
    prefetch_waiters: int = _limit(32, "Callers that wait for prefetches at a time.")
    event_readers: int = _limit(32, "Readers that wait for events at a time.")
    pin_tokens: int = _limit(2**20, "Tokens of one pinned prompt.")
    prompt_tokens: int = _limit(4 * 2**20, "Tokens of one prompt, whatever is asked about it.")
    calls_per_tenant: int = _limit(1024, "Calls that the clients of one tenant have under way.")
    leases_per_tenant: int = _limit(4096, "Leases that the clients of one tenant hold.")
    stages_per_tenant: int = _limit(1024, "Stores that the clients of one tenant have begun and not ended.")
    leased_bytes_per_tenant: int = _setting(
        0,
        Kind.SIZE,
        "Bytes that the leases of one tenant protect, each lease counted in full; 0: no limit.",
        maximum=SIZE_BYTES_MAX,
    )
    calls_per_second_per_tenant: int = _setting(
        0, Kind.COUNT, "Calls of one tenant that begin in a second; 0: no limit.", maximum=2**31 - 1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """How bytes travel."""

    arena: str = _setting(
        ARENA_CHOICES[0],
        Kind.TEXT,
        "Whether clients on this host read blocks where they lie in host memory: map, or off.",
        choices=ARENA_CHOICES,
    )
    bulk: str = _setting(
        BULK_CHOICES[0],
        Kind.TEXT,
        "What moves the bytes of loads and stores: socket, or nixl for clients that ask for it (extra `nixl`).",
        choices=BULK_CHOICES,
    )
    bulk_tenants: tuple[str, ...] = _setting(
        (), Kind.LIST, "Tenants whose clients may use transport.bulk, besides those who have all tenants; *: any."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Limits of the store itself, for all clients together. The store's StoreSettings has the same."""

    namespaces_max: int = _limit(1024, "Namespaces in use.")
    leases_max: int = _limit(4096, "Leases that are held.")
    stages_max: int = _limit(1024, "Stores that have begun and not ended.")
    pins_max: int = _limit(4096, "Pins in force.")
    pinned_ratio_max: float = _setting(0.5, Kind.RATIO, "Share of the host tier that pins may protect.", maximum=1)
    sparse_ratio_max: float = _setting(
        0.5,
        Kind.RATIO,
        "Share of a namespace's room, in each tier, that its sparse parts may take, if its layout has any.",
        maximum=1,
    )
    state_index_bytes: int = _setting(
        64 << 20, Kind.SIZE, "Memory of the index for the token ids of a namespace's sequence states."
    )
    request_ids_max: int = _limit(65536, "Request ids remembered, so that each counts as one lookup.")
    room_seconds_max: float = _time_limit(2.0, "How long a store waits for host memory to be made free.")
    stage_seconds_max: float = _time_limit(600.0, "Age at which a store that was begun is aborted.")
    lease_seconds_max: float = _time_limit(3600.0, "Age at which a lease is ended.")
    eviction_policy: str = _setting(
        EVICTION_POLICIES[0],
        Kind.TEXT,
        "What leaves first where room is short: survival, survival_flops, which spares what costs more to compute "
        "again, or lru, lfu, fifo, s3fifo and sieve to compare with.",
        choices=EVICTION_POLICIES,
    )
    huge_pages: str = _setting(
        "auto",
        Kind.TEXT,
        "Huge pages for host memory: auto takes reserved or transparent ones where the system gives them.",
        choices=HUGE_PAGES,
    )
    reserve_from_bytes: int = _setting(
        128 * 2**20,
        Kind.SIZE,
        "Host tiers of so much or more are reserved and touched in the background at start, others as they fill.",
        minimum=1,
        maximum=SIZE_BYTES_MAX,
    )
    lock_memory: bool = _setting(False, Kind.SWITCH, "Lock host memory, so that it is never swapped out (mlock).")
    poison_freed: bool = _setting(
        False, Kind.SWITCH, "For debugging: fill freed host memory, so that who still reads it sees a pattern."
    )
    disk_admission: str = _setting(
        DISK_ADMISSIONS[0],
        Kind.TEXT,
        "What is written to disk of what leaves host memory: worth (what is likely to be used), demotion (all), reuse "
        "(what was used twice); or write_through: all that is stored.",
        choices=DISK_ADMISSIONS,
    )
    extent_bytes: int | None = _setting(
        None,
        Kind.SIZE,
        "Host memory that a namespace takes at a time; with less, more small namespaces have room beside each other.",
        minimum=2**16,
        maximum=SIZE_BYTES_MAX,
        auto="a sixteenth of host memory, 4MiB to 256MiB",
    )
    store_bytes_per_second: int | None = _setting(
        None,
        Kind.SIZE,
        "What a namespace may store in a second without reuse, above what fits into host memory; each byte that is "
        "loaded allows 20 more.",
        minimum=1,
        maximum=SIZE_BYTES_MAX,
        auto="a tenth of the bandwidth of memory, measured at start",
    )
    prefetch_ratio: float = _setting(
        0.1, Kind.RATIO, "Share of the host tier that prefetches under way may fill.", maximum=1
    )
    prefetches_max: int = _limit(64, "Prefetches, and writes of write_through, that wait or run; more are refused.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """What the sidecar knows of one tenant."""

    secret_files: tuple[str, ...] = _setting(
        (), Kind.LIST, "Files with the secrets this tenant's clients may prove; one secret a file, newest first."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsConfig:
    """The event log."""

    capacity_bytes: int = _setting(
        64 * 2**20,
        Kind.SIZE,
        "Memory for the newest events; older ones are dropped and readers told.",
        minimum=2**16,
        maximum=2**36,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings, checked."""

    address: str = _setting(DEFAULT_ADDRESS, Kind.TEXT, "Where commands such as `kvstore stats` find the sidecar.")
    data_dir: str = _setting("", Kind.TEXT, "Folder for everything that outlives the process; empty: no disk tier.")
    client: ClientConfig = field(default_factory=ClientConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict, metadata={"by_name": TenantConfig})
    quota: Mapping[str, QuotaConfig] = field(default_factory=dict, metadata={"by_name": QuotaConfig})
    codec: Mapping[str, CodecConfig] = field(default_factory=dict, metadata={"by_name": CodecConfig})
    events: EventsConfig = field(default_factory=EventsConfig)
    engine_events: Mapping[str, EngineEventConfig] = field(
        default_factory=dict, metadata={"by_name": EngineEventConfig}
    )
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)

    @property
    def quotas(self) -> tuple[QuotaConfig, ...]:
        """Quotas in their order: the tables `[[quota]]` as the file has them, then those with names of their own."""
        return tuple(self.quota[name] for name in sorted(self.quota, key=_by_number))

    @property
    def codecs(self) -> tuple[CodecConfig, ...]:
        """Codecs in their order, as quotas are."""
        return tuple(self.codec[name] for name in sorted(self.codec, key=_by_number))

    @property
    def disk_bytes(self) -> int:
        """Capacity of the disk tier once `auto` is decided."""
        if self.tiers.disk.capacity_bytes is None:
            return DEFAULT_DISK_BYTES if self.data_dir else 0
        return self.tiers.disk.capacity_bytes


@dataclass(frozen=True, slots=True)
class Origin:
    """One value in force: its key, the value as text, and where it comes from."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The settings in force and, for each, where its value comes from."""

    config: Config
    origins: tuple[Origin, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    origin: str
    values: Mapping[str, object]


def load_config(
    *, file: Path | None = None, flags: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Settings from flags (by full key), environment, TOML file and defaults; raises ConfigError in one line."""
    layers = (
        _Layer("flag", flags or {}),
        _Layer("environment", _environment_values(os.environ if environ is None else environ)),
        _Layer(str(file), {} if file is None else _file_values(file)),
    )
    chosen: dict[str, tuple[object, str]] = {}
    for layer in layers:
        for key, value in layer.values.items():
            parsed = _parse(_setting_named(key, layer.origin), key, value, layer.origin)
            chosen.setdefault(key, (parsed, layer.origin))
    config = _build(Config, "", {key: value for key, (value, _) in chosen.items()})
    _check(config)
    return LoadedConfig(config, tuple(_origins(chosen)))


def settings() -> tuple[Setting, ...]:
    """Every setting there is, in the order of the tree."""
    return tuple(_walk(Config, ""))


def format_value(setting: Setting, value: object) -> str:
    """A value as a user would write it."""
    if value is None:
        return f"auto ({setting.rule.auto})"
    if isinstance(value, tuple):
        return ",".join(value)
    if setting.rule.kind is Kind.SWITCH:
        return "true" if value else "false"
    if setting.rule.kind is Kind.SIZE and isinstance(value, int):
        return format_size(value)
    if setting.rule.kind is Kind.DURATION:
        return f"{value:.12g}s"
    return str(value)


def read_secret(path: Path) -> bytes:
    """The secret in a file, without a final line end; raises ConfigError if there is none or it is too long."""
    try:
        secret = path.read_bytes()
    except OSError as err:
        raise ConfigError(f"secret file {path} cannot be read: {err.strerror}") from err
    secret = secret.removesuffix(b"\n").removesuffix(b"\r")
    if not 1 <= len(secret) <= FIELD_BYTES_MAX:
        raise ConfigError(f"secret file {path} has {len(secret)} bytes, expected 1..{FIELD_BYTES_MAX}")
    return secret


def user_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The user's cache folder for kvstore, by the XDG rules; not created here."""
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "kvstore"


def quiet_grpc() -> None:
    """Keep gRPC's native code from writing its own lines on stderr. For our own processes, before grpc is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _walk(section: type[Any], prefix: str) -> Iterator[Setting]:
    for item in fields(section):
        if "rule" in item.metadata:
            yield Setting(prefix + item.name, item.metadata["rule"], item.default)
        elif "by_name" in item.metadata:
            yield from _walk(item.metadata["by_name"], f"{prefix}{item.name}.{_BY_NAME}.")
        else:
            yield from _walk(_section_of(item.default_factory), f"{prefix}{item.name}.")


def _section_of(factory: Any) -> type[Any]:  # noqa: ANN401  # dataclasses types it as a union with a sentinel
    assert isinstance(factory, type), factory
    return factory


_SETTINGS = {setting.key: setting for setting in settings()}
_NAMED = {
    re.compile(re.escape(key).replace(re.escape(_BY_NAME), ".+")): setting
    for key, setting in _SETTINGS.items()
    if _BY_NAME in key
}


def _find(key: str) -> Setting | None:
    if _BY_NAME not in key and key in _SETTINGS:
        return _SETTINGS[key]
    return next((setting for pattern, setting in _NAMED.items() if pattern.fullmatch(key)), None)


def _setting_named(key: str, origin: str) -> Setting:
    setting = _find(key)
    if setting is None:
        nearest = difflib.get_close_matches(key, _SETTINGS, n=1, cutoff=0)[0]
        raise ConfigError(f"unknown setting {key!r} ({origin}); the nearest one is {nearest!r}")
    return setting


def _environment_values(environ: Mapping[str, str]) -> dict[str, object]:
    """Variables of ours. One without `__` that is no setting is left alone: Kubernetes makes such variables itself
    (KVSTORE_PORT, KVSTORE_SERVICE_HOST, ...) for a service of this name."""
    values: dict[str, object] = {}
    for variable, text in environ.items():
        key = variable.removeprefix(_ENV_PREFIX).lower().replace("__", ".")
        if variable.startswith(_ENV_PREFIX) and ("." in key or _find(key) is not None):
            values[key] = text
    return values


def _file_values(file: Path) -> dict[str, object]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"settings file {file} cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ConfigError(f"settings file {file} is not UTF-8 text (byte {err.start})") from err
    except tomllib.TOMLDecodeError as err:
        found = re.search(r"line (\d+)", str(err))
        raise ConfigError(f"{file}:{found[1] if found else 'end'}: {err}") from err
    except (ValueError, RecursionError) as err:  # a number of thousands of digits, brackets thousands deep
        raise ConfigError(f"settings file {file}: {err}") from err
    return dict(_flatten(table, ""))


def _flatten(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    """Full keys and their values. The tables of an array have numbers from 1 on as their names."""
    for name, value in table.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield from _flatten({str(number): item for number, item in enumerate(value, 1)}, f"{prefix}{name}.")
        elif isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _parse(setting: Setting, key: str, value: object, origin: str) -> object:
    try:
        parsed = PARSERS[setting.rule.kind](value)
        _check_limits(setting, parsed)
    except ValueError as err:
        raise ConfigError(f"{key} is {value!r} ({origin}): {err}") from err
    return parsed


def _check_limits(setting: Setting, value: object) -> None:
    rule = setting.rule
    if rule.choices and value not in rule.choices:
        raise ValueError(f"expected one of {', '.join(rule.choices)}")
    if isinstance(value, (int, float)) and rule.kind is not Kind.SWITCH:
        if not value >= rule.minimum:  # a TOML nan is no number either
            raise ValueError(f"expected at least {format_value(setting, rule.minimum)}")
        if rule.maximum is not None and value > rule.maximum:
            raise ValueError(f"expected at most {format_value(setting, rule.maximum)}")


def _build(section: type[Any], prefix: str, values: Mapping[str, object]) -> Any:  # noqa: ANN401  # any section
    built: dict[str, object] = {}
    for item in fields(section):
        key = prefix + item.name
        if "rule" in item.metadata:
            if key in values:
                built[item.name] = values[key]
        elif "by_name" in item.metadata:
            built[item.name] = {
                name: _build(item.metadata["by_name"], f"{key}.{name}.", values) for name in _names(f"{key}.", values)
            }
        else:
            built[item.name] = _build(_section_of(item.default_factory), f"{key}.", values)
    return section(**built)


def _by_number(name: str) -> tuple[bool, int, str]:
    is_number = name.isascii() and name.isdigit()
    return (not is_number, int(name) if is_number else 0, name)


def _names(prefix: str, values: Mapping[str, object]) -> list[str]:
    return sorted({key.removeprefix(prefix).rpartition(".")[0] for key in values if key.startswith(prefix)})


def _check(config: Config) -> None:
    if not config.server.listen:
        raise ConfigError("server.listen is empty, expected at least one address")
    if 0 < config.disk_bytes < DISK_BYTES_MIN:
        raise ConfigError(
            f"tiers.disk.capacity_bytes is {config.disk_bytes}, expected at least {format_size(DISK_BYTES_MIN)}, or 0 "
            "for no disk tier"
        )
    if config.tiers.disk.capacity_bytes and not config.data_dir:
        raise ConfigError("tiers.disk.capacity_bytes is set without data_dir; say where the files go (--data-dir)")
    disk = config.tiers.disk
    needing = {"further_dirs": disk.further_dirs, "free_floor_bytes": disk.free_floor_bytes, "key_file": disk.key_file}
    for name, given in needing.items():
        if given and not config.disk_bytes:
            raise ConfigError(f"tiers.disk.{name} is set without a disk tier; set data_dir too")
    packed_bytes = check_packed(config.tiers.packed, disk_bytes=config.disk_bytes)
    check_quotas(config.quota, {"host": config.tiers.host.capacity_bytes, "disk": packed_bytes or config.disk_bytes})
    check_cluster(config.cluster)
    check_engine_events(config.engine_events)
    check_metrics(config.metrics)
    check_codecs(config.codec, config.tiers.disk, {"disk": config.disk_bytes, "packed": packed_bytes})


def _origins(chosen: Mapping[str, tuple[object, str]]) -> Iterator[Origin]:
    for setting in settings():
        if _BY_NAME not in setting.key:
            value, origin = chosen.get(setting.key, (setting.default, "default"))
            yield Origin(setting.key, format_value(setting, value), origin)
    for key, (value, origin) in sorted(chosen.items()):
        if key not in _SETTINGS:
            yield Origin(key, format_value(_setting_named(key, origin), value), origin)
