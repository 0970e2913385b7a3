"""Encodes the question of an audit; the only module that checks and decodes its bytes."""

import torch

from splitveil.common.errors import InvalidMessage
from splitveil.common.run.messages import AuditQuestion
from splitveil.protos import split_learning_pb2 as pb

_FLOAT_BYTES = 4


def encode_question(question: AuditQuestion) -> pb.AuditRequest:
    return pb.AuditRequest(
        run_id=question.run_id,
        epoch=question.epoch,
        attack=question.attack,
        layer=question.layer,
        positions_digest=question.positions_digest,
        scores=question.scores.numpy().astype("<f4").tobytes(),
    )


def decode_question(request: pb.AuditRequest) -> AuditQuestion:
    size = len(request.scores)
    if not size or size % _FLOAT_BYTES:
        raise InvalidMessage(f"audit: {size} bytes are not float32 scores")
    # The copy is writable, which torch requires.
    scores = torch.frombuffer(bytearray(request.scores), dtype=torch.float32)
    return AuditQuestion(
        request.run_id,
        request.epoch,
        request.attack,
        request.layer,
        request.positions_digest,
        scores,
    )
