"""Calls to Valkey or Redis: bounded in time and number, with every failure as one error.

The only file that knows redis-py (https://redis.readthedocs.io).
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from kvstore.cluster.valkey_address import ValkeyMode
from kvstore.cluster.valkey_scripts import ALL
from kvstore.cluster.valkey_socket import CallLimit, LimitedSocket
from kvstore.errors import ConfigError, DirectoryUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.clock import Clock
    from kvstore.cluster.valkey_address import ValkeyAddress

CALLS_MAX = 8  # at a time, each on a connection of its own
PIPELINE_COMMANDS_MAX = 512
_READS = ("GET", "HGET")

Command: TypeAlias = tuple["str | bytes | int", ...]
Answer: TypeAlias = Any  # whatever the server says to a command


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How the servers are called."""

    timeout_seconds: float = 0.25
    retry_seconds: float = 1.0  # for so long after a failure nobody waits for the servers again
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    sentinel_password: str = field(default="", repr=False)


class _Pipeline(Protocol):
    def execute_command(self, *command: str | bytes | int) -> object: ...

    def execute(self, *, raise_on_error: bool) -> list[Answer]: ...


class _Client(Protocol):
    def pipeline(self, *, transaction: bool) -> _Pipeline: ...

    def script_load(self, script: str) -> object: ...

    def close(self) -> None: ...


