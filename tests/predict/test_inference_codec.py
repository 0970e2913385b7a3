"""What a peer may send in joint inference, and what is refused before it is believed."""

from contextlib import suppress
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from splitveil.common.errors import ContractMismatch, InvalidMessage, ProtocolError, TooLarge
from splitveil.common.run.contract import Contract
from splitveil.common.run.messages import Embedded, ModelIdentity
from splitveil.common.wire.inference_codec import (
    Described,
    check_describe,
    decode_described,
    decode_embedded,
    decode_ids,
    encode_describe,
    encode_described,
    encode_embedded,
    encode_ids,
    model_digest,
    most_ids,
    portions,
)
from splitveil.common.wire.limits import ID_BYTES
from splitveil.common.wire.tensor_codec import TensorLimits
from splitveil.protos import split_learning_pb2 as pb

CONTRACT = Contract(run_name="small", cut_shape=(2, 3), batch_size=8, epochs=1)
LIMITS = TensorLimits.of(CONTRACT)
KNOWN = np.array([True, False, True, True, False, False, False, False, True])
VALUES = torch.arange(24.0).view(4, 2, 3)


def reply() -> pb.EmbedReply:
    return encode_embedded(7, Embedded(KNOWN, VALUES), LIMITS)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("known", [KNOWN, np.zeros(3, np.bool_)])
def test_a_reply_comes_through_as_it_was_sent(dtype: str, known: NDArray[np.bool_]) -> None:
    limits = TensorLimits.of(CONTRACT.model_copy(update={"cut_dtype": dtype}))
    values = VALUES[: known.sum()]
    sent = encode_embedded(7, Embedded(known, values), limits).SerializeToString()
    received = decode_embedded(pb.EmbedReply.FromString(sent), 7, len(known), limits)
    np.testing.assert_array_equal(received.known, known)
    assert received.values.dtype == getattr(torch, dtype)
    assert torch.equal(received.values.float(), values)


def spoiled(**changes: object) -> pb.EmbedReply:
    message = reply()
    for name, value in changes.items():
        message.ClearField(name)
        if name == "shape":
            message.shape.extend(value)  # type: ignore[arg-type]
        else:
            setattr(message, name, value)
    return message


NAN = VALUES.clone()
NAN[3, 1, 2] = torch.nan


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (spoiled(number=8), "for request 8"),
        (spoiled(known=b"\xff"), "not a bit for each"),
        (spoiled(known=reply().known + b"\0"), "not a bit for each"),
        (spoiled(known=b"\x0d\xff"), "not a bit for each"),
        (spoiled(known=b"\x0d\x00"), "shape"),
        (spoiled(shape=[4, 3, 2]), "shape"),
        (spoiled(shape=[4, 6]), "shape"),
        (spoiled(dtype=pb.DTYPE_FLOAT16), "dtype"),
        (spoiled(dtype=pb.DTYPE_UNSPECIFIED), "dtype"),
        (spoiled(data=reply().data[:-1]), "length"),
        (spoiled(data=b""), "length"),
        (spoiled(data=NAN.numpy().tobytes()), "finite"),
    ],
)
def test_a_reply_that_is_not_to_this_request_is_refused(message: pb.EmbedReply, why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        decode_embedded(message, 7, len(KNOWN), LIMITS)


@given(st.binary(max_size=300), st.integers(1, 20))
def test_no_bytes_make_the_decoder_fail_otherwise_than_by_a_refusal(
    data: bytes, num_ids: int
) -> None:
    try:
        message = pb.EmbedReply.FromString(data)
    except Exception:
        return
    with suppress(ProtocolError):
        decode_embedded(message, 0, num_ids, LIMITS)


def test_requests_have_bounds() -> None:
    assert decode_ids(encode_ids(0, ["a", "ä" * (ID_BYTES // 2)], b""), 2)[0] == "a"
    with pytest.raises(TooLarge, match="at most 2"):
        decode_ids(encode_ids(0, ["a", "b", "c"], b""), 2)
    with pytest.raises(InvalidMessage, match="without any"):
        decode_ids(encode_ids(0, [], b""), 2)
    with pytest.raises(InvalidMessage, match="more than"):
        decode_ids(encode_ids(0, ["ä" * (ID_BYTES // 2 + 1)], b""), 2)


def test_descriptions_name_a_model_and_are_compared() -> None:
    described = Described(ModelIdentity("abc", 12), 99)
    assert decode_described(encode_described(described)) == described
    for wrong in (pb.DescribeReply(run_id="a b", max_ids=1), pb.DescribeReply(run_id="a")):
        with pytest.raises(InvalidMessage):
            decode_described(wrong)
    digests = {model_digest(ModelIdentity(run, n)) for run in ("a", "b") for n in (1, 2)}
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {32}


def test_a_question_about_the_model_is_for_one_party_of_one_contract() -> None:
    check_describe(encode_describe("passive", CONTRACT), "passive", CONTRACT)
    with pytest.raises(InvalidMessage, match="another passive party"):
        check_describe(encode_describe("other", CONTRACT), "passive", CONTRACT)
    other = CONTRACT.model_copy(update={"epochs": 2})
    with pytest.raises(ContractMismatch, match="epochs"):
        check_describe(encode_describe("passive", other), "passive", CONTRACT)
    newer = encode_describe("passive", CONTRACT)
    newer.protocol_version = 9
    with pytest.raises(ContractMismatch, match="protocol_version"):
        check_describe(newer, "passive", CONTRACT)


def test_as_many_ids_are_asked_for_as_answers_fit_into_a_message() -> None:
    assert most_ids(CONTRACT) == CONTRACT.evaluation_batch_size
    wide = CONTRACT.model_copy(update={"cut_shape": (2**16,)})
    assert most_ids(wide) * 2**18 <= wide.max_message_bytes < (most_ids(wide) + 1) * 2**18
    with pytest.raises(TooLarge, match=r"contract\.cut_shape of at most 4,194,304 bytes"):
        most_ids(CONTRACT.model_copy(update={"cut_shape": (2**22,)}))


class Narrow(Contract):
    chunk_bytes: ClassVar = 4096


@given(st.lists(st.integers(1, ID_BYTES // 4), min_size=1, max_size=200), st.integers(1, 50))
def test_portions_cover_all_ids_in_order_and_fit(lengths: list[int], most: int) -> None:
    few = {"batch_size": 1, "evaluation_batch_size": 1}
    contract = Narrow(**(CONTRACT.model_dump() | few))
    ids = ["x" * length for length in lengths]
    cuts = list(portions(ids, most, contract))
    assert [text for cut in cuts for text in ids[cut]] == ids
    for cut in cuts:
        assert 1 <= len(ids[cut]) <= most
        assert encode_ids(0, ids[cut], bytes(32)).ByteSize() <= contract.max_message_bytes
