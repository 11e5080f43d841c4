"""Ranks of one engine in processes of their own fill one stage, over each lane; one of them may die."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore.store import Store, StoreSettings
from kvstore.testing import conformance_sparse
from kvstore.testing.blocks import expected_part_rows, verified_blocks, write_sparse
from kvstore.testing.manual_clock import ManualClock
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.testing.serving import ServedStore, grpc_address

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).with_name("rank_process.py")
BLOCKS = 9
RANKED = dataclasses.replace(conformance_sparse.RANKED, secret=None)


def prompt_at(number: int) -> list[int]:
    """Prompts that share two blocks."""
    return [*range(8), *range(1000 * number, 1000 * number + 30)]


def stage_command(number: int) -> str:
    return f"stage {' '.join(map(str, prompt_at(number)))}"


class RankProcess:
    """A rank that does what it is told."""

    def __init__(self, address: str, rank: int) -> None:
        command = [sys.executable, str(PROGRAM), address, str(rank)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(host_bytes=16 << 20) as store:
        yield store


@pytest.fixture
def ranks(store: Store, tmp_path: Path, lane: str) -> Iterator[list[RankProcess]]:
    with ServedStore(store, [f"unix://{tmp_path}/s"]) as served:
        address = served.addresses[0]
        started = [RankProcess(address if lane == "wire" else grpc_address(address), rank) for rank in (0, 1)]
        try:
            yield started
        finally:
            for rank in started:
                rank.process.kill()
                rank.process.communicate()


@pytest.mark.kill
@pytest.mark.parametrize("lane", ["wire", "grpc"])
def test_ranks_in_processes_of_their_own_fill_one_stage(store: Store, ranks: list[RankProcess]) -> None:
    first, second = ranks
    for number in (1, 2):
        wanted = "9" if number == 1 else "7"
        assert wanted == first.ask(stage_command(number))
        assert int(wanted) <= int(first.ask("write"))
        assert "0" == first.ask("commit")
        assert wanted == second.ask(stage_command(number))
        assert int(wanted) <= int(second.ask("write"))
        assert wanted == second.ask("commit")
        assert BLOCKS == verified_blocks(store, RANKED, prompt_at(number))


@pytest.mark.kill
@pytest.mark.parametrize("lane", ["wire", "grpc"])
def test_a_killed_rank_takes_its_stage_with_it_and_nothing_else(
    store: Store, ranks: list[RankProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    forget = store._shared.forget
    monkeypatch.setattr(store._shared, "forget", lambda stage: (forget(stage), ended.set()))
    first, second = ranks
    for rank in ranks:
        rank.ask(stage_command(1))
        rank.ask("write")
    ended.clear()
    first.process.send_signal(signal.SIGKILL)
    assert ended.wait(ANSWER_SECONDS)
    assert "ClosedError" == second.ask("commit")
    assert (0, 0) == (store.match(RANKED, prompt_at(1)).blocks, store.stats().tiers["host"].used_bytes)


def test_a_rank_that_stays_away_aborts_the_stage_when_its_time_is_over() -> None:
    clock = ManualClock()
    with kvstore.open(host_bytes=16 << 20, settings=StoreSettings(stage_seconds_max=60.0), clock=clock) as store:
        prompt = prompt_at(1)
        with store.stage(RANKED, prompt, rank=0) as stage:
            write_sparse(stage, 0, expected_part_rows(RANKED, prompt, 0))
        clock.advance(59)
        assert 1 == store.stats().stages
        clock.advance(2)
        assert (0, 0) == (store.stats().stages, store.stats().tiers["host"].used_bytes)
        late = store.stage(RANKED, prompt, rank=1)
        assert BLOCKS == late.blocks  # of a stage of its own
        late.abort()
        assert {} == store._shared._open


def test_ranks_in_threads_never_mix_prompts_up() -> None:
    """Two ranks store the same prompts in orders of their own; each block names itself."""
    with kvstore.open(host_bytes=16 << 20) as store:
        problems: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                for number in range(30) if rank else reversed(range(30)):
                    with store.stage(RANKED, prompt_at(number), rank=rank) as stage:
                        for part, found in enumerate(RANKED.layout.parts):
                            if found.writer == rank:
                                write_sparse(stage, part, expected_part_rows(RANKED, prompt_at(number), part))
            except BaseException as problem:  # noqa: BLE001  # handed to the main thread
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [] == problems
        assert 0 == store.stats().stages
        assert {} == store._shared._open
        assert [BLOCKS] * 30 == [verified_blocks(store, RANKED, prompt_at(number)) for number in range(30)]
