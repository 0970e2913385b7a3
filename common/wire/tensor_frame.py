"""One message of a tensor's stream: its bytes, its small fields and its payload.

A frame is a legal protobuf message. It is put together and taken apart here rather than by the
generated class only because that class copies the payload two more times on each side. gRPC is
given ``Frame`` as its parser, which parses nothing: the first to ask for a frame's parts has it
split, and everybody else gets the same parts.
"""

from google.protobuf.message import DecodeError

from splitveil.common.errors import InvalidMessage, ProtocolError
from splitveil.common.wire.limits import TENSOR_HEADER_BYTES, check_fields
from splitveil.protos import split_learning_pb2 as pb

_DATA_TAG = b"\x7a"  # field 15, wire type 2 (length-delimited)
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5


class Frame:
    """A serialised ``TensorFrame``."""

    __slots__ = ("_parts", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._parts: tuple[pb.TensorFrame, memoryview] | None = None

    @classmethod
    def of(cls, fields: pb.TensorFrame, payload: memoryview) -> "Frame":
        """Serialise a frame.

        Args:
            fields: all fields but ``data``.
            payload: the field ``data``; the frame has a copy of it.
        """
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
        """Return the epoch and step of which the frame says that it is, None for junk."""
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
    """Find the payload field: (offset of its tag, offset of its bytes), end of its bytes.

    The search stops where the field must have begun, so it never scans a megabyte of small fields.
    """
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
