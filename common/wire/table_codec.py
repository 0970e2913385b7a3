"""Seals and opens the rows of a whole table; the only module that checks and decodes their bytes.

A row with id x is sealed under the point k H(x), where H is the map of the alignment from ids to
the group and k the passive party's scalar:

    tag = SHA-256("splitveil table tag 1" || point), the first 16 bytes
    key = SHA-256("splitveil table key 1" || point)
    sealed = ChaCha20-Poly1305 with this key, nonce 0, of the activation's bytes

A key belongs to one row of one model, so its nonce never meets two texts. Without the point, which
takes the passive party's scalar, neither tag nor key of an id can be guessed, however few ids there
are to guess from (Jarecki, Kiayias and Krawczyk 2014: an oblivious pseudo-random function).
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from torch import Tensor

from splitveil.common.errors import InvalidMessage, TooLarge
from splitveil.common.run.contract import DTYPE_BYTES, Contract
from splitveil.common.wire.inference_codec import HEADER_BYTES
from splitveil.common.wire.limits import CHUNK_IDS, POINT_BYTES, TAG_BYTES
from splitveil.common.wire.tensor_codec import TORCH_DTYPES, TensorLimits
from splitveil.protos import split_learning_pb2 as pb

_TAG = b"splitveil table tag 1"
_KEY = b"splitveil table key 1"
_NONCE = bytes(12)
_SEAL_BYTES = 16


class Secret(NamedTuple):
    """What seals one row."""

    tag: bytes
    key: bytes


def secrets_of(points: bytes) -> Iterator[Secret]:
    """Yield the secret that each of some points k H(id) yields."""
    for start in range(0, len(points), POINT_BYTES):
        point = points[start : start + POINT_BYTES]
        tag = hashlib.sha256(_TAG + point).digest()[:TAG_BYTES]
        yield Secret(tag, hashlib.sha256(_KEY + point).digest())


def rows_of_a_reply(contract: Contract) -> int:
    room = contract.max_message_bytes - HEADER_BYTES
    row_bytes = contract.cut_dim * DTYPE_BYTES[contract.cut_dtype] + _SEAL_BYTES + TAG_BYTES
    if row_bytes > room:
        raise TooLarge(f"one activation has {row_bytes:,} bytes, and a message {room:,}")
    return min(CHUNK_IDS, room // row_bytes)


def seal(secrets: Sequence[Secret], values: Tensor, limits: TensorLimits) -> pb.TableReply:
    """Encode some rows.

    Args:
        values: their activations, (rows, *cut_shape).
    """
    plain = values.detach().to("cpu", TORCH_DTYPES[limits.dtype]).contiguous()
    rows = plain.view(len(secrets), -1).view(torch.uint8).numpy()
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
    """Yield the tag and the sealed bytes of each row of a reply, or raise InvalidMessage."""
    size = limits.row_bytes + _SEAL_BYTES
    tags, sealed = reply.tags, reply.sealed  # each access copies
    num_rows, rest = divmod(len(tags), TAG_BYTES)
    if rest or len(sealed) != num_rows * size:
        raise InvalidMessage(f"rows: {len(sealed)} bytes do not belong to {num_rows} tags")
    for row in range(num_rows):
        tag = tags[row * TAG_BYTES : (row + 1) * TAG_BYTES]
        yield tag, sealed[row * size : (row + 1) * size]


def open_row(sealed: bytes, key: bytes) -> bytes:
    """Return the bytes of a row's activation, or raise InvalidMessage."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, None)
    except InvalidTag:
        raise InvalidMessage("rows: one was sealed with another key than that of its tag") from None


def decode_rows(rows: Sequence[bytes], limits: TensorLimits) -> Tensor:
    """Return the activations of opened rows, (rows, *cut_shape), or raise InvalidMessage."""
    shape, dtype = (len(rows), *limits.cut_shape), TORCH_DTYPES[limits.dtype]
    if not rows:
        return torch.zeros(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    values = flat.view(dtype).view(shape)
    if not bool(torch.isfinite(values).all()):
        raise InvalidMessage("rows: expected finite numbers, got NaN or infinity")
    return values
