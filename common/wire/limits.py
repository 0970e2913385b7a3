"""Every bound on what a peer may send, and the one check of a message's fields against them.

What a bound depends on the contract (rows, shape, length of a tensor) is checked where the tensor
is put together, ``tensor_codec.py``; everything here holds whatever the contract says. A field
without an entry in ``FIELDS`` or ``EXEMPT`` is refused, and fails a test.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from splitveil.common.errors import InvalidMessage, ProtocolError, TooLarge
from splitveil.common.run.contract import NAME_CHARACTERS, PASSIVE_PARTIES
from splitveil.common.run.sample_order import NONCE_BYTES, POSITIONS_DIGEST_BYTES

MessageT = TypeVar("MessageT", bound=Message)

PROTOCOL_VERSION = 1
"""The version of the rules in ``protos/split_learning.proto``: there is one."""

# ---- lengths of what is computed, and so the same everywhere ----

DIGEST_BYTES = 32
"""SHA-256: commitments, digests of contracts and intersections."""
POINT_BYTES = 32
"""A group element of ristretto255."""
TAG_BYTES = 16
"""So that two of a million ids share a tag with probability 2^-87."""
CHUNK_IDS = 4096
"""128 KiB of points: small beside everything else, large beside a message's costs."""

# ---- whole messages, in bytes: looked at before anything is parsed ----

CONTRACT_CHARACTERS = 64 * 1024
"""Some fifty times a contract with every field set; parsed JSON takes many times its text."""
HANDSHAKE_BYTES = 4 * CONTRACT_CHARACTERS + 16 * 1024
"""The contract, at up to four bytes a character, and what stands beside it."""
ALIGN_FRAME_BYTES = CHUNK_IDS * POINT_BYTES + 1024
"""One chunk of points, and the few bytes before them."""
SMALL_BYTES = 1024
"""Replies and goodbyes: some dozens of bytes each."""
TENSOR_HEADER_BYTES = 1024
"""What stands beside a tensor's payload: some 80 bytes. Without it, a megabyte of shape would
become twenty of Python numbers."""
CONTRACT_DEPTH = 4
"""Levels of sections in a contract; ours has three."""
DETAILS_CHARACTERS = 2000
"""Of a status from the peer, what is looked at."""

MASK_BYTES = CHUNK_IDS * POINT_BYTES
"""A chunk of the mask that ends an alignment of several: as large as one of points."""

# ---- several passive parties ----

PARTY_KEY = "splitveil-party"
"""Metadata of every call where there are several: the calling party's name in the contract."""

# ---- names ----

RUN_ID_PATTERN = r"[A-Za-z0-9_-]{1,64}"
"""Goes into logs and checkpoints as it is."""

# ---- calls ----

SERVER_THREADS = 12
"""Two each for Train, Evaluate and Align (``stream_places.py``), the rest for what is unary: the
longest of those waits for an alignment to end, five seconds."""
THREADS_PER_PARTY = 8
"""More of them for each further passive party: its streams, and two calls that wait for others."""
CONCURRENT_RPCS = 64
"""Calls under way or waiting for a thread, over all connections; the next one is sent away, and
comes again."""
STREAMS_PER_CONNECTION = 32
"""So that one connection, whatever it opens, leaves room for calls on another."""
REFUSALS_LOGGED = 20
"""Refused messages of one kind that get a line each; then only every doubling does, so that a peer
cannot fill the disk with this party's own log."""


class Bound(NamedTuple):
    """The most that a field may hold."""

    most: int
    """Characters of a text, bytes, entries of a list, or a number itself."""
    why: str


