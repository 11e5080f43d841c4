"""The thread that listens to engines: sockets of ZeroMQ in, batches to followers out."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvstore.engine_events.residency import Outcome
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.clock import Clock
    from kvstore.engine_events.overlay import DeviceOverlay, FollowedEngine

_POLL_MS = 250
_TURN_MESSAGES_MAX = 256  # of one engine, before the others have their turn
_MESSAGE_BYTES_MAX = 4 * 2**20  # a step of 100,000 new tokens has some 400 KiB
_QUEUED_MESSAGES_MAX = 1000  # of one engine, in the socket; what is above is a gap
_REPLAY_SILENCE_SECONDS = 5.0
_JOIN_SECONDS = 2.0
_PAUSE_SECONDS = 1.0  # behind a turn that failed
_SEQUENCE_BYTES = 8
_REPLAY_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

logger = logging.getLogger(__name__)


class EngineSubscriber:
    """Follows every engine of an overlay on one thread, whatever becomes of them. `start` and `stop` once each.

    Raises ConfigError where an endpoint cannot be used. An engine that is not there is connected to when it comes.
    """

    def __init__(self, overlay: DeviceOverlay, clock: Clock) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: list[_EngineLink] = []
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            for engine in overlay.engines:
                self._links.append(_EngineLink(self._context, engine, clock))
        except ConfigError:
            self._close()
            raise

    def start(self) -> None:
        """Follow from now on."""
        assert self._thread is None, "it is started once"
        self._thread = threading.Thread(target=self._run, name="kvstore-engine-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Follow no more. Idempotent."""
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        else:
            self._close()

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs, was not started yet, or was stopped."""
        return self._thread is None or self._has_ended.is_set() or self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._has_ended.is_set():
                try:
                    self._turn()
                except Exception:
                    logger.exception("a turn of the engines' subscriber failed; it begins anew with all of them")
                    self._has_ended.wait(_PAUSE_SECONDS)
                    for link in self._links:
                        link.begin_again()
        finally:
            self._close()

    def _turn(self) -> None:
        poller = zmq.Poller()
        for link in self._links:
            for source in link.sources:
                poller.register(source, zmq.POLLIN)
        ready = dict(poller.poll(_POLL_MS))
        for link in self._links:
            link.turn(ready)

    def _close(self) -> None:
        for link in self._links:
            link.close()
        self._links.clear()
        self._context.term()


class _EngineLink:
    """The sockets of one engine."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engine: FollowedEngine, clock: Clock) -> None:
        self._context = context
        self._engine = engine
        self._clock = clock
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_until = 0.0
        self._live = _socket(context, zmq.SUB)
        self._monitor = self._live.get_monitor_socket(_WATCHED)
        endpoint = engine.config.endpoint
        try:
            self._live.setsockopt(zmq.SUBSCRIBE, b"")
            if "://*" in endpoint:  # an engine whose own endpoint names a host connects to it
                self._live.bind(endpoint)
            else:
                self._live.connect(endpoint)
            self._replay_socket().close()  # whether the address can be used at all
        except zmq.ZMQError as err:
            self.close()
            raise ConfigError(
                f"engine {engine.name!r:.80} cannot be followed at {endpoint} {engine.config.replay_endpoint}: {err}"
            ) from err

    @property
    def sources(self) -> list[zmq.Socket[Any]]:
        """What to wait for: during a replay no live batch."""
        return [self._monitor, self._replay or self._live]

    def turn(self, ready: dict[Any, int]) -> None:
        """Take what has come."""
        if self._monitor in ready:
            self._watch()
        if self._replay is not None:
            self._take_replayed(self._replay)
        elif self._live in ready:
            self._take_live()

    def begin_again(self) -> None:
        """Forget what is known of the engine, and ask it for all that it repeats."""
        self._end_replay()
        self._begin_replay(self._engine.follower.connected())

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self._live.disable_monitor()
        for socket in (self._monitor, self._live, self._replay):
            if socket is not None:
                socket.close(linger=0)

    def _watch(self) -> None:
        while self._monitor.poll(0):
            kind = recv_monitor_message(self._monitor)["event"]
            self._end_replay()
            if kind == zmq.EVENT_DISCONNECTED:
                self._engine.is_connected = False
                self._engine.follower.disconnected()
                logger.warning("engine has gone: engine=%s", self._engine.name)
            else:
                self._engine.is_connected = True
                self._begin_replay(self._engine.follower.connected())
                logger.info("following engine: engine=%s", self._engine.name)

    def _take_live(self) -> None:
        for _ in range(_TURN_MESSAGES_MAX):
            if not self._live.poll(0):
                return
            numbered = self._numbered(self._live.recv_multipart())
            wanted = self._engine.follower.live(*numbered) if numbered else None
            if wanted is not None:
                self._begin_replay(wanted)
                return

    def _take_replayed(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_TURN_MESSAGES_MAX):
            if not socket.poll(0):
                break
            self._replay_until = self._clock.monotonic() + _REPLAY_SILENCE_SECONDS
            frames = socket.recv_multipart()
            if len(frames) >= 2 and frames[-2] == _REPLAY_END:
                self._end_replay()
                self._engine.follower.replay_ended()
                return
            numbered = self._numbered(frames)
            if numbered:
                self._engine.follower.replayed(*numbered)
        if self._clock.monotonic() >= self._replay_until:
            logger.warning("engine repeats nothing: engine=%s", self._engine.name)
            self._end_replay()
            self._engine.follower.replay_ended()

    def _begin_replay(self, first: int | None) -> None:
        if first is not None:
            self._replay = self._ask(first)
            self._replay_until = self._clock.monotonic() + _REPLAY_SILENCE_SECONDS

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None

    def _ask(self, first: int) -> zmq.Socket[bytes]:
        socket = self._replay_socket()
        socket.send_multipart((b"", first.to_bytes(_SEQUENCE_BYTES, "big")))
        return socket

    def _replay_socket(self) -> zmq.Socket[bytes]:
        """One for each replay, so that no late answer is taken for one of the next."""
        socket = _socket(self._context, zmq.DEALER)
        if self._engine.config.replay_endpoint:
            try:
                socket.connect(self._engine.config.replay_endpoint)
            except zmq.ZMQError:
                socket.close()
                raise
        return socket

    def _numbered(self, frames: list[bytes]) -> tuple[int, bytes] | None:
        """Number and bytes of a batch, the last two frames behind a topic; None where it is none."""
        if len(frames) < 2 or len(frames[-2]) != _SEQUENCE_BYTES:
            self._engine.counts.add(Outcome.MALFORMED)
            return None
        return int.from_bytes(frames[-2], "big"), frames[-1]


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES_MAX)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
