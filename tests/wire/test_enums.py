"""Every value of the wire's enumerations maps to one of ours; unspecified values are refused."""

from typing import get_args

import pytest

from splitveil.common.errors import InvalidMessage, OutOfStep
from splitveil.common.run.messages import Course, LeaveReason
from splitveil.common.run.sample_order import SplitName
from splitveil.common.wire import small_messages as enums
from splitveil.protos import split_learning_pb2 as pb


def test_every_value_travels_both_ways() -> None:
    for split in get_args(SplitName):
        assert enums.split_from_wire(enums.SPLIT_TO_WIRE[split]) == split
    for course in Course:
        assert enums.course_from_wire(enums.COURSE_TO_WIRE[course]) is course
    for reason in LeaveReason:
        assert enums.leave_reason_from_wire(enums.LEAVE_REASON_TO_WIRE[reason]) is reason
    assert len(enums.SPLIT_TO_WIRE) == len(pb.Split.keys()) - 1
    assert len(enums.COURSE_TO_WIRE) == len(pb.Course.keys()) - 1
    assert len(enums.LEAVE_REASON_TO_WIRE) == len(pb.LeaveReason.keys()) - 1


def test_what_is_not_specified_is_refused() -> None:
    with pytest.raises(OutOfStep):
        enums.split_from_wire(pb.SPLIT_UNSPECIFIED)
    with pytest.raises(InvalidMessage):
        enums.course_from_wire(pb.COURSE_UNSPECIFIED)
    with pytest.raises(InvalidMessage):
        enums.leave_reason_from_wire(pb.LEAVE_REASON_UNSPECIFIED)