class ValkeyLink:
    """Connections to the servers of one directory, made at the first call. Thread-safe.

    A call takes at most twice `timeout_seconds`, the wait for a place among CALLS_MAX included, and once more for each
    connection that it makes. After one that failed, further calls fail at once for `retry_seconds`, but for those of
    `probe`. `_lock` guards the client and the time of the failure; no call is made
    under it.
    """

    def __init__(self, address: ValkeyAddress, options: LinkOptions, clock: Clock) -> None:
        try:
            import redis  # an extra: whoever runs a node alone has none
        except ImportError as err:
            raise ConfigError(
                "a cluster needs the library redis; install prefix-kvstore[cluster], or start without --cluster"
            ) from err
        self._redis = redis
        self._failures = (redis.RedisError, redis.exceptions.RedisClusterException, OSError)
        self._address = address
        self._options = options
        self._clock = clock
        self._limit = CallLimit(clock)
        self._places = threading.BoundedSemaphore(CALLS_MAX)
        self._lock = threading.Lock()
        self._client: _Client | None = None
        self._down_until = clock.monotonic()

    def run(self, command: Command) -> Answer:
        """What the server answers; raises DirectoryUnavailableError."""
        return self.run_all([command])[0]

    def run_all(self, commands: Sequence[Command]) -> list[Answer]:
        """The same for many commands, sent together, PIPELINE_COMMANDS_MAX at a time."""
        if self._clock.monotonic() < self._down_until:
            raise DirectoryUnavailableError(f"the directory {self._address} did not answer a moment ago")
        return self.probe(commands)

    def probe(self, commands: Sequence[Command]) -> list[Answer]:
        """The same, also where the last call failed: for the one thread that looks whether it works again."""
        if not self._places.acquire(timeout=self._options.timeout_seconds):
            raise DirectoryUnavailableError(f"the directory {self._address} has {CALLS_MAX} calls under way already")
        try:
            answers: list[Answer] = []
            with self._limit.within(self._options.timeout_seconds):
                for first in range(0, len(commands), PIPELINE_COMMANDS_MAX):
                    answers += self._send(commands[first : first + PIPELINE_COMMANDS_MAX])
        except self._failures as err:
            with self._lock:
                self._down_until = self._clock.monotonic() + self._options.retry_seconds
            raise DirectoryUnavailableError(f"the directory {self._address} failed: {err}") from err
        else:
            with self._lock:
                self._down_until = self._clock.monotonic()
            return answers
        finally:
            self._places.release()

    def close(self) -> None:
        """Close all connections. Idempotent; a later call makes new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _send(self, commands: Sequence[Command]) -> list[Answer]:
        client = self._connected()
        answers = _sent(client, commands)
        unknown = [
            index for index, answer in enumerate(answers) if isinstance(answer, self._redis.exceptions.NoScriptError)
        ]
        if unknown:
            for script in ALL:
                client.script_load(script)
            for index, answer in zip(unknown, _sent(client, [commands[index] for index in unknown]), strict=True):
                answers[index] = answer
        for index, answer in enumerate(answers):
            if isinstance(answer, Exception):
                if not _reads_what_is_not_ours(commands[index], answer):
                    raise answer
                answers[index] = None
        return answers

    def _connected(self) -> _Client:
        client = self._client
        if client is not None:
            return client
        made = self._make_client()
        with self._lock:
            if self._client is None:
                self._client = made
                return made
            client = self._client
        made.close()
        return client

    def _make_client(self) -> _Client:
        redis, address = self._redis, self._address
        options = self._connection_options()
        kinds = redis.connection
        plain = self._limited(kinds.SSLConnection if address.is_tls else kinds.Connection)
        if address.mode is ValkeyMode.CLUSTER:
            # Only with a URL it makes its pools of the class that it is given.
            (host, port), *others = address.hosts
            nodes = [redis.cluster.ClusterNode(other_host, other_port) for other_host, other_port in others]
            url = f"redis://{f'[{host}]' if ':' in host else host}:{port}"
            return cast("_Client", redis.RedisCluster(url=url, startup_nodes=nodes, connection_class=plain, **options))
        options["db"] = address.database
        if address.mode is ValkeyMode.SENTINEL:
            return self._make_sentinel_client(plain, options)
        if address.mode is ValkeyMode.UNIX:
            options["path"] = address.path
            del options["socket_connect_timeout"]
            return self._pooled(self._limited(kinds.UnixDomainSocketConnection), options)
        host, port = address.hosts[0]
        return self._pooled(plain, {"host": host, "port": port, **options})

    def _make_sentinel_client(self, plain: type, options: dict[str, Any]) -> _Client:
        sentinels = self._redis.sentinel
        known = {key: value for key, value in options.items() if key.startswith(("socket_", "ssl", "retry"))}
        known["password"] = self._options.sentinel_password or None
        managed = (
            sentinels.SentinelManagedSSLConnection if self._address.is_tls else sentinels.SentinelManagedConnection
        )
        sentinel = sentinels.Sentinel([], connection_class=self._limited(managed), **options)
        for host, port in self._address.hosts:
            sentinel.sentinels.append(self._pooled(plain, {"host": host, "port": port, **known}))
        return cast("_Client", sentinel.master_for(self._address.service))

    def _pooled(self, kind: type, options: dict[str, Any]) -> _Client:
        return cast(
            "_Client", self._redis.Redis.from_pool(self._redis.ConnectionPool(connection_class=kind, **options))
        )

    def _limited(self, kind: type) -> type:
        """A class of connections whose calls are under the limit, the handshake included."""
        limit = self._limit

        def connect(connection: object) -> LimitedSocket:
            return LimitedSocket(kind._connect(connection), limit)  # type: ignore[attr-defined]  # noqa: SLF001

        return type(f"Limited{kind.__name__}", (kind,), {"_connect": connect})

    def _connection_options(self) -> dict[str, Any]:
        redis, address, options = self._redis, self._address, self._options
        given: dict[str, Any] = {
            "protocol": 2,
            "socket_timeout": options.timeout_seconds,
            "socket_connect_timeout": options.timeout_seconds,
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 1 if address.mode is ValkeyMode.CLUSTER else 0),
            "username": address.username or None,
            "password": address.password or None,
        }
        if address.is_tls:
            files = {"ssl_ca_certs": options.tls_ca, "ssl_certfile": options.tls_cert, "ssl_keyfile": options.tls_key}
            given |= {name: file for name, file in files.items() if file}
        return given


def script_command(script: str, keys: Iterable[str | bytes], *values: str | bytes | int) -> Command:
    """The command that runs a script of valkey_scripts."""
    names = tuple(keys)
    return ("EVALSHA", hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest(), len(names), *names, *values)


def _reads_what_is_not_ours(command: Command, error: Exception) -> bool:
    """Whether a key that was to be read has a value of another type: as if it had none."""
    return command[0] in _READS and str(error).startswith("WRONGTYPE")


def _sent(client: _Client, commands: Sequence[Command]) -> list[Answer]:
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    return pipeline.execute(raise_on_error=False)
