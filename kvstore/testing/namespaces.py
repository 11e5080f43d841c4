"""Hosts of a network of their own on this machine: Linux network namespaces behind one bridge, and what breaks there.

    host a [eth0] ---- [va] +--------+ [vb] ---- [eth0] host b
                            | bridge |                          10.77.0.N, N by the order of the names
    host c [eth0] ---- [vc] +--------+
           [wire] - - - - - - - - - - - - - - -  [wire]         a TUN device in each, between them a Wire

Nothing outside of these namespaces is touched or reached. Sockets on files work across them.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

Made = TypeVar("Made")
_NET = "10.77.0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKET_BYTES_MAX = 1 << 16
_WAITING_MAX = 4096  # packets on a wire; more are lost, as in any queue


class Namespaces:
    """Hosts by name. `close` takes everything away again; OSError where the system does not allow them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.addresses = {name: f"{_NET}.{number}" for number, name in enumerate(names, 1)}
        self._prefix = f"kvstore-{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self._wire: Wire | None = None
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def command(self, name: str) -> list[str]:
        """What runs a command on a host, put before it."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def inside(self, name: str, make: Callable[[], Made]) -> Made:
        """What `make` makes on a host: its sockets, and those of threads that it starts, are of that host."""

        def enter_and_make() -> Made:
            _enter_namespace(self._namespace(name))
            return make()

        with ThreadPoolExecutor(1) as thread:  # of its own, as it never comes back
            return thread.submit(enter_and_make).result()

    def cut(self, name: str) -> None:
        """Pull a host's cable: what it sends is lost, and so is what is sent to it."""
        _ip("-n", self._switch, "link", "set", f"v-{name}", "down")

    def mend(self, name: str) -> None:
        """Plug it in again."""
        _ip("-n", self._switch, "link", "set", f"v-{name}", "up")

    def block(self, name: str, other: str) -> None:
        """Lose what one host sends to another; what comes from there still arrives."""
        _ip("-n", self._namespace(name), "route", "add", "blackhole", f"{self.addresses[other]}/32")

    def unblock(self, name: str, other: str) -> None:
        """Let it through again."""
        _ip("-n", self._namespace(name), "route", "del", "blackhole", f"{self.addresses[other]}/32")

    def disturb(self, *, loss: float, delay_seconds: float, seed: int) -> None:
        """Send every packet over a wire that loses that share of them and has the others wait, until `calm`."""
        assert self._wire is None, "one wire at a time"
        devices = {self.addresses[name]: self.inside(name, _open_tun) for name in self.addresses}
        self._wire = Wire(devices, loss=loss, delay_seconds=delay_seconds, seed=seed)
        for name, address in self.addresses.items():
            _ip("-n", self._namespace(name), "link", "set", "wire", "up")
            for other in self.addresses.values():
                if other != address:
                    route = ("route", "add", f"{other}/32", "dev", "wire", "src", address)
                    _ip("-n", self._namespace(name), *route)

    def calm(self) -> None:
        """Back to the bridge: the devices of the wire go, and their routes with them."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def close(self) -> None:
        """Take all hosts away; what runs there runs on without a network."""
        self.calm()
        for namespace in (*map(self._namespace, self.addresses), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], check=False, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for name, address in self.addresses.items():
            host = self._namespace(name)
            _ip("netns", "add", host)
            _ip("-n", self._switch, "link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("-n", self._switch, "link", "set", f"v-{name}", "master", "bridge", "up")
            _ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "link", "set", "eth0", "up")

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"


class Wire:
    """Carries IP packets between TUN devices by their destination: one thread, with the losses of a seed."""

    def __init__(self, devices: dict[str, int], *, loss: float, delay_seconds: float, seed: int) -> None:
        self._devices = {socket.inet_aton(address): device for address, device in devices.items()}
        self._loss = loss
        self._delay_seconds = delay_seconds
        self._random = random.Random(seed)
        self._order = count()
        self._waiting: list[tuple[float, int, bytes]] = []
        self._ended = threading.Event()
        self.carried = self.lost = 0
        self._thread = threading.Thread(target=self._run, name="wire")
        self._thread.start()

    def close(self) -> None:
        """End it, and the devices."""
        self._ended.set()
        self._thread.join()
        for device in self._devices.values():
            os.close(device)

    def _run(self) -> None:
        readable = list(self._devices.values())
        while not self._ended.is_set():
            seconds = 0.05
            if self._waiting:
                seconds = max(0.0, min(seconds, self._waiting[0][0] - time.monotonic()))
            for device in select.select(readable, [], [], seconds)[0]:
                self._take(os.read(device, _PACKET_BYTES_MAX))
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                self._give(heapq.heappop(self._waiting)[2])

    def _take(self, packet: bytes) -> None:
        if self._random.random() < self._loss or len(self._waiting) >= _WAITING_MAX:
            self.lost += 1
            return
        heapq.heappush(self._waiting, (time.monotonic() + self._delay_seconds, next(self._order), packet))

    def _give(self, packet: bytes) -> None:
        device = self._devices.get(packet[16:20])
        if packet[0] >> 4 == 4 and device is not None:
            self.carried += 1
            os.write(device, packet)


def _ip(*words: str) -> None:
    """Run iproute2; OSError says what it says."""
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _enter_namespace(namespace: str) -> None:
    """Move this thread there."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace} is refused")
    finally:
        os.close(descriptor)


def _open_tun() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TUN | _IFF_NO_PI))
    except BaseException:
        os.close(device)
        raise
    return device