_NAME = Bound(
    NAME_CHARACTERS, "names of runs and parties are at most this long in the contract, too"
)
_DIGEST = Bound(DIGEST_BYTES, "SHA-256")
_NONCE = Bound(NONCE_BYTES, "a nonce is as long as the joint seed")
_POSITIONS = Bound(POSITIONS_DIGEST_BYTES, "as sample_order makes it")
_VERSION = Bound(255, "there is one; another is answered with its name, not believed")
_EPOCH = Bound(100_000, "the contract allows no more epochs")
_STEP = Bound(2**31, "as many steps as rows, which are at most this many")
_CHUNK = Bound(2**31 // CHUNK_IDS, "as many chunks as the largest set has")

FIELDS: Mapping[str, Bound] = {
    "HandshakeRequest.protocol_version": _VERSION,
    "HandshakeRequest.party": _NAME,
    "HandshakeRequest.contract": Bound(CONTRACT_CHARACTERS, "see CONTRACT_CHARACTERS"),
    "HandshakeRequest.nonce_commitment": _DIGEST,
    "HandshakeRequest.resume_run_id": _NAME,
    "HandshakeRequest.resume_places": Bound(
        1024, "a party keeps at most 100 checkpoints, and some more while it clears old ones away"
    ),
    "HandshakeReply.run_id": _NAME,
    "HandshakeReply.contract_digest": _DIGEST,
    "HandshakeReply.nonce": _NONCE,
    "HandshakeReply.nonce_commitments": Bound(PASSIVE_PARTIES, "one for each passive party"),
    "AlignHello.engine": _NAME,
    "AlignHello.version": _VERSION,
    "AlignHello.normalisation": _NAME,
    "AlignHello.tag_bytes": Bound(POINT_BYTES, "a tag is part of a point"),
    "AlignHello.chunk_ids": Bound(2**20, "compared with this party's own"),
    "AlignHello.set_size": Bound(2**64 - 1, "the session knows the contract's max_set_size"),
    "AlignHello.nonce": _NONCE,
    "AlignHello.run_id": _NAME,
    "MaskedPoints.chunk": _CHUNK,
    "MaskedPoints.points": Bound(CHUNK_IDS * POINT_BYTES, "one chunk"),
    "Tags.chunk": _CHUNK,
    "Tags.tags": Bound(CHUNK_IDS * TAG_BYTES, "one chunk"),
    "AlignDone.count": Bound(2**31, "the largest set that a contract can allow"),
    "AlignDone.digest": _DIGEST,
    "AlignDone.split_digest": _DIGEST,
    "AlignShare.chunk": Bound(2**31 // (8 * MASK_BYTES), "as many bits as the largest set has ids"),
    "AlignShare.mask": Bound(MASK_BYTES, "one chunk"),
    "AlignShare.nonces": Bound(PASSIVE_PARTIES, "one for each passive party"),
    "TensorFrame.run_id": _NAME,
    "TensorFrame.epoch": _EPOCH,
    "TensorFrame.step": _STEP,
    "TensorFrame.positions_digest": _POSITIONS,
    "TensorFrame.shape": Bound(5, "rows, and up to four dimensions of the cut layer"),
    "EvaluateReply.epoch": _EPOCH,
    "EvaluateReply.step": _STEP,
    "AuditRequest.run_id": _NAME,
    "AuditRequest.epoch": _EPOCH,
    "AuditRequest.attack": _NAME,
    "AuditRequest.layer": Bound(256, "the desk says what a name looks like"),
    "AuditRequest.positions_digest": _POSITIONS,
    "AuditReply.leak_auc_percent": Bound(100, "per cent"),
    "LeaveRequest.run_id": _NAME,
}

EXEMPT: Mapping[str, str] = {
    "HandshakeRequest.resume_places[]": "only compared with places where this party has been",
    "HandshakeReply.resumes_at": "has to be one of the places that were offered",
    "AlignFrame.hello": "a message: its own fields are bounded",
    "AlignFrame.points": "a message: its own fields are bounded",
    "AlignFrame.tags": "a message: its own fields are bounded",
    "AlignFrame.done": "a message: its own fields are bounded",
    "AlignFrame.wait": "a message, without fields",
    "AlignFrame.share": "a message: its own fields are bounded",
    "AlignShare.nonces[]": "has to be what its commitment says",
    "HandshakeReply.nonce_commitments[]": "grpc_peer wants 32 bytes",
    "TensorFrame.rows": "tensor_codec holds it against the contract's max_rows",
    "TensorFrame.total_bytes": "tensor_codec: exactly what the shape says",
    "TensorFrame.offset": "tensor_codec: exactly what was received before",
    "TensorFrame.data": "tensor_codec: one chunk, or the whole tensor",
    "TensorFrame.split": "an enumeration: one of its numbers",
    "TensorFrame.dtype": "an enumeration: one of its numbers",
    "EvaluateReply.course": "an enumeration: one of its numbers",
    "EvaluateReply.split": "an enumeration: one of its numbers",
    "AuditRequest.scores": "the message's own bound; the desk wants one for each training row",
    "LeaveRequest.reason": "an enumeration: one of its numbers",
}


class Refused(bytes):
    """A message that is not believed: its bytes, as they came, and why."""

    kind: type[ProtocolError]
    why: str


def reader(kind: type[MessageT], most_bytes: int) -> Callable[[bytes], MessageT | Refused]:
    """Return what gRPC parses messages with: never raises, for gRPC would say it in its own words.

    Args:
        kind: of message.
        most_bytes: larger ones are not even parsed.
    """

    def read(data: bytes) -> MessageT | Refused:
        try:
            if len(data) > most_bytes:
                raise TooLarge(f"{kind.__name__}: at most {most_bytes} bytes, got {len(data)}")
            message = kind.FromString(data)
            check_fields(message)
        except DecodeError:
            return _refused(data, InvalidMessage, f"not a {kind.__name__} message")
        except ProtocolError as error:
            return _refused(data, type(error), str(error))
        return message

    return read


def believed(message: MessageT | Refused) -> MessageT:
    """Return a message that a ``reader`` has read.

    Raises:
        ProtocolError: it is not to be believed.
    """
    if isinstance(message, Refused):
        raise message.kind(message.why)
    return message


def check_fields(message: Message) -> None:
    """Hold every field of a message, and of those inside it, against its bound.

    Raises:
        TooLarge: one is beyond it.
        InvalidMessage: the number of an enumeration has no name, or the field no bound; or there
            are fields that this version does not know. Both parties speak the same one: what has
            others is a message of another kind, such as a tensor that reads as a goodbye.
    """
    if len(UnknownFieldSet(message)):
        raise InvalidMessage(f"{message.DESCRIPTOR.name}: fields that there are not")
    for field, value in message.ListFields():
        name = f"{message.DESCRIPTOR.name}.{field.name}"
        if field.message_type is not None:
            check_fields(value)
        elif field.enum_type is not None:
            _check_enumeration(name, field.enum_type, value)
        elif name in FIELDS:
            _check_size(name, value)
        elif name not in EXEMPT:
            raise InvalidMessage(f"{name}: a field without a bound")


def _check_enumeration(name: str, enumeration: EnumDescriptor, value: int) -> None:
    if value not in enumeration.values_by_number:
        raise InvalidMessage(f"{name}: there is no number {value}")


def _check_size(name: str, value: object) -> None:
    size = value if isinstance(value, int) else len(value)  # type: ignore[arg-type]
    most = FIELDS[name].most
    if size > most:
        raise TooLarge(f"{name}: at most {most}, got {size}")


def _refused(data: bytes, kind: type[ProtocolError], why: str) -> Refused:
    # Not the error itself: with its traceback it would hold the call's frames, and they would hold
    # it, and so gRPC's stream, until the garbage collector comes by.
    refused = Refused(data)
    refused.kind, refused.why = kind, why
    return refused
