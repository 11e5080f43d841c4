"""Copies under way: what they wait for, what they hold and until when, and what happens when they are withdrawn."""

from __future__ import annotations

import gc
import logging
import random
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvstore.errors import ClosedError, ConfigError, InvalidArgumentError, NoSpaceError, UnavailableError
from kvstore.testing.patience import ANSWER_SECONDS
from kvstore.tiers.device import BlockCopier, CopyOutcome, DeviceSettings, PagedKv, open_copier
from kvstore.tiers.device_copies import CopyNotBegunError
from kvstore.tiers.device_cpu import CpuLauncher
from kvstore.tiers.device_job import Direction
from kvstore.tiers.slots import SlotMap

BLOCKS, LAYERS = 8, 3
IDS = [5, 1, 2]


class Hold:
    """Counts its releases, and can be waited for."""

    def __init__(self):
        self.releases = 0
        self.released = threading.Event()

    def release(self):
        self.releases += 1
        self.released.set()


class Gate:
    """Work for a stream that does not end before it is opened."""

    def __init__(self, stream):
        self._open = threading.Event()
        self._stream = stream
        stream.give(lambda: self._open.wait(ANSWER_SECONDS))

    def open(self):
        self._open.set()


@pytest.fixture
def caches(random_tensor):
    return [random_tensor(2, BLOCKS, 16, 2, 4) for _ in range(LAYERS)]


@pytest.fixture
def pages(caches):
    return PagedKv.planes_first(caches)


@pytest.fixture
def tensors(caches):
    return [(layer[0], layer[1]) for layer in caches]


def poisoned(pages):
    return np.full((len(IDS), pages.block_bytes), 0xAB, dtype=np.uint8)


def test_a_store_waits_for_what_the_engine_computes(copier, pages, tensors, caches, streams, packed):
    compute = streams()
    gate = Gate(compute)
    compute.give(lambda: [layer.fill_(1.5) for layer in caches])
    rows = poisoned(pages)
    handle = copier.store(pages, IDS, rows, stream=compute)
    assert CopyOutcome.PENDING is handle.outcome
    assert (rows == 0xAB).all()
    gate.open()
    assert CopyOutcome.COPIED is handle.wait(ANSWER_SECONDS)
    assert np.array_equal(packed(tensors, IDS), rows)
    assert 1.5 == rows.view(np.float32).max()


def test_a_load_waits_for_what_the_engine_computes(copier, pages, tensors, caches, streams, packed):
    """What still reads, or writes, the blocks that a load will fill."""
    compute = streams()
    gate = Gate(compute)
    compute.give(lambda: [layer.fill_(1.5) for layer in caches])
    rows = poisoned(pages)
    handle = copier.load(pages, IDS, rows, stream=compute)
    gate.open()
    assert CopyOutcome.COPIED is handle.wait(ANSWER_SECONDS)
    assert np.array_equal(rows, packed(tensors, IDS))


def test_a_copy_does_not_wait_for_what_is_computed_after_its_submission(copier, pages, streams):
    compute = streams()
    handle = copier.store(pages, IDS, poisoned(pages), stream=compute)
    gate = Gate(compute)
    assert CopyOutcome.COPIED is handle.wait(ANSWER_SECONDS)
    gate.open()


def test_what_is_computed_after_record_sees_the_loaded_blocks(copier, pages, tensors, streams, packed):
    before, compute = streams(), streams()
    gate = Gate(before)
    rows = poisoned(pages)
    handle = copier.load(pages, IDS, rows, stream=before)
    handle.record(compute)
    seen = []
    compute.give(lambda: seen.append(packed(tensors, IDS)))
    gate.open()
    compute.record_event().synchronize()
    assert np.array_equal(rows, seen[0])


def test_record_on_the_calling_thread_blocks_until_the_copy_has_ended(copier, pages):
    handle = copier.store(pages, IDS, poisoned(pages))
    handle.record(copier.current_stream())
    assert CopyOutcome.COPIED is handle.outcome


