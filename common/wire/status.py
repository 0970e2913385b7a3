"""What the peer is told of an error, and which error a party makes of what it is told.

The peer gets a gRPC status and a fixed sentence that starts with a code word. Nothing of a message
for the own user goes out, with one exception: the names of the contract's fields in
which the parties differ, which both hold anyway.
"""

from typing import NamedTuple

import grpc

from common.errors import (
    AlignmentError,
    AuditRefused,
    ContractMismatch,
    Interrupted,
    InvalidMessage,
    OutOfStep,
    PeerError,
    PeerLeft,
    PeerUnreachable,
    ProtocolError,
    SplitveilError,
    TooLarge,
)


class PeerStatus(NamedTuple):
    """A status as it travels."""

    code: grpc.StatusCode
    details: str


_MISMATCH = "contract-mismatch"

# From the most special to the most general: the first that fits an error is sent.
_SENT: tuple[tuple[type[Exception], PeerStatus], ...] = (
    (
        InvalidMessage,
        PeerStatus(
            grpc.StatusCode.INVALID_ARGUMENT,
            "invalid-message: a message has the wrong dtype, shape, length or values",
        ),
    ),
    (
        TooLarge,
        PeerStatus(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "too-large: a message is beyond the contract's limits",
        ),
    ),
    (
        OutOfStep,
        PeerStatus(
            grpc.StatusCode.FAILED_PRECONDITION,
            "out-of-step: a message is for another run, epoch, step or other rows than expected",
        ),
    ),
    (
        AuditRefused,
        PeerStatus(
            grpc.StatusCode.PERMISSION_DENIED,
            "audit-refused: this party measures no scores in this run",
        ),
    ),
    (
        AlignmentError,
        PeerStatus(
            grpc.StatusCode.FAILED_PRECONDITION,
            "alignment-failed: the parties' ids give no intersection to train on",
        ),
    ),
    (
        Interrupted,
        PeerStatus(grpc.StatusCode.ABORTED, "interrupted: this party was stopped"),
    ),
    (
        SplitveilError,
        PeerStatus(grpc.StatusCode.ABORTED, "stopped: this party cannot go on"),
    ),
)

_INTERNAL = PeerStatus(grpc.StatusCode.INTERNAL, "internal: this party has a fault of its own")

# The code words of statuses that end this party's run, and what they become on the other side.
_RECEIVED: dict[str, tuple[type[SplitveilError], str]] = {
    "invalid-message": (ProtocolError, "the peer found a message of this party invalid"),
    "too-large": (ProtocolError, "the peer found a message of this party too large"),
    "out-of-step": (ProtocolError, "the peer is at another run, epoch, step or other rows"),
    "audit-refused": (AuditRefused, "the peer measures no scores in this run"),
    "alignment-failed": (AlignmentError, "the peer found no usable intersection of the ids"),
    "interrupted": (PeerLeft, "the peer was stopped by a person or a supervisor"),
    "stopped": (PeerLeft, "the peer cannot go on; its own log says why"),
    "internal": (PeerError, "the peer has a fault of its own; its own log says which"),
}

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
    """Return what the peer is told of an error."""
    if isinstance(error, ContractMismatch):
        return PeerStatus(
            grpc.StatusCode.FAILED_PRECONDITION, f"{_MISMATCH}: {', '.join(error.fields)}"
        )
    for kind, status in _SENT:
        if isinstance(error, kind):
            return status
    return _INTERNAL


def error_from(code: grpc.StatusCode, details: str | None) -> SplitveilError:
    """Return the error that a status from the peer means for this party.

    ``PeerUnreachable`` for what may pass; everything else ends the run.
    """
    word, _, rest = (details or "").partition(": ")
    if word == _MISMATCH:
        return ContractMismatch([name.strip() for name in rest[:2000].split(",")])
    if word in _RECEIVED:
        kind, sentence = _RECEIVED[word]
        return kind(sentence)
    if code in _PASSING:
        return PeerUnreachable(f"no connection to the peer ({code.name})")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return TooLarge("a message is beyond the connection's limits")
    return PeerError(f"the peer refused a call ({code.name})")
