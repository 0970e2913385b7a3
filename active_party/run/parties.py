"""The passive parties of a run, as the active party sees them between their messages."""

import hashlib
import hmac
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from splitveil.common.alignment.exchange import Share
from splitveil.common.errors import AlignmentError, OutOfStep
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import TRANSFERS_AHEAD, evaluations_ahead
from splitveil.common.run.messages import Activation, Answer, Course
from splitveil.common.run.sample_order import NONCE_BYTES, Positions

Reply = Answer | Course
"""The reply to a training activation, or to the activation of held-out rows."""


class PartyStage(Enum):
    UNKNOWN = "has not shaken hands with this process yet"
    AWAY = "has to open the run again"
    OPEN = "has opened the run"
    RETURNING = "has asked to resume, and waits until every party has"
    LEFT = "has said goodbye"
    GONE = "has said goodbye, and would have to open the run again"


class Pair(NamedTuple):
    """The outcome of the alignment with one party."""

    rows: Positions
    """The active party's rows of the ids that the two have in common."""

    nonce: bytes
    """The party's share of the joint seed."""


class JointRows(NamedTuple):
    """The rows that all parties have."""

    file_rows: Positions
    nonces: tuple[bytes, ...]
    """All passive parties' shares of the joint seed, in the contract's order."""

    shares: tuple[Share, ...]
    """Empty for a single passive party, which knows the common rows already."""

    @classmethod
    def of(cls, contract: Contract, pairs: Sequence[Pair]) -> "JointRows":
        """Intersect the rows that the active party has in common with each passive party."""
        nonces = tuple(pair.nonce for pair in pairs)
        rows = pairs[0].rows
        if len(pairs) == 1:
            return cls(rows, nonces, ())
        common = rows
        for pair in pairs[1:]:
            common = np.intersect1d(common, pair.rows, assume_unique=True)
        masks = [np.isin(pair.rows, common) for pair in pairs]
        if len(common) < contract.alignment.min_aligned:
            raise AlignmentError(
                f"too few ids to train on: {len(common)} that all parties have, "
                f"needed {contract.alignment.min_aligned}"
            )
        return cls(rows[masks[0]], nonces, tuple(Share(mask, nonces) for mask in masks))


