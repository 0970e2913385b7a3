"""Bounds everything that a peer may send; the only module that checks the fields of a message.

Bounds that depend on the contract (rows, shape and length of a tensor) are checked where the tensor
is put together, in ``tensor_codec.py``; everything here holds under any contract. Of a message in a
field its own fields are checked, and an enumeration is one of its numbers. Any other field without
an entry in ``FIELDS`` or ``EXEMPT``, unless it says yes or no, is refused, and fails a test.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from splitveil.common.errors import InvalidMessage, ProtocolError, TooLarge
from splitveil.common.run.contract import NAME_CHARACTERS, PASSIVE_PARTIES
from splitveil.common.run.messages import ID_CHARACTERS
from splitveil.common.run.sample_order import NONCE_BYTES, ROWS_DIGEST_BYTES

MessageT = TypeVar("MessageT", bound=Message)

SERVICE = "splitveil.v1.SplitLearning"  # served by the active party while a model is trained
INFERENCE_SERVICE = "splitveil.v1.SplitInference"
"""Served by a passive party once a model is trained."""
PROTOCOL_VERSION = 1
"""Version of the rules in ``protos/split_learning.proto``; there is only one."""

# ---- lengths of computed values, which are therefore the same everywhere ----

DIGEST_BYTES = 32
"""SHA-256: commitments, digests of contracts and intersections."""
POINT_BYTES = 32
"""A group element of ristretto255."""
TAG_BYTES = 16
"""With a million ids on each side, two different ones share a tag with probability 2^-87."""
CHUNK_IDS = 4096
"""128 KiB of points: little memory, and still much more than the overhead of a message."""

# ---- whole messages, in bytes: checked before anything is parsed ----

CONTRACT_CHARACTERS = 64 * 1024
"""About fifty times a contract with every field set; parsed JSON takes many times its text."""
HANDSHAKE_BYTES = 4 * CONTRACT_CHARACTERS + 16 * 1024
"""The contract, at up to four bytes per character, and the other fields."""
ALIGN_FRAME_BYTES = CHUNK_IDS * POINT_BYTES + 1024
"""One chunk of points, and the few bytes before them."""
SMALL_BYTES = 1024
"""Replies and goodbyes: a few dozen bytes each."""
TENSOR_HEADER_BYTES = 1024
"""The fields beside a tensor's payload, about 80 bytes. Without this bound, a megabyte of shape
would become twenty megabytes of Python numbers."""
DETAILS_CHARACTERS = 2000
"""Characters of a status from the peer that are read."""

MASK_BYTES = CHUNK_IDS * POINT_BYTES
"""A chunk of the mask that ends an alignment with several parties: as large as a chunk of points.
"""

# ---- several passive parties ----

PARTY_KEY = "splitveil-party"
"""Metadata key of every call in a run with several passive parties: the caller's name in the
contract."""

# ---- diagnosis ----

PROBE_PADDING_BYTES = 256 * 1024
"""Padding of one probe: below the largest message that any contract allows."""
PROBE_BYTES = PROBE_PADDING_BYTES + HANDSHAKE_BYTES
"""A whole probe, with the sender's contract."""
VERSION_CHARACTERS = 64
"""The version of the peer's software, which is printed."""

# ---- joint inference ----

MAX_IDS = 2**20
"""Ids of one request under any contract: the largest batch of an evaluation."""
ID_BYTES = 1024
"""UTF-8 bytes of one id: far more than any key of a table. A longer id is never known."""

# ---- names ----

RUN_ID_PATTERN = r"[A-Za-z0-9_-]{1,64}"
"""Run ids go into logs and checkpoints unchanged."""

# ---- calls ----

SERVER_THREADS = 12
"""Two each for Train, Evaluate and Align (``StreamSlots``), the rest for unary calls: the
longest waits five seconds for an alignment to end."""
THREADS_PER_PARTY = 8
"""Additional threads for each further passive party: its streams, and two calls that wait for
other parties."""
CONCURRENT_RPCS = 64
"""Calls in progress or waiting for a thread, over all connections; the next one is turned away, and
tries again."""
STREAMS_PER_CONNECTION = 32
"""Leaves room for calls on other connections, however many streams one connection opens."""
REFUSALS_LOGGED = 20
"""Refused messages of one kind that get a log line each; after that only every doubling does, so
that a peer cannot fill the disk with this party's own log."""


