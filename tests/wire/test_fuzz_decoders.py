"""Decoders of any bytes accept what the rules allow, or name the broken rule."""

import json
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.common.alignment import ristretto
from splitveil.common.alignment.ecdh import EcdhEngine, EcdhExchange
from splitveil.common.alignment.ristretto import NotInGroupError
from splitveil.common.errors import (
    AlignmentError,
    ContractMismatch,
    PeerError,
    ProtocolError,
    SplitveilError,
)
from splitveil.common.run.contract import Contract
from splitveil.common.run.messages import Activation
from splitveil.common.wire.limits import Refused, believed, check_fields, reader
from splitveil.common.wire.status import error_from
from splitveil.common.wire.tensor_codec import Frame, TensorAssembler, TensorLimits
from splitveil.protos import split_learning_pb2 as pb
from tests.support.mutations import Mutator
from tests.support.runs import CONTRACT

OWN = Contract.model_validate(CONTRACT)
NAMES = st.sampled_from(sorted(CONTRACT)) | st.text(max_size=8)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
    | st.integers(10**300, 10**301),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=133)
@given(JSON)
def test_any_json_is_compared_field_by_field_and_its_own_words_never_come_back(value: Any) -> None:
    own_names = set(OWN.fields_differing_from("{}")) | {"ids", "(other fields)"}
    found = OWN.fields_differing_from(json.dumps(value))
    assert found
    assert set(found) <= own_names


@settings(max_examples=100)
@given(st.sampled_from(sorted(json.loads(OWN.canonical_json()))), JSON)
def test_one_changed_field_is_named(name: str, value: Any) -> None:
    values = json.loads(OWN.canonical_json())
    same = json.dumps(values[name], sort_keys=True) == json.dumps(value, sort_keys=True)
    values[name] = value
    found = OWN.fields_differing_from(json.dumps(values, sort_keys=True, separators=(",", ":")))
    assert bool(found) is not same
    assert all(field.partition(".")[0] in (name, "(other fields)") for field in found)


@pytest.mark.parametrize(
    "text",
    [
        "1" * 60_000,
        "[" * 60_000,
        '{"a":' * 10_000,
        '{"split":' * 900 + "{}" + "}" * 900,
        "1e999999999",
        '{"epochs":' + "9" * 4000 + "}",
        '{"epochs":true}',
        '"\\ud800"',
        '{"\\ud800":"\\udfff"}',
    ],
)
def test_numbers_and_nesting_beyond_measure_are_another_contract(text: str) -> None:
    assert OWN.fields_differing_from(text)


def test_equal_values_in_another_form_are_another_contract() -> None:
    one = Contract.model_validate({**CONTRACT, "epochs": 1})
    text = one.canonical_json()
    assert one.fields_differing_from(text) == []
    for other in (text + " ", text.replace('"epochs":1', '"epochs":true')):
        assert one.fields_differing_from(other) == ["(other fields)"]


@settings(max_examples=166)
@given(st.sampled_from(sorted(pb.DESCRIPTOR.message_types_by_name)), st.binary(max_size=400))
def test_random_bytes_are_a_bounded_message_or_refused(name: str, data: bytes) -> None:
    message = reader(getattr(pb, name), 300)(data)
    if isinstance(message, Refused):
        with pytest.raises(ProtocolError):
            believed(message)
    else:
        assert len(data) <= 300
        check_fields(message)


