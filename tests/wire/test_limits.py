"""Every field that a peer may fill has a bound, and the check for missing bounds works."""

from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from splitveil.active_party.grpc_server.caller import StreamSlots
from splitveil.common.errors import InvalidMessage, ProtocolError, TooLarge
from splitveil.common.wire import limits
from splitveil.common.wire.limits import EXEMPT, FIELDS, Refused, believed, check_fields, reader
from splitveil.protos import split_learning_pb2 as pb

ALL_FIELDS = {
    f"{name}.{field.name}": field
    for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    for field in message.fields
}
NUMBERS = {"uint32": 2**32 - 1, "uint64": 2**64 - 1}
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
    if field.is_repeated:
        kinds = {field.TYPE_BYTES: b"x", field.TYPE_STRING: "x"}
        entry = kinds.get(field.type, 1)
        getattr(message, attribute).extend([entry] * size)
    elif field.cpp_type == field.CPPTYPE_STRING:
        text = field.type == field.TYPE_STRING
        setattr(message, attribute, "x" * size if text else b"x" * size)
    else:
        setattr(message, attribute, size)
    return message


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - WITHOUT_END))
def test_what_a_bound_allows_comes_through_and_one_more_does_not(name: str) -> None:
    check_fields(filled(name, FIELDS[name].most))
    with pytest.raises(TooLarge, match=name):
        check_fields(filled(name, FIELDS[name].most + 1))


def test_a_field_inside_a_frame_is_looked_at_too() -> None:
    frame = pb.AlignFrame(points=pb.MaskedPoints(points=bytes(limits.CHUNK_IDS * 32 + 1)))
    with pytest.raises(TooLarge):
        check_fields(frame)


def test_a_number_without_a_name_is_refused() -> None:
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


# ---- streams ----


class Call:
    def __init__(self, *, active: bool = True) -> None:
        self.active = active

    def is_active(self) -> bool:
        return self.active

    def cancel(self) -> None:
        self.active = False


@pytest.fixture
def enter() -> Callable[[StreamSlots, Call], None]:
    entered = []

    def enter(places: StreamSlots, call: Call) -> None:
        place = places.enter(call)
        place.__enter__()
        entered.append(place)

    return enter


Enter = Callable[[StreamSlots, Call], None]


def test_streams_without_an_answer_push_each_other_out_and_not_the_answered_one(
    enter: Enter,
) -> None:
    places, honest, idle = StreamSlots(), Call(), [Call() for _ in range(1000)]
    enter(places, honest)
    places.answered(honest)
    for call in idle:
        enter(places, call)
    assert honest.active
    assert [call.active for call in idle] == [False] * 999 + [True]


def test_a_stream_that_is_answered_takes_the_place_of_the_one_before(enter: Enter) -> None:
    places, lost, again = StreamSlots(), Call(), Call()
    enter(places, lost)
    places.answered(lost)
    enter(places, again)
    assert lost.active
    places.answered(again)
    places.answered(again)
    assert (lost.active, again.active) == (False, True)


def test_a_stream_that_was_given_up_in_the_queue_does_not_push_others_out(enter: Enter) -> None:
    places, newest = StreamSlots(), Call()
    enter(places, newest)
    enter(places, Call(active=False))
    assert newest.active


def test_streams_that_ended_are_forgotten() -> None:
    places, one, other = StreamSlots(), Call(), Call()
    with places.enter(one):
        places.answered(one)
    with places.enter(other):
        pass
    places.clear()
    assert one.active
    assert other.active
