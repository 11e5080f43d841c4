"""Ctrl-C in the middle of a handover.

KeyboardInterrupt comes between any two statements of the main thread. Where one owner has given something away and the
next has not noted it yet, nobody would ever end it: a stage whose blocks nobody else may store, a lease that holds its
blocks for good, slots that no pool knows. So what hands over keeps the interrupt until it is done.
"""

from __future__ import annotations

# What is behind `signal`, whose functions look each handler up among enums: 45 us for what takes 2.
import _signal  # type: ignore[import-not-found]
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from types import FrameType, TracebackType

P = ParamSpec("P")
R = TypeVar("R")


class InterruptsLater:
    """While the block runs, SIGINT of the main thread waits; then it does what it would have done. For one use.

    Only the main thread of Python gets interrupts, so others pay for a comparison, and it for exchanging the handler
    twice, about 2 us. What is in the block must not wait for long: nobody can end it. The handler of another signal may
    install one for SIGINT meanwhile, which then stays, or take note of this one, which then stands for the one before.
    """

    __slots__ = ("_before", "_came", "_over")

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], object] | None = None
        self._came: FrameType | None = None
        self._over = False

    def __enter__(self) -> None:
        # Not current_thread(), which enters threads that Python did not start into a table, for good.
        if threading.get_ident() == threading.main_thread().ident:
            before = _signal.getsignal(_signal.SIGINT)
            if callable(before):
                self._before = before
                _signal.signal(_signal.SIGINT, self._keep)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            if _signal.getsignal(_signal.SIGINT) == self._keep:
                _signal.signal(_signal.SIGINT, self._before)
            self._over = True
            after = _signal.getsignal(_signal.SIGINT)
            if self._came is not None and callable(after):
                after(_signal.SIGINT, self._came)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self._over and self._before is not None:
            self._before(number, frame)
        else:
            self._came = frame


def uninterrupted(call: Callable[P, R]) -> Callable[P, R]:
    """The same call, which an interrupt does not end half way."""

    @functools.wraps(call)
    def whole(*arguments: P.args, **named: P.kwargs) -> R:
        with InterruptsLater():
            return call(*arguments, **named)

    return whole