class Bound(NamedTuple):
    most: int
    """In characters of a text, bytes, entries of a list, or as the value of a number."""
    why: str


_NAME = Bound(NAME_CHARACTERS, "the contract limits names of runs and parties to the same length")
_DIGEST = Bound(DIGEST_BYTES, "SHA-256")
_NONCE = Bound(NONCE_BYTES, "a nonce is as long as the joint seed")
_VERSION = Bound(255, "there is only one; any other gets a reply that names the mismatch")
_EPOCH = Bound(100_000, "the contract allows no more epochs")
_STEP = Bound(2**31, "at most one step per row, and at most this many rows")
_SHAPE = Bound(5, "rows, and up to four dimensions of the cut layer")
_CHARACTERS = Bound(len(ID_CHARACTERS), "each kind of characters once")
_CHUNK = Bound(2**31 // CHUNK_IDS, "the number of chunks of the largest set")

FIELDS: Mapping[str, Bound] = {
    "HandshakeRequest.protocol_version": _VERSION,
    "HandshakeRequest.party": _NAME,
    "HandshakeRequest.contract": Bound(CONTRACT_CHARACTERS, "see CONTRACT_CHARACTERS"),
    "HandshakeRequest.nonce_commitment": _DIGEST,
    "HandshakeRequest.resume_run_id": _NAME,
    "HandshakeRequest.resume_places": Bound(
        1024, "a party keeps at most 100 checkpoints, and a few more while it deletes old ones"
    ),
    "HandshakeReply.run_id": _NAME,
    "HandshakeReply.contract_digest": _DIGEST,
    "HandshakeReply.nonce": _NONCE,
    "HandshakeReply.nonce_commitments": Bound(PASSIVE_PARTIES, "one for each passive party"),
    "AlignHello.engine": _NAME,
    "AlignHello.version": _VERSION,
    "AlignHello.normalisation": _NAME,
    "AlignHello.tag_bytes": Bound(POINT_BYTES, "a tag is part of a point"),
    "AlignHello.chunk_ids": Bound(2**20, "compared with this party's own value"),
    "AlignHello.set_size": Bound(2**64 - 1, "the session knows the contract's max_set_size"),
    "AlignHello.nonce": _NONCE,
    "AlignHello.run_id": _NAME,
    "AlignResume.exchange": _DIGEST,
    "AlignResume.points": Bound(2**31, "the largest set that a contract can allow"),
    "AlignResume.points_digest": _DIGEST,
    "AlignResume.tags": Bound(2**31, "the largest set that a contract can allow"),
    "AlignResume.bucket": Bound(1024, "the most buckets that a contract can allow"),
    "MaskedPoints.chunk": _CHUNK,
    "MaskedPoints.points": Bound(CHUNK_IDS * POINT_BYTES, "one chunk"),
    "Tags.chunk": _CHUNK,
    "Tags.tags": Bound(CHUNK_IDS * TAG_BYTES, "one chunk"),
    "AlignCommitment.digest": _DIGEST,
    "AlignDone.count": Bound(2**31, "the largest set that a contract can allow"),
    "AlignDone.digest": _DIGEST,
    "AlignDone.split_digest": _DIGEST,
    "AlignShare.chunk": Bound(2**31 // (8 * MASK_BYTES), "as many bits as the largest set has ids"),
    "AlignShare.mask": Bound(MASK_BYTES, "one chunk"),
    "AlignShare.nonces": Bound(PASSIVE_PARTIES, "one for each passive party"),
    "TensorFrame.run_id": _NAME,
    "TensorFrame.epoch": _EPOCH,
    "TensorFrame.step": _STEP,
    "TensorFrame.rows_digest": Bound(ROWS_DIGEST_BYTES, "the length of the digests of ids"),
    "TensorFrame.shape": _SHAPE,
    "EvaluateReply.epoch": _EPOCH,
    "EvaluateReply.step": _STEP,
    "LeaveRequest.run_id": _NAME,
    "Introduction.protocol_version": _VERSION,
    "Introduction.version": Bound(VERSION_CHARACTERS, "see VERSION_CHARACTERS"),
    "Introduction.party": _NAME,
    "Introduction.contract": Bound(CONTRACT_CHARACTERS, "see CONTRACT_CHARACTERS"),
    "Introduction.clock_ms": Bound(2**53, "a date that a computer can name"),
    "IdForm.most": _CHARACTERS,
    "IdForm.some": _CHARACTERS,
    "ProbeRequest.padding": Bound(PROBE_PADDING_BYTES, "see PROBE_PADDING_BYTES"),
    "ProbeReply.padding": Bound(PROBE_PADDING_BYTES, "as many bytes as were sent"),
    "DescribeRequest.protocol_version": _VERSION,
    "DescribeRequest.party": _NAME,
    "DescribeRequest.contract": Bound(CONTRACT_CHARACTERS, "see CONTRACT_CHARACTERS"),
    "DescribeReply.run_id": _NAME,
    "EmbedRequest.model_digest": _DIGEST,
    "EmbedRequest.ids": Bound(MAX_IDS, "see MAX_IDS; inference_codec knows the contract's bound"),
    "TableRequest.model_digest": _DIGEST,
    "TableRequest.points": Bound(CHUNK_IDS * POINT_BYTES, "one chunk"),
    "TableReply.points": Bound(CHUNK_IDS * POINT_BYTES, "one chunk"),
    "TableReply.tags": Bound(CHUNK_IDS * TAG_BYTES, "one chunk"),
    "EmbedReply.known": Bound(MAX_IDS // 8, "one bit for each id"),
    "EmbedReply.shape": _SHAPE,
}

EXEMPT: Mapping[str, str] = {
    "HandshakeRequest.resume_places[]": "only compared with batches that this party has reached",
    "HandshakeReply.resumes_at": "has to be one of the batches that were offered",
    "AlignShare.nonces[]": "has to match its commitment",
    "HandshakeReply.nonce_commitments[]": "small_messages requires 32 bytes",
    "TensorFrame.rows": "tensor_codec compares it with the contract's max_rows",
    "TensorFrame.total_bytes": "tensor_codec: exactly the size that follows from the shape",
    "TensorFrame.offset": "tensor_codec: exactly the bytes received before",
    "TensorFrame.data": "tensor_codec: one chunk, or the whole tensor",
    "IdForm.length": "only compared and shown",
    "DescribeReply.batch_number": "only compared with this party's own",
    "DescribeReply.max_ids": "inference_codec: at least 1; the own bound holds as well",
    "EmbedRequest.number": "repeated in the reply, and used for nothing else",
    "EmbedRequest.ids[]": "inference_codec: ID_BYTES",
    "TableReply.sealed": "table_codec: exactly the size that follows from the number of tags",
    "EmbedReply.number": "has to be that of a request that waits",
    "EmbedReply.data": "inference_codec: exactly the size that follows from the shape",
}


class Refused(bytes):
    """A message that was refused: its bytes as received, and the reason."""

    kind: type[ProtocolError]
    why: str


def reader(kind: type[MessageT], most_bytes: int) -> Callable[[bytes], MessageT | Refused]:
    """Return a parser for gRPC that never raises: gRPC would report the error its own way."""

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
    """Return a message that a ``reader`` has parsed. Raises ProtocolError."""
    if isinstance(message, Refused):
        raise message.kind(message.why)
    return message


def check_fields(message: Message) -> None:
    """Check every field of a message, and of the messages inside it, against its bound.

    Raises TooLarge or InvalidMessage. Both parties speak the same version, so that a message with
    unknown fields is of another kind, such as a tensor that parses as a goodbye.
    """
    if len(UnknownFieldSet(message)):
        raise InvalidMessage(f"{message.DESCRIPTOR.name}: has unknown fields")
    for field, value in message.ListFields():
        name = f"{message.DESCRIPTOR.name}.{field.name}"
        if field.message_type is not None:
            check_fields(value)
        elif field.enum_type is not None:
            if value not in field.enum_type.values_by_number:
                raise InvalidMessage(f"{name}: unknown number {value}")
        elif name in FIELDS:
            size = value if isinstance(value, int) else len(value)
            most = FIELDS[name].most
            if size > most:
                raise TooLarge(f"{name}: at most {most}, got {size}")
        elif name not in EXEMPT and (field.type != field.TYPE_BOOL or field.is_repeated):
            raise InvalidMessage(f"{name}: a field without a bound")


def _refused(data: bytes, kind: type[ProtocolError], why: str) -> Refused:
    # Not the error itself: its traceback would refer to the call's frames and these to the error,
    # a cycle that keeps gRPC's stream alive until the garbage collector runs.
    refused = Refused(data)
    refused.kind, refused.why = kind, why
    return refused
