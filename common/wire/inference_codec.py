"""Encodes the messages of joint inference; the only module that checks and decodes their bytes.

In a whole table, the row with id x is sealed under the point k H(x), where H is the map of the
alignment from ids to the group and k the passive party's scalar:

    tag = SHA-256("splitveil table tag 1" || point), the first 16 bytes
    key = SHA-256("splitveil table key 1" || point)
    sealed = ChaCha20-Poly1305 with this key, nonce 0, of the activation's bytes

A key belongs to one row of one model, so its nonce never meets two texts. Without the point, which
takes the passive party's scalar, neither tag nor key of an id can be guessed, however few ids there
are to guess from (Jarecki, Kiayias and Krawczyk 2014: an oblivious pseudo-random function).
"""

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from splitveil.common.errors import ContractMismatch, InvalidMessage, TooLarge
from splitveil.common.run.contract import DTYPE_BYTES, Contract
from splitveil.common.run.messages import Embedded, ModelIdentity
from splitveil.common.wire.limits import (
    CHUNK_IDS,
    ID_BYTES,
    MAX_IDS,
    POINT_BYTES,
    PROTOCOL_VERSION,
    RUN_ID_PATTERN,
    TAG_BYTES,
)
from splitveil.common.wire.tensor_codec import (
    WIRE_DTYPES,
    TensorLimits,
    bytes_of_values,
    torch_dtype,
)
from splitveil.protos import split_learning_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor

HEADER_BYTES = 65_536
"""Bytes of a message that are left to everything beside a tensor's or the ids' own bytes."""


class Described(NamedTuple):
    model: ModelIdentity
    max_ids: int  # the most ids that it takes at a time


