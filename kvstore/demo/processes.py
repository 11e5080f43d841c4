"""The processes of the demo: started, spoken to in JSON lines, and ended by their own ids."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING, Any

from kvstore.demo.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType
    from typing import Self

ANSWER_SECONDS_MAX = 600.0
_STOP_SECONDS = 10.0
_SHOWN_BYTES = 600


class DemoProcess:
    """A Python module run as a process that answers in JSON lines; ended on leaving the `with` block.

    It has a session of its own, so that Ctrl-C reaches it only through us. What it writes to stderr is kept in
    `log_file`, and its end is shown if the process fails.
    """

    def __init__(self, name: str, module: str, arguments: list[str], log_file: Path) -> None:
        self._name = name
        self._log_file = log_file
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
            )

    def send(self, request: Mapping[str, Any]) -> None:
        """Write one request."""
        try:
            pipe = self._pipe(self._process.stdin)
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def receive(self) -> dict[str, Any]:
        """Wait for one answer. Raises DemoError when the process ends, or is killed for taking too long."""
        timer = threading.Timer(ANSWER_SECONDS_MAX, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            line = self._pipe(self._process.stdout).readline()
        finally:
            timer.cancel()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            self._pipe(pipe).close()

    def _failure(self) -> DemoError:
        code = self._process.wait()
        end = self._log_file.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").strip()
        return DemoError(f"the {self._name} ended with code {code}: {end or 'it said nothing'}")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None, "both pipes were asked for"
        return pipe


def start_sidecar(folder: Path, address: str, host_bytes: int, disk_bytes: int) -> DemoProcess:
    """A sidecar with its data in `folder`; its first answer says that it is ready."""
    arguments = ["serve", "--data-dir", str(folder / "data"), "--listen", address]
    arguments += ["--host-bytes", str(host_bytes), "--disk-bytes", str(disk_bytes), "--metrics", ""]
    return DemoProcess("sidecar", "kvstore.cli", arguments, folder / "sidecar.log")


def start_engine(folder: Path, name: str, arguments: list[str]) -> DemoProcess:
    """An engine; its first answer says that its model is loaded."""
    return DemoProcess(f"engine {name}", "kvstore.demo.engine", arguments, folder / f"engine-{name}.log")