def test_the_end_of_a_copy_is_an_event(copier, pages, streams):
    compute, later = streams(), streams()
    gate = Gate(compute)
    handle = copier.store(pages, IDS, poisoned(pages), stream=compute)
    events = []
    recorder = type("Recorder", (), {"wait_event": lambda self, event: events.append(event)})()
    handle.record(recorder)
    assert [False] == [event.query() for event in events]
    gate.open()
    events[0].synchronize()
    assert [True] == [event.query() for event in events]
    handle.record(later)
    later.record_event().synchronize()


def test_layers_are_loaded_in_order_each_with_a_handle(copier, pages, tensors, streams, packed):
    rows = poisoned(pages)
    hold = Hold()
    handles = copier.load_by_layer(pages, IDS, rows, holds=[hold])
    assert LAYERS == len(handles)
    assert [pages.layer_bytes(range(n, n + 1)) * len(IDS) for n in range(LAYERS)] == [h.bytes for h in handles]
    assert CopyOutcome.COPIED is handles[0].wait(ANSWER_SECONDS)
    assert {CopyOutcome.COPIED} == {handle.wait(ANSWER_SECONDS) for handle in handles}
    assert np.array_equal(rows, packed(tensors, IDS))
    assert 1 == hold.releases


def test_holds_of_a_load_by_layer_outlive_all_layers_but_the_last(copier, pages, streams):
    compute = streams()
    gate = Gate(compute)
    hold = Hold()
    handles = copier.load_by_layer(pages, IDS, poisoned(pages), stream=compute, holds=[hold])
    assert [True, True] == [handle.cancel() for handle in handles[1:]]
    assert 0 == hold.releases
    gate.open()
    assert CopyOutcome.COPIED is handles[0].wait(ANSWER_SECONDS)
    assert 1 == hold.releases


def test_a_layer_can_be_stored_alone(copier, pages, tensors, packed):
    rows = poisoned(pages)
    copier.store(pages, IDS, rows, layers=range(1, 2)).wait(ANSWER_SECONDS)
    width = pages.block_bytes // LAYERS
    assert np.array_equal(packed(tensors[1:2], IDS), rows[:, width : 2 * width])
    assert (rows[:, :width] == 0xAB).all()
    assert (rows[:, 2 * width :] == 0xAB).all()


@pytest.mark.parametrize("layers", [range(0), range(2, 4), range(0, 3, 2), range(2, 1), range(-1, 1)])
def test_layers_that_are_not_there_are_refused(copier, pages, layers):
    with pytest.raises(InvalidArgumentError, match=r"expected neighbouring layers inside range\(0, 3\)"):
        copier.store(pages, IDS, poisoned(pages), layers=layers)


def test_a_cancelled_copy_touches_nothing_and_lets_go_at_once(copier, pages, streams):
    compute = streams()
    gate = Gate(compute)
    rows, hold = poisoned(pages), Hold()
    handle = copier.store(pages, IDS, rows, stream=compute, holds=[hold])
    assert handle.cancel()
    assert (CopyOutcome.CANCELLED, 1) == (handle.wait(ANSWER_SECONDS), hold.releases)
    assert not handle.cancel()
    gate.open()
    assert copier.store(pages, IDS, poisoned(pages)).wait(ANSWER_SECONDS) is CopyOutcome.COPIED
    assert (rows == 0xAB).all()
    assert 1 == hold.releases


def test_a_copy_that_has_begun_runs_to_its_end_and_holds_until_then(pages, tensors, packed):
    begun, go_on = threading.Event(), threading.Event()

    class SlowLauncher(CpuLauncher):
        def launch(self, job, stream):
            work = super().launch(job, stream)
            return SlowWork(work)

    class SlowWork:
        is_launched, end = False, None

        def __init__(self, work):
            self._work = work

        def wait_ready(self):
            self._work.wait_ready()

        def run(self):
            begun.set()
            go_on.wait(ANSWER_SECONDS)
            self._work.run()

    rows, hold = poisoned(pages), Hold()
    with BlockCopier(SlowLauncher(1), DeviceSettings()) as copier:
        handle = copier.store(pages, IDS, rows, holds=[hold])
        assert begun.wait(ANSWER_SECONDS)
        assert (False, 0) == (handle.cancel(), hold.releases)
        assert not copier.close(0.01)
        go_on.set()
        assert (CopyOutcome.COPIED, 1) == (handle.wait(ANSWER_SECONDS), hold.releases)
    assert np.array_equal(packed(tensors, IDS), rows)


