"""Encodes activations and answers; the only module that checks and decodes the bytes of a tensor.

``encode_activation`` encodes activations, and ``encode_answer`` encodes answers, whose values can
only be defended gradients: mypy refuses to encode a raw one.

A tensor travels as one ``TensorFrame``, or, above ``unchunked_bytes``, as several with rising
offsets. A frame is a legal protobuf message. It is put together and taken apart here rather than by
the generated class only because that class copies the payload two more times on each side.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from splitveil.common.errors import InvalidMessage, ProtocolError, TooLarge
from splitveil.common.run.contract import DTYPE_BYTES, MAX_TRANSFER_BYTES, Contract, CutDtype
from splitveil.common.run.messages import Activation, Answer, BatchId, DefendedGradient
from splitveil.common.wire.limits import TENSOR_HEADER_BYTES, check_fields
from splitveil.common.wire.small_messages import SPLIT_TO_WIRE, split_from_wire
from splitveil.protos import split_learning_pb2 as pb

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_DATA_TAG = b"\x7a"  # field 15, wire type 2 (length-delimited)
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5


class Frame:
    __slots__ = ("_parts", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._parts: tuple[pb.TensorFrame, memoryview] | None = None

    @classmethod
    def of(cls, fields: pb.TensorFrame, payload: memoryview) -> "Frame":
        start = fields.SerializeToString() + _DATA_TAG + _varint(len(payload))
        frame = cls(b"".join((start, payload)))
        frame._parts = fields, memoryview(frame.data)[len(start) :]
        return frame

    def parts(self) -> tuple[pb.TensorFrame, memoryview]:
        """Return the small fields, and the payload without a copy."""
        if self._parts is None:
            self._parts = _split(self.data)
        return self._parts

    def place(self) -> tuple[int | None, int | None]:
        """Return the epoch and step that the frame names, None for junk."""
        try:
            fields, _ = self.parts()
        except ProtocolError:
            return None, None
        return fields.epoch, fields.step

    def serialised(self) -> bytes:
        """Return the bytes that cross the wire, as gRPC asks for them."""
        return self.data


def _split(frame: bytes) -> tuple[pb.TensorFrame, memoryview]:
    try:
        start, end = _find_data(frame)
        if end == len(frame):
            fields = pb.TensorFrame.FromString(frame[: start[0]])
            check_fields(fields)
            return fields, memoryview(frame)[start[1] :]
        if len(frame) - max(end - start[1], 0) > TENSOR_HEADER_BYTES:
            raise InvalidMessage(f"more than {TENSOR_HEADER_BYTES} bytes beside a tensor's payload")
        fields = pb.TensorFrame.FromString(frame)
    except (DecodeError, IndexError, ValueError) as error:
        raise InvalidMessage("not a TensorFrame message") from error
    check_fields(fields)
    data = memoryview(fields.data)
    fields.ClearField("data")
    return fields, data


def _find_data(frame: bytes) -> tuple[tuple[int, int], int]:
    """Find the payload, (offset of its tag, of its bytes) and end, without a scan of all bytes."""
    at = 0
    while at < min(len(frame), TENSOR_HEADER_BYTES):
        tag_at = at
        tag, at = _read_varint(frame, at)
        if tag == _DATA_TAG[0]:
            length, at = _read_varint(frame, at)
            return (tag_at, at), at + length
        kind = tag & 7
        if kind == _VARINT:
            _, at = _read_varint(frame, at)
        elif kind == _LENGTH_DELIMITED:
            length, at = _read_varint(frame, at)
            at += length
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("wire type")
    return (at, at), -1


def _read_varint(frame: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = frame[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


WIRE_DTYPES: dict[CutDtype, pb.DType] = {
    "float32": pb.DTYPE_FLOAT32,
    "float16": pb.DTYPE_FLOAT16,
    "bfloat16": pb.DTYPE_BFLOAT16,
}
_BYTES = (pb.SPLIT_TRANSFER, pb.SPLIT_SUMS)  # the splits whose tensors are bytes, (bytes,)

MessageT = TypeVar("MessageT")


@dataclass(frozen=True)
class TensorLimits:
    cut_shape: tuple[int, ...]
    dtype: CutDtype
    max_rows: int
    unchunked_bytes: int
    chunk_bytes: int
    most_transferred: int = 0  # bytes of a message of an oblivious transfer

    @property
    def row_bytes(self) -> int:
        return math.prod(self.cut_shape) * DTYPE_BYTES[self.dtype]

    @classmethod
    def of(cls, contract: Contract) -> "TensorLimits":
        return cls(
            contract.cut_shape,
            contract.cut_dtype,
            contract.max_rows,
            contract.unchunked_bytes,
            contract.chunk_bytes,
            MAX_TRANSFER_BYTES if contract.releases_sums else 0,
        )


def torch_dtype(dtype: CutDtype) -> "torch.dtype":
    import torch  # noqa: PLC0415 - a party without a network needs none

    found: torch.dtype = getattr(torch, dtype)
    return found


def encode_activation(activation: Activation, limits: TensorLimits) -> Iterator[Frame]:
    """Encode an activation, (rows, *cut_shape): an array, or a tensor on any device."""
    return _encode(activation.batch, activation.values, limits)


def encode_answer(answer: Answer, limits: TensorLimits) -> Iterator[Frame]:
    """Encode a defended gradient, as ``encode_activation`` does."""
    return _encode(answer.batch, answer.values, limits)


def bytes_of_values(values: "Tensor | NDArray[Any]", dtype: CutDtype) -> NDArray[np.uint8]:
    """Return numbers as they travel, (bytes,)."""
    if isinstance(values, np.ndarray) and dtype != "bfloat16":  # which NumPy does not have
        return np.ascontiguousarray(values, dtype).reshape(-1).view(np.uint8)
    import torch  # noqa: PLC0415 - see ``torch_dtype``

    plain = torch.as_tensor(values).detach().to("cpu", torch_dtype(dtype))
    return plain.reshape(-1).view(torch.uint8).numpy()


def _encode(
    batch: BatchId, values: "Tensor | NDArray[Any]", limits: TensorLimits
) -> Iterator[Frame]:
    is_bytes = SPLIT_TO_WIRE[batch.split] in _BYTES
    flat = np.asarray(values).reshape(-1) if is_bytes else bytes_of_values(values, limits.dtype)
    payload = flat.data
    size = len(payload) if len(payload) <= limits.unchunked_bytes else limits.chunk_bytes
    for offset in range(0, max(len(payload), 1), max(size, 1)):
        fields = pb.TensorFrame(
            run_id=batch.run_id,
            epoch=batch.epoch,
            step=batch.step,
            rows=values.shape[0],
            rows_digest=batch.rows_digest,
            split=SPLIT_TO_WIRE[batch.split],
            dtype=pb.DTYPE_UINT8 if is_bytes else WIRE_DTYPES[limits.dtype],
            shape=values.shape,
            total_bytes=len(payload),
            offset=offset,
        )
        chunk = payload[offset : offset + size]
        yield Frame.of(fields, chunk)


class TensorAssembler(Generic[MessageT]):
    """Reads the frames of one stream and returns whole, checked tensors.

    Regardless of what the peer sends, it holds at most one tensor of the size that the contract
    allows.
    """

    def __init__(
        self,
        limits: TensorLimits,
        build: Callable[[BatchId, Any], MessageT],
        *,
        most_label_values: int = 0,
        as_arrays: bool = False,
    ) -> None:
        """Take a function that builds messages of tensors, or of arrays."""
        self._limits = limits
        self._as_arrays = as_arrays
        self._most_label_values = most_label_values
        self._build = build
        self._begun: pb.TensorFrame | None = None
        self._buffer = bytearray()
        self._received = 0

    @staticmethod
    def of_answers(limits: TensorLimits, *, as_arrays: bool = False) -> "TensorAssembler[Answer]":
        # Of noisy labels, a bottom model has a score for each class but one.
        most = math.prod(limits.cut_shape) + 1

        def received(batch: BatchId, values: Any) -> Answer:
            return Answer(batch, DefendedGradient(values))  # it has left the active party already

        return TensorAssembler(limits, received, most_label_values=most, as_arrays=as_arrays)

    def add(self, frame: Frame) -> MessageT | None:
        """Take a frame; return the message if it is complete, or raise ProtocolError."""
        fields, data = frame.parts()
        begun, self._begun = self._begun, None  # an error below drops the unfinished tensor
        if begun is None:
            self._check_first(fields)
            if len(data) == fields.total_bytes:
                return self._finish(fields, data)
            self._buffer, self._received = bytearray(fields.total_bytes), 0
            begun = fields
        self._check_chunk(begun, fields, len(data))
        self._buffer[self._received : self._received + len(data)] = data
        self._received += len(data)
        if self._received == begun.total_bytes:
            return self._finish(begun, memoryview(self._buffer))
        self._begun = begun
        return None

    def _check_first(self, fields: pb.TensorFrame) -> None:
        limits = self._limits
        shape, most_rows = (fields.rows, *limits.cut_shape), limits.max_rows
        dtype, value_bytes = WIRE_DTYPES[limits.dtype], DTYPE_BYTES[limits.dtype]
        if fields.split == pb.SPLIT_LABELS:  # a question about labels is empty
            wanted = fields.shape[-1] if len(fields.shape) == 2 else 1
            shape = (fields.rows, min(max(wanted, 1), self._most_label_values))
        elif fields.split in _BYTES:
            shape, most_rows = (fields.rows,), limits.most_transferred
            dtype, value_bytes = pb.DTYPE_UINT8, 1
        if fields.dtype != dtype:
            raise InvalidMessage(f"dtype: expected {pb.DType.Name(dtype)}, got {fields.dtype}")
        if fields.rows > most_rows:
            raise TooLarge(f"rows: at most {most_rows}, got {fields.rows}")
        if fields.rows == 0 or tuple(fields.shape) != shape:
            raise InvalidMessage(f"shape: expected {shape}, got {tuple(fields.shape)}")
        expected = math.prod(shape) * value_bytes
        if fields.total_bytes != expected:
            raise InvalidMessage(f"length: expected {expected} bytes, got {fields.total_bytes}")
        if fields.offset != 0:
            raise InvalidMessage(f"offset: a tensor starts at 0, got {fields.offset}")

    def _check_chunk(self, begun: pb.TensorFrame, fields: pb.TensorFrame, size: int) -> None:
        if _identity(fields) != _identity(begun):
            raise InvalidMessage("chunk: belongs to another tensor than the one begun")
        expected = min(self._limits.chunk_bytes, begun.total_bytes - self._received)
        if fields.offset != self._received or size != expected:
            raise InvalidMessage(
                f"chunk: expected {expected} bytes at {self._received}, "
                f"got {size} at {fields.offset}"
            )

    def _finish(self, fields: pb.TensorFrame, data: memoryview) -> MessageT:
        is_bytes, shape, dtype = fields.split in _BYTES, tuple(fields.shape), self._limits.dtype
        values: Any
        if self._as_arrays and (is_bytes or dtype != "bfloat16"):
            values = np.frombuffer(data, np.uint8 if is_bytes else dtype).reshape(shape).copy()
            is_finite = bool(np.isfinite(values).all())
        else:
            import torch  # noqa: PLC0415 - see ``torch_dtype``

            # The copy makes the tensor writable and independent of the message's memory, and gives
            # it torch's alignment: the bits of a product may depend on it.
            values = torch.empty(shape, dtype=torch.uint8 if is_bytes else torch_dtype(dtype))
            values.view(torch.uint8).numpy().reshape(-1)[:] = np.frombuffer(data, dtype=np.uint8)
            # One NaN or infinity makes the sum NaN or infinite, and a sum takes a fiftieth of the
            # time. The sum of large finite values may overflow, so only a finite one decides.
            total = values.sum(dtype=torch.float32).item()
            is_finite = math.isfinite(total) or bool(torch.isfinite(values).all())
            values = values.float().numpy() if self._as_arrays else values
        if not is_finite:
            raise InvalidMessage("values: expected finite numbers, got NaN or infinity")
        batch = BatchId(
            fields.run_id,
            fields.epoch,
            fields.step,
            split_from_wire(fields.split),
            fields.rows_digest,
        )
        return self._build(batch, values)


def _identity(fields: pb.TensorFrame) -> tuple[object, ...]:
    return (fields.run_id, fields.epoch, fields.step, fields.split, fields.rows_digest)
