"""Translates between the enumerations of the wire and the project's own, in both directions."""

from typing import TypeVar

from splitveil.common.errors import InvalidMessage, OutOfStep, ProtocolError
from splitveil.common.run.messages import Course, LeaveReason
from splitveil.common.run.splits import PassName
from splitveil.protos import split_learning_pb2 as pb

OursT = TypeVar("OursT")
TheirsT = TypeVar("TheirsT")

SPLIT_TO_WIRE: dict[PassName, pb.Split] = {
    "survey": pb.SPLIT_SURVEY,
    "train": pb.SPLIT_TRAIN,
    "validation": pb.SPLIT_VALIDATION,
    "test": pb.SPLIT_TEST,
}
COURSE_TO_WIRE: dict[Course, pb.Course] = {
    Course.CONTINUE: pb.COURSE_CONTINUE,
    Course.STOP: pb.COURSE_STOP,
}
LEAVE_REASON_TO_WIRE: dict[LeaveReason, pb.LeaveReason] = {
    LeaveReason.FINISHED: pb.LEAVE_REASON_FINISHED,
    LeaveReason.INTERRUPTED: pb.LEAVE_REASON_INTERRUPTED,
    LeaveReason.ALIGNMENT_FAILED: pb.LEAVE_REASON_ALIGNMENT_FAILED,
    LeaveReason.FAILED: pb.LEAVE_REASON_FAILED,
}


def split_from_wire(split: pb.Split) -> PassName:
    return _from_wire(SPLIT_TO_WIRE, split, OutOfStep("a tensor that belongs to no split"))


def course_from_wire(course: pb.Course) -> Course:
    refusal = InvalidMessage("the evaluation reply does not say whether to continue")
    return _from_wire(COURSE_TO_WIRE, course, refusal)


def leave_reason_from_wire(reason: pb.LeaveReason) -> LeaveReason:
    refusal = InvalidMessage("a leave request without a reason")
    return _from_wire(LEAVE_REASON_TO_WIRE, reason, refusal)


def _from_wire(to_wire: dict[OursT, TheirsT], received: TheirsT, refusal: ProtocolError) -> OursT:
    for ours, theirs in to_wire.items():
        if theirs == received:
            return ours
    raise refusal