def test_one_copy_more_than_the_limit_is_refused_at_once_and_its_holds_stay(pages, streams):
    compute = streams()
    gate = Gate(compute)
    hold = Hold()
    with open_copier(settings=DeviceSettings(copies_max=2)) as copier:
        handles = [copier.store(pages, IDS, poisoned(pages), stream=compute) for _ in range(2)]
        with pytest.raises(NoSpaceError, match=r"2 copies are under way and 1 more would exceed copies_max \(2\)"):
            copier.store(pages, IDS, poisoned(pages), holds=[hold])
        with pytest.raises(NoSpaceError):
            copier.load_by_layer(pages, IDS, poisoned(pages), holds=[hold])
        assert 0 == hold.releases
        gate.open()
        assert {CopyOutcome.COPIED} == {handle.wait(ANSWER_SECONDS) for handle in handles}
        assert (1, 3) == tuple(copier.stats()[direction].refused for direction in Direction)


def test_loads_do_not_queue_behind_stores(copier, pages, streams):
    compute = streams()
    gate = Gate(compute)
    store = copier.store(pages, IDS, poisoned(pages), stream=compute)
    assert CopyOutcome.COPIED is copier.load(pages, IDS, poisoned(pages)).wait(ANSWER_SECONDS)
    assert CopyOutcome.PENDING is store.outcome
    gate.open()


def test_a_bad_argument_changes_nothing_and_leaves_the_holds(copier, pages):
    hold = Hold()
    with pytest.raises(InvalidArgumentError):
        copier.store(pages, [0, 1, BLOCKS], poisoned(pages), holds=[hold])
    assert 0 == hold.releases
    assert 0 == copier.stats()[Direction.STORE].submitted


def test_a_closed_copier_takes_nothing(pages):
    copier = open_copier()
    assert copier.close()
    assert copier.close()
    with pytest.raises(ClosedError):
        copier.store(pages, IDS, poisoned(pages))


FORKED = """
import os, numpy as np
from kvstore.errors import ClosedError
from kvstore.tiers.device import PagedKv, open_copier
copier, pages = open_copier(), PagedKv.latent([np.ones((4, 5))])
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    copier.store(pages, [1], np.zeros((1, 40), dtype=np.uint8))
except ClosedError as error:
    os._exit(0 if "open one of its own" in str(error) else 1)
os._exit(2)
"""


def test_a_forked_process_is_told_to_open_a_copier_of_its_own():
    done = subprocess.run(
        [sys.executable, "-P", "-c", FORKED], capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS
    )
    assert 0 == done.returncode, done.stderr


class FailingLauncher(CpuLauncher):
    def __init__(self, error):
        super().__init__(1)
        self._error = error

    def launch(self, job, stream):
        error = self._error

        class Failing:
            is_launched, end = True, None

            def wait_ready(self):
                return

            def run(self):
                raise error

        return Failing()


def test_a_lost_copy_keeps_its_holds_and_ends_the_lane(pages, streams, caplog):
    hold = Hold()
    copier = BlockCopier(FailingLauncher(RuntimeError("the device is gone")), DeviceSettings())
    with caplog.at_level(logging.CRITICAL, "kvstore"):
        handle = copier.store(pages, IDS, poisoned(pages), holds=[hold])
        assert (CopyOutcome.LOST, 0) == (handle.wait(ANSWER_SECONDS), hold.releases)
    assert copier.close()
    assert 0 == hold.releases
    assert 1 == copier.stats()[Direction.STORE].lost
    compute = streams()
    seen = []

    def wait_and_see():
        try:
            handle.record(copier.current_stream())
        except UnavailableError as error:
            seen.append(str(error))

    compute.give(wait_and_see)
    compute.record_event().synchronize()
    assert ["the copy is lost and its bytes are undefined; compute them anew"] == seen


def test_after_a_lost_copy_others_are_refused(pages, caplog):
    copier = BlockCopier(FailingLauncher(RuntimeError("the device is gone")), DeviceSettings())
    with caplog.at_level(logging.CRITICAL, "kvstore"):
        assert CopyOutcome.LOST is copier.store(pages, IDS, poisoned(pages)).wait(ANSWER_SECONDS)
        with pytest.raises(UnavailableError, match="kvstore-device-store: an earlier copy was lost"):
            copier.store(pages, IDS, poisoned(pages))
    copier.close()


