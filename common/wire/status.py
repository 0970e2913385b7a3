"""Translates errors into the statuses that the peer receives, and received statuses into errors.

The peer gets a gRPC status and a fixed sentence that starts with a code word. Messages for this
party's own user never go out, with one exception: the names of the contract's fields that differ,
which both parties hold anyway.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, TypeAlias

import grpc

from splitveil.common import errors
from splitveil.common.wire.limits import DETAILS_CHARACTERS


class PeerStatus(NamedTuple):
    code: grpc.StatusCode
    details: str


_MISMATCH = "contract-mismatch"
_BUSY = "Concurrent RPC limit exceeded"  # gRPC's own wording
_FIELD_NAME = re.compile(r"[A-Za-z0-9_. ()-]{1,100}")
_OTHER_FIELDS = "(other fields)"

_NOT_NOW, _DENIED = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED
_AWAY, _ENDED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED

# From the most specific to the most general: the first that fits an error is sent.
_SENT: dict[type[Exception], PeerStatus] = {
    errors.InvalidMessage: PeerStatus(
        grpc.StatusCode.INVALID_ARGUMENT,
        "invalid-message: a message has the wrong dtype, shape, length or values",
    ),
    errors.TooLarge: PeerStatus(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "too-large: a message is beyond the contract's limits"
    ),
    errors.NotOpen: PeerStatus(
        _NOT_NOW, "not-open: this party was restarted; open the run again with a handshake"
    ),
    errors.Busy: PeerStatus(_AWAY, "busy: this party serves no further stream now"),
    errors.OthersAwaited: PeerStatus(_AWAY, "others-awaited: another party is not there yet"),
    errors.StartedOver: PeerStatus(
        _NOT_NOW, "nothing-begun: nothing of this run was answered; align again"
    ),
    errors.OutOfStep: PeerStatus(
        _NOT_NOW,
        "out-of-step: a message is for another run, epoch, step or other rows than expected",
    ),
    errors.OtherModel: PeerStatus(
        _NOT_NOW, "other-model: this party's half of the model is from another training"
    ),
    errors.TableRefused: PeerStatus(
        _DENIED, "table-refused: this party does not give its whole table"
    ),
    errors.AlignmentError: PeerStatus(
        _NOT_NOW, "alignment-failed: the parties' ids give no intersection to train on"
    ),
    errors.Interrupted: PeerStatus(_ENDED, "interrupted: this party was stopped"),
    errors.EndedForGood: PeerStatus(_ENDED, "ended-for-good: this party has ended the run"),
    errors.SplitveilError: PeerStatus(_ENDED, "stopped: this party cannot go on"),
}

UNTRUSTED = PeerStatus(grpc.StatusCode.UNAUTHENTICATED, "untrusted: not accepted")
"""Sent to a peer whose certificate is genuine, but belongs to no party to the contract."""

_INTERNAL = PeerStatus(grpc.StatusCode.INTERNAL, "internal: this party has a fault of its own")

# The code words of received statuses, and the errors that they become on this side.
_RECEIVED: dict[str, tuple[type[errors.SplitveilError], str]] = {
    "invalid-message": (errors.ProtocolError, "the peer found a message of this party invalid"),
    "too-large": (errors.ProtocolError, "the peer found a message of this party too large"),
    "not-open": (
        errors.PeerRestarted,
        "the peer was restarted, and its run has to be opened again",
    ),
    "busy": (errors.Busy, "the peer has as many calls as it accepts at a time"),
    "others-awaited": (errors.OthersAwaited, "the active party waits for another passive party"),
    "nothing-begun": (
        errors.StartedOver,
        "the active party has started over before the first answer",
    ),
    "out-of-step": (errors.ProtocolError, "the peer is at another run, epoch, step or other rows"),
    "table-refused": (
        errors.TableRefused,
        "the passive party does not give its whole table (its answers.whole_table)",
    ),
    "other-model": (errors.OtherModel, "the peer's half of the model is from another training"),
    "untrusted": (errors.PeerUntrusted, "the peer does not accept this party's certificate"),
    "alignment-failed": (
        errors.AlignmentError,
        "the peer found no usable intersection of the ids, or accepts no more; its log says which",
    ),
    "interrupted": (errors.PeerLeft, "the peer was stopped by a person or a supervisor"),
    "ended-for-good": (
        errors.PeerEndedForGood,
        "the active party has ended this run for good; its own log says why",
    ),
    "stopped": (errors.PeerLeft, "the peer cannot continue; its own log says why"),
    "internal": (errors.PeerError, "the peer has an internal fault; its own log says which"),
}

# gRPC's words about a connection that will never be made, and their meaning: waiting is useless.
_NOT_TO_BE: tuple[tuple[str, str], ...] = (
    (
        "Hostname Verification Check failed",
        "the peer's certificate does not carry the called party's name (contract.identities)",
    ),
    (
        "certificate has expired",
        "the peer's certificate has expired, or this machine's clock is wrong",
    ),
    (
        "certificate is not yet valid",
        "the peer's certificate is not valid yet, or this machine's clock is wrong",
    ),
    ("WRONG_VERSION_NUMBER", "the peer answers without TLS"),
    ("ALERT_HANDSHAKE_FAILURE", "the peer does not speak TLS 1.3"),
    ("ALERT_PROTOCOL_VERSION", "the peer does not speak TLS 1.3"),
)

# Statuses of a connection that is down or a server that is not yet up: worth another attempt.
_PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
    }
)


def status_for(error: BaseException) -> PeerStatus:
    if isinstance(error, errors.ContractMismatch):
        return PeerStatus(_NOT_NOW, f"{_MISMATCH}: {', '.join(error.fields)}")
    for kind, status in _SENT.items():
        if isinstance(error, kind):
            return status
    return _INTERNAL


def error_from(code: grpc.StatusCode, details: str | None) -> errors.SplitveilError:
    """Return the error that a status from the peer means for this party.

    It is ``PeerUnreachable`` for a condition that may pass; every other error ends the run. Of the
    peer's own words only names of fields are repeated, and only if they have the form of names.
    """
    word, _, rest = (details or "").partition(": ")
    if word == _MISMATCH:
        names = [name.strip() for name in rest[:DETAILS_CHARACTERS].split(",")]
        named = [name for name in names if _FIELD_NAME.fullmatch(name)]
        return errors.ContractMismatch(named or [_OTHER_FIELDS])
    if word in _RECEIVED:
        kind, sentence = _RECEIVED[word]
        return kind(sentence)
    return _error_of_connection(code, details or "")


def _error_of_connection(code: grpc.StatusCode, details: str) -> errors.SplitveilError:
    if code is grpc.StatusCode.UNAVAILABLE:
        return _error_without_connection(details)
    if code in _PASSING:
        return errors.PeerUnreachable(f"no connection to the peer ({code.name})")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _BUSY in details:
        return errors.PeerUnreachable("the peer has as many calls as it accepts at a time")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.TooLarge("a message is beyond the connection's limits")
    return errors.PeerError(f"the peer refused a call ({code.name})")


def _error_without_connection(details: str) -> errors.PeerError:
    for words, meaning in _NOT_TO_BE:
        if words in details:
            return errors.PeerUntrusted(meaning)
    if "CERTIFICATE_VERIFY_FAILED" in details or "certificate signature failure" in details:
        # A channel trusts only one certificate, which was verified when the channel was made.
        return errors.PeerRenewed("the peer shows another certificate than before")
    if "failed to connect" in details and "Socket closed" in details:
        # A server that refuses a certificate, or requires one, says nothing else.
        return errors.PeerUnreachable(
            "no connection to the peer (it hangs up: it may refuse this party's certificate, or "
            "require TLS; its own log says more)"
        )
    return errors.PeerUnreachable("no connection to the peer (UNAVAILABLE)")


ErrorListener = Callable[[Exception], None]
Handler: TypeAlias = Any
"""A ``grpc.RpcMethodHandler``, which is a named tuple, as grpcio's stubs do not say."""


class HandlerInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = continuation(handler_call_details)
        return None if handler is None else self.wrap(handler, handler_call_details)

    @abstractmethod
    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails, /) -> Handler:
        """Return the handler that is called in the place of another."""


class ErrorInterceptor(HandlerInterceptor):
    """Turns exceptions of the handlers into the statuses of ``common/wire/status.py``."""

    def __init__(self, on_error: ErrorListener) -> None:
        self._on_error = on_error

    def wrap(self, handler: Handler, _details: grpc.HandlerCallDetails, /) -> Handler:
        unary, stream = handler.unary_unary, handler.stream_stream

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return unary(request, context)
            except Exception as error:  # noqa: BLE001, RUF100 (any error becomes a status)
                self._abort(error, context)

        def answers(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                yield from stream(requests, context)
            except Exception as error:  # noqa: BLE001, RUF100
                if context.is_active():
                    self._abort(error, context)

        if unary is not None:
            return handler._replace(unary_unary=answer)
        return handler if stream is None else handler._replace(stream_stream=answers)

    def _abort(self, error: Exception, context: grpc.ServicerContext) -> NoReturn:
        self._on_error(error)
        status = status_for(error)
        context.abort(status.code, status.details)
