"""Where every gRPC call begins and ends: bytes become messages, errors become statuses, calls are observed.

The fast lane counts its calls here too.

What lies behind it, service.py and admin.py, knows messages and kvstore's errors, and nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from kvstore.errors import InvalidArgumentError, KvstoreError
from kvstore.transport import frames
from kvstore.transport.admission import LASTING_METHODS
from kvstore.transport.status import status_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

    from kvstore.transport.admission import Admission
    from kvstore.transport.limits import CallObserver

logger = logging.getLogger(__name__)
INTERNAL_DETAILS = "the call failed inside the server; its log says why"

# By whether requests, and responses, are streams.
_HANDLERS: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class CallRoot:
    """The root of all calls of one server. Used from its event loop only.

    `failures` counts calls that ended with an exception that is none of kvstore's own: bugs.
    """

    def __init__(self, observer: CallObserver | None, admission: Admission) -> None:
        self.failures = 0
        self._admission = admission
        self._observer = observer
        self._answering = 0
        self._idle: asyncio.Event | None = None  # made by who waits

    def handler(self, service: ServiceDescriptor, implementation: object) -> Any:  # noqa: ANN401  # grpc has no types
        """A generic handler: each method of `service` is answered by the method of `implementation` named alike."""
        handlers = {method.name: self._method_handler(method, implementation) for method in service.methods}
        return grpc.method_handlers_generic_handler(service.full_name, handlers)

    async def wait_idle(self) -> None:
        """Return when no call is running, but for those that last as long as their client wants."""
        if self._answering:
            self._idle = asyncio.Event()
            await self._idle.wait()

    def _method_handler(self, method: MethodDescriptor, implementation: object) -> Any:  # noqa: ANN401
        answer = getattr(implementation, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower())
        request_type = message_factory.GetMessageClass(method.input_type)
        decode = partial(_decode_all if method.client_streaming else _decode, request_type)
        respond = _respond_many if method.server_streaming else _respond_once

        async def behave(raw: Any, context: Any) -> bytes | None:  # noqa: ANN401
            return await self._run(method.name, context, partial(respond, answer, decode, raw, context))

        return _HANDLERS[method.client_streaming, method.server_streaming](behave)

    async def _run(
        self,
        method: str,
        context: Any,  # noqa: ANN401
        call: Callable[[], Awaitable[bytes | None]],
    ) -> bytes | None:
        status = grpc.StatusCode.OK
        start = self.begin(method)
        try:
            with self._admission.entered(method, context):
                return await call()
        except asyncio.CancelledError:
            status = grpc.StatusCode.CANCELLED
            raise
        except KvstoreError as error:
            status, details, metadata = status_of(error)
            await context.abort(status, details, metadata)
            raise
        except Exception as error:
            self.count_failure(method, error)
            status = grpc.StatusCode.INTERNAL
            await context.abort(status, INTERNAL_DETAILS)
            raise
        finally:
            self.end(method, start, status.name)

    def begin(self, method: str) -> float:
        """A call begins; returns when, for `end`."""
        if method not in LASTING_METHODS:
            self._answering += 1
        return time.monotonic()

    def end(self, method: str, start: float, status: str) -> None:
        """A call that has begun is over; `status` is the name of a gRPC code."""
        if method not in LASTING_METHODS:
            self._answering -= 1
            if not self._answering and self._idle is not None:
                self._idle.set()
        self.observe(method, start, status)

    def observe(self, method: str, start: float, status: str) -> None:
        """Tell of a call that is over; of one that began and ended in one step of the loop this is all there is."""
        if self._observer is not None:
            self._observer.observe(method, time.monotonic() - start, status)

    def count_failure(self, method: str, error: Exception) -> None:
        """Log and count an exception that is none of kvstore's own."""
        self.failures += 1
        logger.error("call failed: method=%s", method, exc_info=error)


async def _respond_once(
    answer: Callable[[Any], Awaitable[Message]],
    decode: Callable[[Any], Any],
    raw: Any,  # noqa: ANN401
    context: Any,  # noqa: ANN401, ARG001
) -> bytes:
    return frames.encode(await answer(decode(raw)))


async def _respond_many(
    answer: Callable[[Any], AsyncGenerator[Message | bytes, None]],
    decode: Callable[[Any], Any],
    raw: Any,  # noqa: ANN401
    context: Any,  # noqa: ANN401
) -> None:
    async with aclosing(answer(decode(raw))) as responses:
        async for response in responses:
            await context.write(frames.encode(response))


def _decode(request_type: type[Message], raw: bytes) -> Message | memoryview:
    try:
        return frames.decode(request_type, raw)
    except DecodeError as err:
        raise InvalidArgumentError(f"the bytes are no {request_type.DESCRIPTOR.full_name} message") from err


async def _decode_all(request_type: type[Message], raws: AsyncIterator[bytes]) -> AsyncIterator[Message | memoryview]:
    async for raw in raws:
        yield _decode(request_type, raw)