@dataclass(eq=False)
class PassivePeer:
    name: str
    index: int
    stage: PartyStage = PartyStage.UNKNOWN
    commitment: bytes = b""
    handshakes: int = 0
    """Number of handshakes that it began; only the newest one waits for the other parties."""
    offer: frozenset[int] = frozenset()
    """Numbers of the batches at whose checkpoints it can resume."""
    pair: Pair | None = None  # present once it is aligned with the active party
    share: Share | None = None
    """Mask of the pair's rows that all parties have; present once every party is aligned."""
    question: Activation | None = None  # about the current batch, if it has asked
    fingerprint: bytes = b""
    """Identifies the question's bytes, to detect a second question about the batch; 16 bytes."""
    answered: deque[tuple[Activation, Reply]] = field(default_factory=deque)
    """Its last questions with their answers, as many as may be on their way to it at once."""
    pipeline_depth: int = 1  # the most gradients that may be on their way to it at once
    evaluations_ahead: int = 1  # the most replies to held-out rows on their way at once

    @property
    def has_opened(self) -> bool:
        """True if it has shaken hands since the run was last opened or resumed."""
        return self.stage in (PartyStage.OPEN, PartyStage.RETURNING, PartyStage.LEFT)

    @property
    def has_left(self) -> bool:
        return self.stage in (PartyStage.LEFT, PartyStage.GONE)

    def has_committed_to(self, commitment: bytes) -> bool:
        """Compare a commitment with the handshake's, in constant time."""
        return hmac.compare_digest(self.commitment, commitment)

    # ---- opening and resuming ----

    def open(self, commitment: bytes) -> None:
        """Note its handshake for a new run."""
        self.commitment = commitment
        self.stage = PartyStage.OPEN
        self.handshakes += 1

    def ask_to_resume(self, offer: frozenset[int]) -> None:
        """Note its handshake for a stored run."""
        self.offer = offer
        self.stage = PartyStage.RETURNING
        self.handshakes += 1

    def forget_opening(self) -> None:
        """Require a new handshake before any other message of the party is accepted."""
        if self.stage is PartyStage.LEFT:
            self.stage = PartyStage.GONE
        elif self.has_opened:
            self.stage = PartyStage.AWAY
        self.question = None

    def forget_alignment(self) -> None:
        """Let the party start over."""
        self.forget_opening()
        self.commitment = b""
        self.pair = self.share = None

    def take_pair(self, pair: Pair) -> None:
        """Store the outcome of its alignment, if its nonce matches its commitment."""
        committed = self.has_committed_to(hashlib.sha256(pair.nonce).digest())
        if len(pair.nonce) != NONCE_BYTES or not committed:
            raise OutOfStep("the peer's nonce is not the one it committed to")
        self.pair = pair

    def say_goodbye(self) -> None:
        self.stage = PartyStage.LEFT if self.has_opened else PartyStage.GONE

    # ---- questions ----

    def forget_questions(self) -> None:
        """Drop the last questions and answers, because the run goes to another batch."""
        self.question = None
        self.answered.clear()

    def reply_to(self, activation: Activation) -> Reply | None:
        """Return the reply to one of its last activations; None for another one."""
        for asked, reply in self.answered:
            if activation.batch == asked.batch:
                if not _same_bytes(activation.values, asked.values):
                    raise OutOfStep("a repeated step came with other bytes")
                return reply
        return None

    def ask(self, question: Activation, fingerprint: bytes) -> None:
        """Store its question, which may have to wait for other parties' questions."""
        waiting = self.question
        if waiting is not None and not _same_bytes(waiting.values, question.values):
            raise OutOfStep("a step that waits for other parties came again with other bytes")
        self.question, self.fingerprint = question, fingerprint

    def answer(self, reply: Reply) -> None:
        """Keep the reply to its question, in case the question comes again."""
        question, self.question = self.question, None
        if question is None:
            raise RuntimeError(f"{self.name} has not asked")
        is_gradient = isinstance(reply, Answer)
        if self.answered and isinstance(self.answered[-1][1], Answer) is not is_gradient:
            # Held-out rows are sent after all gradients have come, and the other way round.
            self.answered.clear()
        self.answered.append((question, reply))
        if len(self.answered) > (self.pipeline_depth if is_gradient else self.evaluations_ahead):
            self.answered.popleft()


class PassivePeers(tuple[PassivePeer, ...]):
    """All passive parties of a run, in the contract's order."""

    __slots__ = ()

    def __new__(cls, contract: Contract) -> Self:
        ahead = max(contract.pipeline_depth, TRANSFERS_AHEAD * contract.releases_sums)
        return super().__new__(
            cls,
            [
                PassivePeer(
                    name,
                    index,
                    pipeline_depth=ahead,
                    evaluations_ahead=evaluations_ahead(contract),
                )
                for index, name in enumerate(contract.passive_parties)
            ],
        )

    @property
    def is_multi_party(self) -> bool:
        return len(self) > 1

    @property
    def have_opened(self) -> bool:
        return all(party.has_opened for party in self)

    @property
    def have_left(self) -> bool:
        return all(party.has_left for party in self)

    @property
    def questions(self) -> list[Activation]:
        """The questions that wait for an answer, in the contract's order."""
        return [party.question for party in self if party.question is not None]

    @property
    def pairs(self) -> list[Pair]:
        """The outcomes of the alignments that are complete, in the contract's order."""
        return [party.pair for party in self if party.pair is not None]

    def named(self, name: str | None) -> PassivePeer:
        """Return the party of a name; a single party need not be named."""
        if name is None and not self.is_multi_party:
            return self[0]
        for party in self:
            if party.name == name:
                return party
        raise OutOfStep("a call from a party that is not in the contract")

    def recall(self, nonces: Sequence[bytes]) -> None:
        """Recognise every party by the nonces of a stored run."""
        for party, nonce in zip(self, nonces, strict=True):
            party.commitment = hashlib.sha256(nonce).digest()


def names_of(parties: Iterable[PassivePeer]) -> str:
    return " and ".join(repr(party.name) for party in parties)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    # By bits, not by value: 0.0 and -0.0 are different bytes.
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