def test_a_copy_that_the_device_refused_lets_go_and_the_lane_goes_on(pages, caplog):
    hold = Hold()
    with (
        caplog.at_level(logging.CRITICAL, "kvstore"),
        BlockCopier(FailingLauncher(CopyNotBegunError("no memory")), DeviceSettings()) as copier,
    ):
        assert CopyOutcome.FAILED is copier.store(pages, IDS, poisoned(pages), holds=[hold]).wait(ANSWER_SECONDS)
        assert 1 == hold.releases
        assert CopyOutcome.FAILED is copier.store(pages, IDS, poisoned(pages)).wait(ANSWER_SECONDS)
    assert 2 == copier.stats()[Direction.STORE].failed


def test_a_release_that_raises_is_counted_and_the_others_are_released(copier, pages, caplog):
    class Broken:
        def release(self):
            raise OSError("no")

    hold = Hold()
    with caplog.at_level(logging.CRITICAL, "kvstore"):
        handle = copier.store(pages, IDS, poisoned(pages), holds=[Broken(), hold])
        assert (CopyOutcome.COPIED, 1) == (handle.wait(ANSWER_SECONDS), hold.releases)
    assert 1 == copier.stats()[Direction.STORE].failed_releases


class SlotHold:
    def __init__(self, pool, slots):
        self._pool, self._slots = pool, slots

    def release(self):
        self._pool.free(self._slots)


class Slots:
    """A pool whose freed rows are poisoned, and checked to be still when they are taken again."""

    def __init__(self, pages, count):
        self.rows = np.full((count, pages.block_bytes), 0xAB, dtype=np.uint8)
        self._lock = threading.Lock()
        self._map = SlotMap()
        self._map.add(count)
        self.stomped = 0

    def take(self, count):
        with self._lock:
            slots = self._map.take(count)
            self.stomped += int((self.rows[slots] != 0xAB).any())
            return slots

    def free(self, slots):
        with self._lock:
            self.rows[slots] = 0xAB
            self._map.release(slots)

    @property
    def free_slots(self):
        with self._lock:
            return self._map.free_slots


class CheckedSlots:
    """A hold that looks at its rows when it is released: they are whole, or nobody has touched them."""

    def __init__(self, slots, taken, expected):
        self._slots, self._taken, self._expected = slots, taken, expected

    def release(self):
        rows = self._slots.rows[self._taken]
        if not np.array_equal(self._expected, rows) and (rows != 0xAB).any():
            self._slots.stomped += 1000
        self._slots.free(self._taken)


@pytest.mark.parametrize("seed", [1, 2])
def test_cancelling_1000_copies_at_random_moments_loses_and_reuses_nothing(seed, random_tensor, packed, streams):
    layers = [random_tensor(BLOCKS, 2, 4096) for _ in range(2)]
    pages = PagedKv.blocks_first(layers)
    expected = packed([(layer[:, 0], layer[:, 1]) for layer in layers], range(BLOCKS))
    slots = Slots(pages, 48)
    compute = streams()
    scratch = np.zeros(1 << 16)

    def copy_some(copier, worker):
        """250 copies, most of them cancelled, before, while or after they are made."""
        choose = random.Random(f"{seed} {worker}")
        handles = []
        while len(handles) < 250:
            taken = slots.take(choose.randint(1, 4))
            block_ids = choose.sample(range(BLOCKS), len(taken))
            stream = choose.choice([None, compute])
            if stream:
                stream.give(lambda: scratch.fill(1))
            hold = CheckedSlots(slots, taken, expected[block_ids])
            try:
                handles.append(copier.store(pages, block_ids, slots.rows, row_ids=taken, stream=stream, holds=[hold]))
            except NoSpaceError:
                slots.free(taken)
                for handle in handles[-1:]:
                    handle.wait(ANSWER_SECONDS)
                continue
            for _ in range(choose.randint(0, 3000)):
                pass
            if choose.random() < 0.8:
                choose.choice(handles[-3:]).cancel()
        return handles

    with open_copier(settings=DeviceSettings(copies_max=16, cpu_threads=2)) as copier:
        with ThreadPoolExecutor(4) as workers:
            per_worker = list(workers.map(copy_some, [copier] * 4, range(4)))
        handles = [handle for some in per_worker for handle in some]
        assert {CopyOutcome.COPIED, CopyOutcome.CANCELLED} == {handle.wait(ANSWER_SECONDS) for handle in handles}
    stats = copier.stats()[Direction.STORE]
    assert (1000, 1000) == (stats.submitted, stats.copied + stats.cancelled)
    assert (0, 48) == (slots.stomped, slots.free_slots)
    assert (slots.rows == 0xAB).all()


