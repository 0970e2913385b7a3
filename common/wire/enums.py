"""Translates between the enumerations of the wire and the project's own, in both directions."""

from typing import TypeVar

from splitveil.common.errors import InvalidMessage, OutOfStep
from splitveil.common.run.messages import Course, LeaveReason
from splitveil.common.run.splits import SplitName
from splitveil.protos import split_learning_pb2 as pb

OursT = TypeVar("OursT")
TheirsT = TypeVar("TheirsT")

SPLIT_TO_WIRE: dict[SplitName, pb.Split] = {
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


def _inverse(mapping: dict[OursT, TheirsT]) -> dict[TheirsT, OursT]:
    return {theirs: ours for ours, theirs in mapping.items()}


_SPLITS = _inverse(SPLIT_TO_WIRE)
_COURSES = _inverse(COURSE_TO_WIRE)
_LEAVE_REASONS = _inverse(LEAVE_REASON_TO_WIRE)


def split_from_wire(split: pb.Split) -> SplitName:
    """Return the split of a message.

    Raises:
        OutOfStep: the message names none, so it belongs to no batch of the run.
    """
    if split not in _SPLITS:
        raise OutOfStep("a tensor that belongs to no split")
    return _SPLITS[split]


def course_from_wire(course: pb.Course) -> Course:
    """Return the course in a reply to held-out activations.

    Raises:
        InvalidMessage: the reply names none.
    """
    if course not in _COURSES:
        raise InvalidMessage("the evaluation reply does not say whether to continue")
    return _COURSES[course]


def leave_reason_from_wire(reason: pb.LeaveReason) -> LeaveReason:
    """Return the reason in a leave request.

    Raises:
        InvalidMessage: the request gives none.
    """
    if reason not in _LEAVE_REASONS:
        raise InvalidMessage("a leave request without a reason")
    return _LEAVE_REASONS[reason]
