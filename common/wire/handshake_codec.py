"""Encodes the messages of a handshake; the only module that checks and decodes them."""

import re
from typing import NamedTuple

from splitveil.common.errors import ContractMismatch, InvalidMessage
from splitveil.common.run.messages import Offer, Opening
from splitveil.common.wire.limits import DIGEST_BYTES, PROTOCOL_VERSION, RUN_ID_PATTERN
from splitveil.protos import split_learning_pb2 as pb


class Greeting(NamedTuple):
    """A passive party's request for a handshake."""

    party: str  # its name, as the contract lists it
    contract: str  # its canonical contract
    commitment: bytes  # SHA-256 of its nonce
    offer: Offer | None = None  # the run that it wants to resume; None for a new run


def encode_greeting(greeting: Greeting) -> pb.HandshakeRequest:
    offer = greeting.offer
    return pb.HandshakeRequest(
        protocol_version=PROTOCOL_VERSION,
        party=greeting.party,
        contract=greeting.contract,
        nonce_commitment=greeting.commitment,
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
        survey=opening.survey,
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
    return Opening(
        reply.run_id, reply.contract_digest, reply.nonce, resumes_at, commitments, reply.survey
    )
