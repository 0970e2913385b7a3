"""Encodes the reply to held-out activations; the only module that checks and decodes it."""

from splitveil.common.errors import InvalidMessage
from splitveil.common.run.messages import BatchId, Course
from splitveil.common.wire.enums import COURSE_TO_WIRE, SPLIT_TO_WIRE, course_from_wire
from splitveil.protos import split_learning_pb2 as pb


def encode_course(batch: BatchId, course: Course) -> pb.EvaluateReply:
    return pb.EvaluateReply(
        epoch=batch.epoch,
        step=batch.step,
        split=SPLIT_TO_WIRE[batch.split],
        course=COURSE_TO_WIRE[course],
    )


def decode_course(reply: pb.EvaluateReply, asked: BatchId) -> Course:
    """Decode the reply to a batch, or raise InvalidMessage."""
    wanted = (asked.epoch, asked.step, SPLIT_TO_WIRE[asked.split])
    if (reply.epoch, reply.step, reply.split) != wanted:
        raise InvalidMessage("the evaluation reply is for another batch")
    return course_from_wire(reply.course)