def test_dropped_handles_do_not_end_their_copies(copier, pages, streams):
    compute = streams()
    gate = Gate(compute)
    hold = Hold()
    copier.store(pages, IDS, poisoned(pages), stream=compute, holds=[hold])
    gate.open()
    assert hold.released.wait(ANSWER_SECONDS)


def test_the_tensors_of_a_copy_live_as_long_as_it(copier, streams, random_tensor):
    compute = streams()
    gate = Gate(compute)
    rows = np.zeros((1, 4096 * 4), dtype=np.uint8)
    layer = random_tensor(BLOCKS, 4096)
    expected = layer[3].clone()
    handle = copier.store(PagedKv.latent([layer]), [3], rows, stream=compute)
    del layer
    gate.open()
    assert CopyOutcome.COPIED is handle.wait(ANSWER_SECONDS)
    assert torch.equal(expected.view(torch.uint8), torch.from_numpy(rows[0]))


def test_a_kept_handle_keeps_no_tensor_once_the_copy_has_ended(copier, random_tensor):
    layer = random_tensor(BLOCKS, 4096)
    gone = weakref.ref(layer)
    handle = copier.store(PagedKv.latent([layer]), [3], np.zeros((1, 4096 * 4), dtype=np.uint8))
    del layer
    assert CopyOutcome.COPIED is handle.wait(ANSWER_SECONDS)
    assert copier.close()
    gc.collect()
    assert gone() is None
    handle.record(copier.current_stream())


def test_a_cancelled_copy_holds_up_nothing_behind_it(copier, pages, streams):
    first, second = streams(), streams()
    gates = Gate(first), Gate(second)
    handles = [copier.store(pages, IDS, poisoned(pages), stream=stream) for stream in (first, second, None)]
    assert handles[1].cancel()
    gates[0].open()
    assert CopyOutcome.COPIED is handles[2].wait(ANSWER_SECONDS)
    gates[1].open()


def test_a_lease_is_a_hold(copier, pages):
    import kvstore
    from kvstore.types import KvLayout, Namespace

    layout = KvLayout(layers=LAYERS, kv_heads=2, head_dim=4, dtype="float32")
    pages.require_layout(layout)
    namespace = Namespace(model="m", revision="r", layout=layout)
    tokens = np.arange(16 * len(IDS))
    rows = copier.new_rows(len(IDS), pages.block_bytes)
    with kvstore.open(host_bytes=1 << 24) as store:
        copier.store(pages, IDS, rows).wait(ANSWER_SECONDS)
        with store.stage(namespace, tokens) as stage:
            stage.write_from(rows)
        lease = store.lease(store.match(namespace, tokens))
        loaded = copier.new_rows(lease.blocks, pages.block_bytes)
        lease.load_into(loaded)
        assert CopyOutcome.COPIED is copier.load(pages, [0, 3, 4], loaded, holds=[lease]).wait(ANSWER_SECONDS)
        assert 0 == store.stats().leases
    again = copier.new_rows(len(IDS), pages.block_bytes)
    copier.store(pages, [0, 3, 4], again).wait(ANSWER_SECONDS)
    assert np.array_equal(rows, again)


@pytest.mark.parametrize("name", ["multiprocessors_max", "copies_max", "batch_run_bytes_min", "cpu_threads"])
@pytest.mark.parametrize("value", [0, -1, 2**31, True, 1.5])
def test_settings_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"device setting {name} is {value!r}"):
        DeviceSettings(**{name: value})


@pytest.mark.parametrize("device", ["", "meta", "CPU", "mps:0"])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(InvalidArgumentError, match="expected 'cpu' or 'cuda:<number>'"):
        open_copier(device)
