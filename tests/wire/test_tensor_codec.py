"""Tensors on the wire: valid protobuf in both directions, and invalid messages are refused."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.common.errors import InvalidMessage, ProtocolError, TooLarge
from splitveil.common.run.messages import Activation, BatchId
from splitveil.common.wire.tensor_codec import (
    Frame,
    TensorAssembler,
    TensorLimits,
    encode_activation,
)
from splitveil.protos import split_learning_pb2 as pb

HEADER = BatchId("run", 2, 7, "train", b"digest-of-rows--")


def limits(**changes: object) -> TensorLimits:
    values: dict[str, object] = {
        "cut_shape": (3, 2),
        "dtype": "float32",
        "max_rows": 64,
        "unchunked_bytes": 1024,
        "chunk_bytes": 256,
    }
    return TensorLimits(**(values | changes))  # type: ignore[arg-type]


def values(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 3, 2, generator=torch.Generator().manual_seed(rows))


def encoded(sent: torch.Tensor, **changes: object) -> list[bytes]:
    frames = encode_activation(Activation(HEADER, sent), limits(**changes))
    return [part.data for part in frames]


def frame(**changes: object) -> bytes:
    fields = pb.TensorFrame.FromString(encoded(values())[0])
    for name, value in changes.items():
        if name == "shape":
            del fields.shape[:]
            fields.shape.extend(value)  # type: ignore[arg-type]
        else:
            setattr(fields, name, value)
    return fields.SerializeToString()


def assemble(frames: list[bytes], **changes: object) -> Activation | None:
    assembler = TensorAssembler(limits(**changes), Activation)
    result = None
    for part in frames:
        result = assembler.add(Frame(part))
    return result


@pytest.mark.parametrize("rows", [1, 5, 42, 43, 64])  # 24 bytes a row: 43 rows need chunks
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_tensor_comes_back_bit_for_bit(rows: int, dtype: str) -> None:
    sent = values(rows).to(getattr(torch, dtype))
    frames = encoded(sent, dtype=dtype)
    received = assemble(frames, dtype=dtype)
    assert received is not None
    assert received.batch == HEADER
    assert torch.equal(received.values, sent)
    received.values.add_(1)  # it can be written to


@pytest.mark.parametrize("rows", [1, 43])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_array_travels_as_the_same_bytes_as_a_tensor(rows: int, dtype: str) -> None:
    array: Any = values(rows).numpy()
    frames = encoded(values(rows), dtype=dtype)
    assert encoded(array, dtype=dtype) == frames
    assembler = TensorAssembler.of_answers(limits(dtype=dtype), as_arrays=True)
    received = [assembler.add(Frame(part)) for part in frames][-1]
    assert received is not None
    assert isinstance(received.values, np.ndarray)
    assert np.array_equal(received.values, values(rows).to(getattr(torch, dtype)).float())


def test_the_frames_are_what_the_generated_class_reads_and_writes() -> None:
    message = Activation(HEADER, values())
    (ours,) = encoded(message.values)
    generated = pb.TensorFrame.FromString(ours)
    assert generated.data == values().numpy().tobytes()
    assert list(generated.shape) == [5, 3, 2]
    again = assemble([generated.SerializeToString()])
    assert again is not None
    assert torch.equal(again.values, message.values)


def test_a_peer_that_writes_the_payload_first_is_understood() -> None:
    fields = pb.TensorFrame.FromString(frame())
    payload = pb.TensorFrame(data=fields.data).SerializeToString()
    fields.ClearField("data")
    received = assemble([payload + fields.SerializeToString()])
    assert received is not None
    assert torch.equal(received.values, values())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"dtype": pb.DTYPE_FLOAT16}, InvalidMessage),
        ({"dtype": 0}, InvalidMessage),
        ({"rows": 0}, InvalidMessage),
        ({"rows": 4}, InvalidMessage),
        ({"rows": 65}, TooLarge),
        ({"rows": 2**32 - 1}, TooLarge),
        ({"shape": [5, 6]}, InvalidMessage),
        ({"shape": [5, 2, 3]}, InvalidMessage),
        ({"shape": []}, InvalidMessage),
        ({"total_bytes": 119}, InvalidMessage),
        ({"total_bytes": 2**63}, InvalidMessage),
        ({"offset": 4}, InvalidMessage),
        ({"data": b"\0" * 119}, InvalidMessage),
        ({"data": b"\0" * 121}, InvalidMessage),
        ({"data": b""}, InvalidMessage),
    ],
)
@pytest.mark.parametrize("as_arrays", [False, True])
def test_a_wrong_frame_is_refused_and_the_next_right_one_is_not(
    changes: dict[str, object], error: type[ProtocolError], as_arrays: bool
) -> None:
    assembler = TensorAssembler(limits(), Activation, as_arrays=as_arrays)
    with pytest.raises(error):
        assembler.add(Frame(frame(**changes)))
    after = assembler.add(Frame(frame()))
    assert after is not None
    assert torch.equal(torch.as_tensor(after.values), values())


@pytest.mark.parametrize("as_arrays", [False, True])
@pytest.mark.parametrize("wrong", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_number_that_is_not_finite_is_refused_and_the_next_tensor_is_not(
    dtype: str, wrong: str, as_arrays: bool
) -> None:
    assembler = TensorAssembler(limits(dtype=dtype), Activation, as_arrays=as_arrays)
    sent = values()
    sent[2, 1, 1] = float(wrong)
    with pytest.raises(InvalidMessage, match="values: expected finite numbers"):
        assembler.add(Frame(*encoded(sent, dtype=dtype)))
    # The sum of these may overflow, but each is finite.
    large = torch.full_like(sent, torch.finfo(getattr(torch, dtype)).max)
    after = assembler.add(Frame(*encoded(large, dtype=dtype)))
    assert after is not None
    assert torch.equal(torch.as_tensor(after.values), large)


def test_chunks_must_come_in_order_and_belong_together() -> None:
    frames = encoded(values(64))
    other = pb.TensorFrame.FromString(frames[1])
    other.step += 1
    for wrong in ([frames[0], frames[2]], [frames[0], frames[0]], [frames[1]]):
        with pytest.raises(InvalidMessage):
            assemble(wrong)
    with pytest.raises(InvalidMessage, match="another tensor"):
        assemble([frames[0], other.SerializeToString()])


def test_a_stream_of_first_chunks_holds_one_tensor_at_most() -> None:
    assembler = TensorAssembler(limits(), Activation)
    for _ in range(100):
        assert assembler.add(Frame(encoded(values(64))[0])) is None
        with pytest.raises(InvalidMessage):
            assembler.add(Frame(encoded(values(64))[0]))
    for part in encoded(values(64))[:-1]:
        assert assembler.add(Frame(part)) is None
    whole = assembler.add(Frame(encoded(values(64))[-1]))
    assert whole is not None
    assert torch.equal(whole.values, values(64))


@settings(max_examples=500)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_are_refused_not_believed(data: bytes, as_arrays: bool) -> None:
    with pytest.raises(ProtocolError):
        TensorAssembler(limits(), Activation, as_arrays=as_arrays).add(Frame(data))


@pytest.mark.parametrize("rows", [5, 64])
def test_a_frame_says_where_it_belongs_before_and_after_it_crossed(rows: int) -> None:
    sent = next(encode_activation(Activation(HEADER, values(rows)), limits()))
    received = Frame(sent.data)
    assert sent.place() == received.place() == (HEADER.epoch, HEADER.step)
    (fields, payload), (fields_there, payload_there) = sent.parts(), received.parts()
    assert (fields, bytes(payload)) == (fields_there, bytes(payload_there))
    assert Frame(sent.data[:-1]).place() == (None, None)


@pytest.mark.parametrize(
    ("width", "is_answer", "is_taken"),
    [
        (0, False, True),
        (1, False, False),
        (6, False, False),
        (0, True, False),
        (1, True, True),
        (7, True, True),
        (8, True, False),
    ],
)
def test_noisy_labels_are_asked_for_with_nothing_and_come_as_a_few_values(
    width: int, is_answer: bool, is_taken: bool
) -> None:
    """A row's label has at most a value more than its activation, which has six here."""
    sent = Activation(HEADER._replace(split="labels"), torch.ones(5, width))
    (part,) = encode_activation(sent, limits())
    of_answers = TensorAssembler.of_answers(limits())
    assembler = of_answers if is_answer else TensorAssembler(limits(), Activation)
    if is_taken:
        received = assembler.add(Frame(part.data))
        assert received is not None
        assert torch.equal(received.values, sent.values)
    else:
        with pytest.raises(InvalidMessage, match="shape"):
            assembler.add(Frame(part.data))


@pytest.mark.parametrize("split", ["transfer", "sums"])
def test_bytes_of_a_transfer_come_as_they_were_where_the_contract_has_noisy_sums(
    split: Literal["transfer", "sums"],
) -> None:
    sent = Activation(HEADER._replace(split=split), torch.arange(0, 251).repeat(9).byte())
    frames = [part.data for part in encode_activation(sent, limits())]
    assert len(frames) == 9
    received = assemble(frames, most_transferred=2259)
    assert received is not None
    assert torch.equal(received.values, sent.values)
    for most in (0, 2258):
        with pytest.raises(TooLarge, match=f"at most {most}"):
            assemble(frames, most_transferred=most)
    with pytest.raises(InvalidMessage, match="dtype: expected DTYPE_FLOAT32"):
        assemble([frame(dtype=pb.DTYPE_UINT8)], most_transferred=2259)
    as_numbers = frame(split=pb.Split.Value(f"SPLIT_{split.upper()}"))
    with pytest.raises(InvalidMessage, match="dtype: expected DTYPE_UINT8"):
        assemble([as_numbers], most_transferred=2259)
