"""Notes every message of every call, on either side, as the bytes that cross: in a transcript, say.

A message that cannot be noted does not cross, and ends the run with the transcript's
``StorageError``. Only a goodbye crosses anyway, so that the peer need not wait for a party that is
gone.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import grpc

from splitveil.common.errors import StorageError
from splitveil.common.record.transcript import Crossing, Direction
from splitveil.common.run.contract import NAME_CHARACTERS
from splitveil.common.wire.limits import INFERENCE_SERVICE, PARTY_KEY, SERVICE
from splitveil.common.wire.status import Handler, HandlerInterceptor
from splitveil.common.wire.tensor_codec import Frame


class Notes(Protocol):
    """Takes note of messages, like a transcript."""

    def note(self, crossing: Crossing) -> None:
        """Take note of a message, or raise StorageError."""


class AllNotes:
    def __init__(self, *places: Notes) -> None:
        self._places = places

    def note(self, crossing: Crossing) -> None:
        for place in self._places:
            place.note(crossing)


_PREFIXES = (f"/{SERVICE}/", f"/{INFERENCE_SERVICE}/")
_GOODBYE = "Leave"

_Note = Callable[[Direction, str, Any], Any]


class NotingServer(HandlerInterceptor):
    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails, /) -> Handler:
        method = _own_method(details.method)
        if method is None:
            return handler
        if handler.unary_unary is not None:
            answer = handler.unary_unary

            def unary(request: Any, context: grpc.ServicerContext) -> Any:
                note = partial(_note, self._notes, _caller(context))
                note("received", f"{method} request", request)
                return note("sent", f"{method} reply", answer(request, context))

            return handler._replace(unary_unary=unary)
        stream_answers = handler.stream_stream

        def stream(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            note = partial(_note, self._notes, _caller(context))
            heard = (note("received", f"{method} request", request) for request in requests)
            for reply in stream_answers(heard, context):
                yield note("sent", f"{method} reply", reply)

        return handler._replace(stream_stream=stream)


class NotingClient(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc, unused-ignore]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc, unused-ignore]
):
    def __init__(self, notes: Notes, party: str | None = None) -> None:
        self._note: _Note = partial(_note, notes, party)

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        method = _own_method(details.method)
        if method is None:
            return continuation(details, request)
        with suppress(StorageError) if method == _GOODBYE else nullcontext():
            self._note("sent", f"{method} request", request)
        call = continuation(details, request)
        if call.code() is grpc.StatusCode.OK:
            with suppress(StorageError) if method == _GOODBYE else nullcontext():
                self._note("received", f"{method} reply", call.result())
        return call

    def intercept_stream_stream(
        self,
        continuation: Callable[..., Any],
        details: grpc.ClientCallDetails,
        requests: Iterator[Any],
    ) -> Any:
        method = _own_method(details.method)
        if method is None:
            return continuation(details, requests)
        return _NotedCall(partial(continuation, details), requests, self._note, method)


class _NotedCall:
    """A call whose requests are noted as gRPC takes them, and its replies as they are read.

    gRPC takes the requests in a thread of its own, where an error would only be logged, and look
    like a lost connection. Instead, the error ends the call, and is raised to the reader of the
    replies.
    """

    def __init__(
        self, call: Callable[[Iterator[Any]], Any], requests: Iterator[Any], note: _Note, name: str
    ) -> None:
        self._note = note
        self._name = name
        self._unnoted: StorageError | None = None
        self._call: Any = None
        self._call = call(self._noted(requests))
        if self._unnoted is not None:
            self._call.cancel()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            reply = next(self._call)
        except (StopIteration, grpc.RpcError):
            if self._unnoted is not None:
                raise self._unnoted from None
            raise
        return self._note("received", f"{self._name} reply", reply)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def _noted(self, requests: Iterator[Any]) -> Iterator[Any]:
        for request in requests:
            try:
                self._note("sent", f"{self._name} request", request)
            except StorageError as error:
                self._unnoted = error
                if self._call is not None:
                    self._call.cancel()
                return
            yield request


def _own_method(path: str | bytes) -> str | None:
    text = path.decode() if isinstance(path, bytes) else path
    prefix = next((prefix for prefix in _PREFIXES if text.startswith(prefix)), None)
    return None if prefix is None else text.removeprefix(prefix)


def _caller(context: grpc.ServicerContext) -> str | None:
    named = [value for key, value in context.invocation_metadata() if key == PARTY_KEY]
    return str(named[0])[:NAME_CHARACTERS] if named else None


def _note(notes: Notes, party: str | None, direction: Direction, kind: str, message: Any) -> Any:
    epoch: int | None
    step: int | None
    if isinstance(message, Frame):
        data, (epoch, step) = message.data, message.place()
    elif isinstance(message, bytes):  # refused by its parser
        data, epoch, step = message, None, None
    else:
        data = message.SerializeToString(deterministic=True)
        epoch, step = getattr(message, "epoch", None), getattr(message, "step", None)
    notes.note(Crossing(direction, kind, data, epoch, step, party))
    return message
