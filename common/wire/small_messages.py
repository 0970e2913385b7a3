"""Encodes the small messages of a run, and alone checks and decodes them.

They belong to the handshake, the replies to held-out activations, and leaving.
"""

import re
from typing import Any, NamedTuple, TypeVar, get_args

from splitveil.common.errors import ContractMismatch, InvalidMessage, OutOfStep, ProtocolError
from splitveil.common.run.messages import BatchId, Course, LeaveReason, Offer, Opening
from splitveil.common.run.sample_order import PassName
from splitveil.common.wire.limits import DIGEST_BYTES, PROTOCOL_VERSION, RUN_ID_PATTERN
from splitveil.protos import split_learning_pb2 as pb

OursT = TypeVar("OursT")
TheirsT = TypeVar("TheirsT")

SPLIT_TO_WIRE: dict[PassName, Any] = {
    name: pb.Split.Value(f"SPLIT_{name.upper()}") for name in get_args(PassName)
}
COURSE_TO_WIRE: dict[Course, Any] = {
    course: pb.Course.Value(f"COURSE_{course.name}") for course in Course
}
LEAVE_REASON_TO_WIRE: dict[LeaveReason, Any] = {
    reason: pb.LeaveReason.Value(f"LEAVE_REASON_{reason.name}") for reason in LeaveReason
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


class Greeting(NamedTuple):
    party: str  # its name, as the contract lists it
    contract: str  # its canonical contract
    commitment: bytes  # SHA-256 of its nonce
    offer: Offer | None = None  # the run that it wants to resume; None for a new run


def encode_greeting(
    party: str, contract: str, commitment: bytes, offer: Offer | None
) -> pb.HandshakeRequest:
    return pb.HandshakeRequest(
        protocol_version=PROTOCOL_VERSION,
        party=party,
        contract=contract,
        nonce_commitment=commitment,
        resume_run_id="" if offer is None else offer.run_id,
        resume_places=() if offer is None else sorted(offer.batch_numbers),
    )


def decode_greeting(request: pb.HandshakeRequest) -> Greeting:
    if request.protocol_version != PROTOCOL_VERSION:
        raise ContractMismatch(["protocol_version"])
    if len(request.nonce_commitment) != DIGEST_BYTES or not request.contract:
        raise InvalidMessage("a handshake without a contract or a commitment of 32 bytes")
    if bool(request.resume_run_id) != bool(request.resume_places):
        raise InvalidMessage("a run to resume and the batches to resume at come together")
    offer = None
    if request.resume_run_id:
        offer = Offer(request.resume_run_id, frozenset(request.resume_places))
    return Greeting(request.party, request.contract, request.nonce_commitment, offer)


def encode_opening(opening: Opening) -> pb.HandshakeReply:
    return pb.HandshakeReply(
        run_id=opening.run_id,
        contract_digest=opening.contract_digest,
        nonce=opening.nonce,
        resumes_at=opening.resumes_at,
        nonce_commitments=opening.commitments,
    )


def decode_opening(reply: pb.HandshakeReply, offer: Offer | None) -> Opening:
    if not re.fullmatch(RUN_ID_PATTERN, reply.run_id):
        raise InvalidMessage("the handshake's reply does not name a run")
    commitments = tuple(reply.nonce_commitments)
    named = [("nonce", reply.nonce), ("contract_digest", reply.contract_digest)]
    for name, value in named + [("nonce_commitments", value) for value in commitments]:
        if len(value) != DIGEST_BYTES:  # as long as a nonce
            raise InvalidMessage(f"{name}: expected {DIGEST_BYTES} bytes, got {len(value)}")
    resumes_at = reply.resumes_at if reply.HasField("resumes_at") else None
    if offer is not None and (
        reply.run_id != offer.run_id or resumes_at not in offer.batch_numbers
    ):
        raise InvalidMessage("the active party resumes another run than this one")
    return Opening(reply.run_id, reply.contract_digest, reply.nonce, resumes_at, commitments)


def encode_course(batch: BatchId, course: Course) -> pb.EvaluateReply:
    return pb.EvaluateReply(
        epoch=batch.epoch,
        step=batch.step,
        split=SPLIT_TO_WIRE[batch.split],
        course=COURSE_TO_WIRE[course],
    )


def decode_course(reply: pb.EvaluateReply, asked: BatchId) -> Course:
    wanted = (asked.epoch, asked.step, SPLIT_TO_WIRE[asked.split])
    if (reply.epoch, reply.step, reply.split) != wanted:
        raise InvalidMessage("the evaluation reply is for another batch")
    return course_from_wire(reply.course)