# Points of ristretto255: RFC 9496, section 4.3.1, with Python's integers.
P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
ROOT_OF_MINUS_1 = pow(2, (P - 1) // 4, P)


def is_encoding(data: bytes) -> bool:
    """Decode, and say whether it can be done and is not the identity."""
    s = int.from_bytes(data, "little")
    if s >= P or s % 2 or s == 0:
        return False
    u1, u2 = (1 - s * s) % P, (1 + s * s) % P
    v = (-(D * u1 * u1) - u2 * u2) % P
    was_square, inverse = _inverse_root(v * u2 * u2 % P)
    x = 2 * s * inverse * u2 % P
    x = P - x if x % 2 else x
    y = u1 * inverse * inverse * u2 % P * v % P
    return was_square and x * y % P % 2 == 0 and y != 0


def _inverse_root(square: int) -> tuple[bool, int]:
    root = pow(pow(square, -1, P), (P + 3) // 8, P) if square else 0
    for candidate in (root, root * ROOT_OF_MINUS_1 % P):
        if square and candidate * candidate * square % P == 1:
            return True, candidate
    return False, 0


def is_taken(data: bytes) -> bool:
    try:
        product = ristretto.load().multiply(data, (5).to_bytes(32, "little"))
    except NotInGroupError:
        return False
    return product != bytes(32)


def test_a_point_is_taken_exactly_where_the_rfc_decodes_it() -> None:
    """About one in four even numbers below p is an encoding; the identity is none."""
    taken = [is_taken((2 * n).to_bytes(32, "little")) for n in range(400)]
    assert taken == [is_encoding((2 * n).to_bytes(32, "little")) for n in range(400)]
    assert 60 < sum(taken) < 140
    assert not is_taken(bytes(32))
    # Some releases of libsodium overlook the highest bit.
    generator = bytes.fromhex("e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76")
    assert is_taken(generator)
    assert not is_taken(generator[:-1] + bytes([generator[-1] | 0x80]))


@pytest.fixture(scope="module")
def engine() -> EcdhEngine:
    return EcdhEngine(min_aligned=1, max_set_size=1000)


def session(engine: EcdhEngine, first: int) -> EcdhExchange:
    ids = [f"person-{n}" for n in range(first, first + 8)]
    return engine.start(ids, nonce=bytes([first]) * 32, run_id="run")


def frames_of(engine: EcdhEngine) -> tuple[EcdhExchange, list[bytes]]:
    """Let two parties meet; return one with nothing received, and what the other sends to it."""
    one, other = session(engine, 1), session(engine, 4)
    sent = [other.hello()]
    other.receive(one.hello())
    sent += list(other.own_frames())
    for frame in sent:
        for reply in one.receive(frame):
            other.receive(reply)
    return session(engine, 1), [frame.SerializeToString() for frame in sent]


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(0, 3))
def test_a_mutated_exchange_of_ids_ends_in_an_error_of_the_rules_or_in_a_result(
    engine: EcdhEngine, seed: int, at: int
) -> None:
    fresh, sent = frames_of(engine)
    mutator = Mutator({"Align": sent}, seed)
    sent[at % len(sent)] = mutator.mutate(sent[at % len(sent)])
    read = reader(pb.AlignFrame, 200_000)
    try:
        for data in sent:
            fresh.receive(believed(read(data)))
    except (ProtocolError, AlignmentError):
        pass
    assert len(fresh._tags.of_peer) <= 1000
    assert not fresh.is_complete


@settings(max_examples=133)
@given(
    st.builds(
        pb.TensorFrame,
        run_id=st.text(max_size=70),
        epoch=st.integers(0, 2**32 - 1),
        step=st.integers(0, 2**32 - 1),
        rows=st.integers(0, 4) | st.integers(0, 2**32 - 1),
        rows_digest=st.binary(max_size=20),
        split=st.integers(-5, 5),
        dtype=st.sampled_from([0, 1, 2, 9]),
        shape=st.just([2, 3]) | st.lists(st.integers(0, 2**32 - 1), max_size=8),
        total_bytes=st.just(24) | st.integers(0, 2**64 - 1),
        offset=st.just(0) | st.integers(0, 2**64 - 1),
        data=st.just(bytes(24)) | st.binary(min_size=24, max_size=24) | st.binary(max_size=50),
    ),
    st.booleans(),
)
def test_any_fields_make_a_right_tensor_or_none(frame: pb.TensorFrame, as_arrays: bool) -> None:
    limits = TensorLimits((3,), "float32", 4, 1024, 256)
    assembler = TensorAssembler(limits, Activation, as_arrays=as_arrays)
    try:
        message = assembler.add(Frame(frame.SerializeToString()))
    except ProtocolError:
        return
    if message is not None:
        assert message.values.shape == (frame.rows, 3)
        assert np.isfinite(message.values).all()
        assert len(message.batch.run_id) <= 64


WORDS = ("contract-mismatch", "invalid-message", "stopped", "internal", "nonsense", "")


@settings(max_examples=133)
@given(
    st.sampled_from(list(grpc.StatusCode)),
    st.none()
    | st.text(max_size=300)
    | st.builds("{}: {}".format, st.sampled_from(WORDS), st.text(max_size=3000)),
)
def test_any_status_is_an_error_whose_words_are_this_party_s(
    code: grpc.StatusCode, details: str | None
) -> None:
    error = error_from(code, details)
    assert isinstance(error, (PeerError, AlignmentError, ContractMismatch))
    assert isinstance(error, SplitveilError)
    assert str(error).isprintable()
    assert len(str(error)) < 2200


@pytest.mark.parametrize(
    ("fields", "shown"), [("\x1b[2Jepochs, x", ("x",)), ("\x1b]0;own\x07", ("(other fields)",))]
)
def test_escape_sequences_in_a_status_reach_no_terminal(fields: str, shown: tuple[str]) -> None:
    error = error_from(grpc.StatusCode.FAILED_PRECONDITION, f"contract-mismatch: {fields}")
    assert isinstance(error, ContractMismatch)
    assert error.fields == shown
