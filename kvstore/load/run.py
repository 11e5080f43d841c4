"""Runs a load in processes of its own, watches the server meanwhile, and sums up."""

from __future__ import annotations

import multiprocessing
import re
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import kvstore
from kvstore.errors import ConfigError, UnavailableError
from kvstore.load.worker import Tally, run_clients

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from kvstore.load.plan import LoadPlan

PERCENTS = (50.0, 90.0, 99.0, 99.9)
_STEP_SECONDS = 1.0
_END_SECONDS = 30.0
_PAGE_SECONDS = 2.0
_RESIDENT = re.compile(r"^process_resident_memory_bytes (\S+)$", re.MULTILINE)
_FILES = re.compile(r"^process_open_fds (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerSample:
    """What a server held at some time; None for what its source does not say."""

    resident_bytes: int
    open_files: int | None
    threads: int | None


@dataclass(slots=True)
class LoadReport:
    """How a load went."""

    seconds: float
    tally: Tally
    lost_processes: int
    samples: list[ServerSample] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        tally = self.tally
        rows = {
            operation.value: {
                "count": latencies.total,
                "per_second": latencies.total / self.seconds,
                **{f"p{percent:g}_seconds": latencies.percentile_seconds(percent) for percent in PERCENTS},
            }
            for operation, latencies in tally.latencies.items()
        }
        return {
            "seconds": self.seconds,
            "operations": rows,
            "errors": dict(tally.errors),
            "lost_processes": self.lost_processes,
            "hit_ratio": tally.hit_blocks / tally.lookup_blocks if tally.lookup_blocks else None,
            "loaded_bytes_per_second": tally.loaded_bytes / self.seconds,
            "stored_bytes_per_second": tally.stored_bytes / self.seconds,
            "server": [
                {"resident_bytes": one.resident_bytes, "open_files": one.open_files, "threads": one.threads}
                for one in self.samples
            ],
        }


def run_load(
    plan: LoadPlan, sample: Callable[[], ServerSample] | None, progress: Callable[[float], None]
) -> LoadReport:
    """Put the load on the server, and take its blocks away again. `progress` is told the share of the time.

    Before the load begins, raises UnavailableError if the server does not answer, PermissionDeniedError if these
    blocks may not be taken away.
    """
    with kvstore.connect(plan.address, lookup_seconds=5.0, **plan.files) as client:
        if not client.status().serving:
            raise UnavailableError(f"{plan.address} takes no calls now")
        client.clear(plan.namespace)
        report = LoadReport(plan.seconds, Tally(), 0)
        _run_processes(plan, report, sample, progress)
        client.clear(plan.namespace)
    return report


def _run_processes(
    plan: LoadPlan,
    report: LoadReport,
    sample: Callable[[], ServerSample] | None,
    progress: Callable[[float], None],
) -> None:
    context = multiprocessing.get_context("spawn")
    running = []
    for index in range(plan.processes):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=run_clients, args=(plan, _share(plan, index), sending), daemon=True)
        process.start()
        sending.close()
        running.append((process, receiving))
    begin = time.monotonic()
    try:
        while (passed := time.monotonic() - begin) < plan.seconds:
            if sample is not None:
                report.samples.append(sample())
            progress(passed / plan.seconds)
            time.sleep(min(_STEP_SECONDS, plan.seconds - passed))
        for _, receiving in running:
            tally = _told(receiving)
            if tally is None:
                report.lost_processes += 1
            else:
                report.tally.merge(tally)
    finally:
        for process, receiving in running:
            process.join(1.0)
            process.kill()
            process.join()
            receiving.close()
    if sample is not None:
        report.samples.append(sample())


def _told(receiving: Connection) -> Tally | None:
    """What a process tells in the end; None if it ends without a word, or goes on for much too long."""
    try:
        return cast("Tally", receiving.recv()) if receiving.poll(_END_SECONDS) else None
    except EOFError:
        return None


def _share(plan: LoadPlan, index: int) -> range:
    """The clients of one process."""
    return range(plan.clients * index // plan.processes, plan.clients * (index + 1) // plan.processes)


def sample_process(pid: int) -> ServerSample:
    """What a process of this machine holds. Raises ConfigError if it cannot be seen."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError as err:
        raise ConfigError(f"process {pid} cannot be seen ({err.strerror}); give the pid of `kvstore serve`") from err
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return ServerSample(int(fields["VmRSS"].split()[0]) * 1024, files, int(fields["Threads"]))


def sample_page(address: str) -> ServerSample:
    """What a server says of itself on its metrics page at HOST:PORT. Raises UnavailableError if it does not."""
    url = f"http://{address}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=_PAGE_SECONDS) as response:
            text = response.read().decode(errors="replace")
    except (OSError, ValueError) as err:
        raise UnavailableError(f"{url} does not answer: {err}") from err
    resident, files = _RESIDENT.search(text), _FILES.search(text)
    if resident is None:
        raise UnavailableError(f"{url} has no process_resident_memory_bytes")
    return ServerSample(int(float(resident[1])), None if files is None else int(float(files[1])), None)