def most_ids(contract: Contract) -> int:
    """Return the most ids of a request: their activations fit into one message. Raises TooLarge."""
    space = contract.max_message_bytes - HEADER_BYTES
    row_bytes = contract.cut_dim * DTYPE_BYTES[contract.cut_dtype]
    if row_bytes > space:
        raise TooLarge(
            f"one activation has {row_bytes:,} bytes, and joint inference sends no activation in "
            f"parts: expected a contract.cut_shape of at most {space:,} bytes"
        )
    return min(MAX_IDS, contract.max_rows, space // row_bytes)


def portions(ids: Sequence[str], most: int, contract: Contract) -> Iterator[slice]:
    """Divide ids, none longer than ``ID_BYTES``, into requests that fit into one message each."""
    space = contract.max_message_bytes - HEADER_BYTES
    # A character takes at most four bytes, and the frame around a text at most three.
    ends = np.cumsum(np.fromiter(map(len, ids), np.int64, len(ids)) * 4 + 3)
    start, taken = 0, 0
    while start < len(ids):
        by_size = int(np.searchsorted(ends, taken + space, side="right"))
        end = min(start + most, max(by_size, start + 1))
        yield slice(start, end)
        start, taken = end, int(ends[end - 1])


# ---- which model ----


def encode_describe(party: str, contract: Contract) -> pb.DescribeRequest:
    return pb.DescribeRequest(
        protocol_version=PROTOCOL_VERSION, party=party, contract=contract.canonical_json()
    )


def check_describe(request: pb.DescribeRequest, party: str, contract: Contract) -> None:
    """Check that a question is for this party, and comes from one with the same contract."""
    if request.protocol_version != PROTOCOL_VERSION:
        raise ContractMismatch(["protocol_version"])
    if differing := contract.fields_differing_from(request.contract):
        raise ContractMismatch(differing)
    if request.party != party:
        raise InvalidMessage("a call for another passive party than this one")


def encode_described(described: Described) -> pb.DescribeReply:
    return pb.DescribeReply(
        run_id=described.model.run_id,
        batch_number=described.model.batch_number,
        max_ids=described.max_ids,
    )


def decode_described(reply: pb.DescribeReply) -> Described:
    if not re.fullmatch(RUN_ID_PATTERN, reply.run_id):
        raise InvalidMessage("the description of a model does not name a run")
    if not reply.max_ids:
        raise InvalidMessage("the description of a model allows no ids")
    return Described(ModelIdentity(reply.run_id, reply.batch_number), reply.max_ids)


def model_digest(model: ModelIdentity) -> bytes:
    return hashlib.sha256(f"{model.run_id} {model.batch_number}".encode()).digest()


# ---- ids up, activations down ----


def encode_ids(number: int, ids: Sequence[str], digest: bytes) -> pb.EmbedRequest:
    return pb.EmbedRequest(number=number, model_digest=digest, ids=ids)


def decode_ids(request: pb.EmbedRequest, max_ids: int) -> list[str]:
    ids = list(request.ids)
    if not ids:
        raise InvalidMessage("ids: a request without any")
    if len(ids) > max_ids:
        raise TooLarge(f"ids: at most {max_ids}, got {len(ids)}")
    # A character has at least one byte: only long texts have to be encoded to be measured.
    if any(4 * len(text) > ID_BYTES and len(text.encode()) > ID_BYTES for text in ids):
        raise InvalidMessage(f"ids: one has more than {ID_BYTES} bytes")
    return ids


def encode_embedded(number: int, embedded: Embedded, limits: TensorLimits) -> pb.EmbedReply:
    values = embedded.values
    return pb.EmbedReply(
        number=number,
        known=np.packbits(embedded.known, bitorder="little").tobytes(),
        dtype=WIRE_DTYPES[limits.dtype],
        shape=values.shape,
        data=bytes_of_values(values, limits.dtype).tobytes() if len(values) else b"",
    )


def decode_embedded(
    reply: pb.EmbedReply, number: int, num_ids: int, limits: TensorLimits
) -> Embedded:
    """Decode the reply to the request with a number and so many ids, or raise InvalidMessage."""
    if reply.number != number:
        raise InvalidMessage(f"the reply is for request {reply.number}, expected {number}")
    packed = reply.known
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").astype(np.bool_)
    if len(packed) != -(-num_ids // 8) or bits[num_ids:].any():
        raise InvalidMessage(f"known: {len(packed)} bytes are not a bit for each of {num_ids} ids")
    known = bits[:num_ids]
    shape = (int(known.sum()), *limits.cut_shape)
    if reply.dtype != WIRE_DTYPES[limits.dtype]:
        raise InvalidMessage(f"dtype: expected {limits.dtype}, got {reply.dtype}")
    if tuple(reply.shape) != shape:
        raise InvalidMessage(f"shape: expected {shape}, got {tuple(reply.shape)}")
    expected = math.prod(shape) * DTYPE_BYTES[limits.dtype]
    if len(reply.data) != expected:
        raise InvalidMessage(f"length: expected {expected} bytes, got {len(reply.data)}")
    return Embedded(known, _decode_values(reply.data, shape, limits))


def _decode_values(
    data: bytes, shape: tuple[int, ...], limits: TensorLimits, name: str = "values"
) -> "Tensor":
    import torch  # noqa: PLC0415 - the party that serves decodes none

    if not data:
        return torch.zeros(shape, dtype=torch_dtype(limits.dtype))
    # The copy makes the tensor writable and independent of the message's memory.
    flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(torch_dtype(limits.dtype))
    values = flat.view(shape)
    if not bool(torch.isfinite(values).all()):
        raise InvalidMessage(f"{name}: expected finite numbers, got NaN or infinity")
    return values


_TAG = b"splitveil table tag 1"
_KEY = b"splitveil table key 1"
_NONCE = bytes(12)
_SEAL_BYTES = 16


class Secret(NamedTuple):
    tag: bytes
    key: bytes


def secrets_of(points: bytes) -> Iterator[Secret]:
    for start in range(0, len(points), POINT_BYTES):
        point = points[start : start + POINT_BYTES]
        tag = hashlib.sha256(_TAG + point).digest()[:TAG_BYTES]
        yield Secret(tag, hashlib.sha256(_KEY + point).digest())


def rows_of_a_reply(contract: Contract) -> int:
    space = contract.max_message_bytes - HEADER_BYTES
    row_bytes = contract.cut_dim * DTYPE_BYTES[contract.cut_dtype] + _SEAL_BYTES + TAG_BYTES
    if row_bytes > space:
        raise TooLarge(f"one activation has {row_bytes:,} bytes, and a message {space:,}")
    return min(CHUNK_IDS, space // row_bytes)


def seal(secrets: Sequence[Secret], values: Any, limits: TensorLimits) -> pb.TableReply:
    """Encode some rows' activations, (rows, *cut_shape), a tensor or an array."""
    rows = bytes_of_values(values, limits.dtype).reshape(len(secrets), -1)
    sealed = [
        ChaCha20Poly1305(secret.key).encrypt(_NONCE, row.tobytes(), None)
        for secret, row in zip(secrets, rows, strict=True)
    ]
    tags = b"".join(secret.tag for secret in secrets)
    return pb.TableReply(tags=tags, sealed=b"".join(sealed))


def decode_points(points: bytes, expected: int | None = None) -> bytes:
    if len(points) % POINT_BYTES or not points:
        raise InvalidMessage(f"points: {len(points)} bytes are no group elements")
    if expected is not None and len(points) != expected * POINT_BYTES:
        raise InvalidMessage(f"points: expected {expected}, got {len(points) // POINT_BYTES}")
    return points


def sealed_rows(reply: pb.TableReply, limits: TensorLimits) -> Iterator[tuple[bytes, bytes]]:
    size = limits.row_bytes + _SEAL_BYTES
    tags, sealed = reply.tags, reply.sealed  # each access copies
    num_rows, rest = divmod(len(tags), TAG_BYTES)
    if rest or len(sealed) != num_rows * size:
        raise InvalidMessage(f"rows: {len(sealed)} bytes do not belong to {num_rows} tags")
    for row in range(num_rows):
        tag = tags[row * TAG_BYTES : (row + 1) * TAG_BYTES]
        yield tag, sealed[row * size : (row + 1) * size]


def open_row(sealed: bytes, key: bytes) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, None)
    except InvalidTag:
        raise InvalidMessage("rows: one was sealed with another key than that of its tag") from None


def decode_rows(rows: Sequence[bytes], limits: TensorLimits) -> "Tensor":
    return _decode_values(b"".join(rows), (len(rows), *limits.cut_shape), limits, "rows")
