"""Every field that a peer may fill has a bound, and the check for missing bounds works."""

from contextlib import ExitStack
from typing import Any

import pytest
from google.protobuf.message import Message

from splitveil.active_party.grpc_server.service import StreamSlots
from splitveil.common.errors import InvalidMessage, OutOfStep, ProtocolError, TooLarge
from splitveil.common.wire import limits
from splitveil.common.wire import small_messages as enums
from splitveil.common.wire.limits import EXEMPT, FIELDS, Refused, believed, check_fields, reader
from splitveil.protos import split_learning_pb2 as pb

ALL_FIELDS = {
    f"{name}.{field.name}": field
    for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    for field in message.fields
}
# The largest number of the field's own type is allowed: nothing can be beyond.
WITHOUT_END = {"AlignHello.set_size"}


def test_every_field_of_every_message_is_bounded_or_says_why_not() -> None:
    known = {name for name in (*FIELDS, *EXEMPT) if not name.endswith("[]")}
    assert not FIELDS.keys() & EXEMPT.keys()
    bounded_by_type = {
        name
        for name, field in ALL_FIELDS.items()
        if field.message_type or field.enum_type or field.type == field.TYPE_BOOL
    }
    assert ALL_FIELDS.keys() - bounded_by_type == known
    assert all(bound.why for bound in FIELDS.values())
    assert all(EXEMPT.values())


def filled(name: str, size: int) -> Message:
    kind, _, attribute = name.partition(".")
    message: Message = getattr(pb, kind)()
    field = ALL_FIELDS[name]
    entry: Any = {field.TYPE_BYTES: b"x", field.TYPE_STRING: "x"}.get(field.type, 1)
    if field.is_repeated:
        getattr(message, attribute).extend([entry] * size)
    else:
        setattr(message, attribute, entry * size)
    return message


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - WITHOUT_END))
def test_what_a_bound_allows_comes_through_and_one_more_does_not(name: str) -> None:
    check_fields(filled(name, FIELDS[name].most))
    with pytest.raises(TooLarge, match=name):
        check_fields(filled(name, FIELDS[name].most + 1))


def test_a_field_inside_a_frame_and_a_number_without_a_name_are_looked_at_too() -> None:
    points = pb.MaskedPoints(points=bytes(limits.CHUNK_IDS * 32 + 1))
    with pytest.raises(TooLarge):
        check_fields(pb.AlignFrame(points=points))
    with pytest.raises(InvalidMessage):
        check_fields(pb.LeaveRequest.FromString(b"\x10\x63"))


def test_a_field_without_a_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FIELDS", {})
    with pytest.raises(InvalidMessage, match="without a bound"):
        check_fields(pb.LeaveRequest(run_id="x"))


@pytest.mark.parametrize(
    ("data", "error"),
    [(b"\xff", InvalidMessage), (b"\x0a\x02\xff\xfe", InvalidMessage), (bytes(1025), TooLarge)],
)
def test_what_cannot_be_read_is_kept_as_bytes_and_never_believed(
    data: bytes, error: type[ProtocolError]
) -> None:
    message = reader(pb.LeaveRequest, 1024)(data)
    assert isinstance(message, Refused)
    assert message == data
    with pytest.raises(error):
        believed(message)


class Call:
    def __init__(self, *, active: bool = True) -> None:
        self.active = active

    def is_active(self) -> bool:
        return self.active

    def cancel(self) -> None:
        self.active = False


def test_streams_without_an_answer_push_each_other_out_and_not_the_answered_one() -> None:
    places, honest, idle = StreamSlots(), Call(), [Call() for _ in range(1000)]
    with ExitStack() as stack:
        stack.enter_context(places.enter(honest))
        places.answered(honest)
        for call in idle:
            stack.enter_context(places.enter(call))
        assert honest.active
        assert [call.active for call in idle] == [False] * 999 + [True]
        stack.enter_context(places.enter(Call(active=False)))  # given up in the queue
        assert idle[-1].active


def test_a_stream_that_is_answered_takes_the_place_of_the_one_before() -> None:
    places, lost, again = StreamSlots(), Call(), Call()
    with places.enter(lost):
        places.answered(lost)
        with places.enter(again):
            assert lost.active
            places.answered(again)
            places.answered(again)
            assert (lost.active, again.active) == (False, True)


def test_streams_that_ended_are_forgotten() -> None:
    places, ended = StreamSlots(), Call()
    with places.enter(ended):
        places.answered(ended)
    places.clear()
    assert ended.active


@pytest.mark.parametrize(
    ("to_wire", "from_wire", "numbers", "error"),
    [
        (enums.SPLIT_TO_WIRE, enums.split_from_wire, pb.Split, OutOfStep),
        (enums.COURSE_TO_WIRE, enums.course_from_wire, pb.Course, InvalidMessage),
        (enums.LEAVE_REASON_TO_WIRE, enums.leave_reason_from_wire, pb.LeaveReason, InvalidMessage),
    ],
)
def test_every_value_of_an_enumeration_travels_both_ways_and_an_unspecified_one_is_refused(
    to_wire: dict[Any, Any], from_wire: Any, numbers: Any, error: type[Exception]
) -> None:
    assert {from_wire(number): number for number in to_wire.values()} == to_wire
    assert {*to_wire.values()} == {*numbers.values()} - {0}
    with pytest.raises(error):
        from_wire(0)
