"""The passive parties of a run, as the active party sees them between their messages.

Only this module changes what is known about a party.
"""

import hashlib
import hmac
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.run.audit_desk import AuditDesk
from splitveil.common.alignment import Share
from splitveil.common.errors import OutOfStep
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import evaluations_ahead
from splitveil.common.run.messages import Activation, Answer, BatchId, Course
from splitveil.common.run.sample_order import Positions

Reply = Answer | Course
"""The reply to a training activation, or to the activation of held-out rows."""


class PartyStage(Enum):
    UNKNOWN = "has not shaken hands with this process yet"
    AWAY = "has to open the run again"
    OPEN = "has opened the run"
    RETURNING = "has asked to resume, and waits until every party has"
    LEFT = "has said goodbye"
    GONE = "has said goodbye, and would have to open the run again"


_OPENED = (PartyStage.OPEN, PartyStage.RETURNING, PartyStage.LEFT)


class Question(NamedTuple):
    activation: Activation
    fingerprint: bytes
    """Identifies the question's bytes, to detect a second question about the batch; 16 bytes."""


class Answered(NamedTuple):
    activation: Activation
    reply: Reply


class Pair(NamedTuple):
    rows: Positions
    """The active party's rows of the ids that the two have in common."""

    nonce: bytes
    """The party's share of the joint seed."""


@dataclass(eq=False)
class PassiveParty:
    name: str
    index: int

    audits: AuditDesk

    stage: PartyStage = PartyStage.UNKNOWN

    commitment: bytes = b""

    handshakes: int = 0
    """Number of handshakes that it began; only the newest one waits for the other parties."""

    offer: frozenset[int] = frozenset()
    """Numbers of the batches at whose checkpoints it can resume."""

    pair: Pair | None = None
    """Present once it is aligned with the active party."""

    share: Share | None = None
    """Mask of the pair's rows that all parties have; present once every party is aligned."""

    question: Question | None = None

    answered: deque[Answered] = field(default_factory=deque)
    """Its last questions with their answers, as many as may be on their way to it at once."""

    pipeline_depth: int = 1
    """The most gradients that may be on their way to it at once."""

    evaluations_ahead: int = 1
    """The most replies to held-out rows that may be on their way to it at once."""

    @property
    def was_met(self) -> bool:
        """Whether it has ever shaken hands with this process."""
        return self.stage is not PartyStage.UNKNOWN

    @property
    def has_opened(self) -> bool:
        """Whether it has shaken hands since the run was last opened or resumed."""
        return self.stage in _OPENED

    @property
    def is_returning(self) -> bool:
        """Whether it waits for the other parties in order to resume from a checkpoint."""
        return self.stage is PartyStage.RETURNING

    @property
    def has_left(self) -> bool:
        return self.stage in (PartyStage.LEFT, PartyStage.GONE)

    @property
    def is_aligned(self) -> bool:
        """Whether the ids that the two have in common are known."""
        return self.pair is not None

    @property
    def has_asked(self) -> bool:
        """Whether its question about the current batch waits for an answer."""
        return self.question is not None

    def has_committed_to(self, commitment: bytes) -> bool:
        """Compare a commitment with that of the handshake, in constant time."""
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

    def resume(self) -> None:
        self.stage = PartyStage.OPEN

    def recall(self, nonce: bytes) -> None:
        """Recognise it by the nonce with which a stored run began."""
        self.commitment = hashlib.sha256(nonce).digest()

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
        self.pair = pair

    def take_share(self, share: Share) -> None:
        """Keep the share to send to the party at the end of the alignment with all parties."""
        self.share = share

    def say_goodbye(self) -> None:
        self.stage = PartyStage.LEFT if self.has_opened else PartyStage.GONE

    # ---- questions ----

    def forget_questions(self) -> None:
        """Drop the last questions and answers, because the run goes to another batch."""
        self.question = None
        self.answered.clear()

    def reply_to(self, activation: Activation) -> Reply | None:
        """Return the reply to one of its last activations; None for another one."""
        for answered in self.answered:
            if activation.batch == answered.activation.batch:
                if not _same_bytes(activation.values, answered.activation.values):
                    raise OutOfStep("a repeated step came with other bytes")
                return answered.reply
        return None

    def ask(self, question: Question) -> None:
        """Take its question, which may have to wait for those of other parties."""
        waiting = self.question
        if waiting is not None and not _same_bytes(
            waiting.activation.values, question.activation.values
        ):
            raise OutOfStep("a step that waits for other parties came again with other bytes")
        self.question = question

    def waits_for(self, batch: BatchId) -> bool:
        return self.question is not None and self.question.activation.batch == batch

    def answer(self, question: Question, reply: Reply) -> None:
        """Keep the reply to its question, in case the question comes again."""
        self.question = None
        is_gradient = isinstance(reply, Answer)
        if self.answered and isinstance(self.answered[-1].reply, Answer) is not is_gradient:
            # Held-out rows are sent after all gradients have come, and the other way round.
            self.answered.clear()
        self.answered.append(Answered(question.activation, reply))
        if len(self.answered) > (self.pipeline_depth if is_gradient else self.evaluations_ahead):
            self.answered.popleft()


class PassiveParties:
    """All passive parties of a run, in the contract's order."""

    def __init__(self, contract: Contract, *, allow_audits: bool) -> None:
        self._parties = tuple(
            PassiveParty(
                name,
                index,
                AuditDesk(is_open=allow_audits, asker=index),
                pipeline_depth=contract.pipeline_depth,
                evaluations_ahead=evaluations_ahead(contract),
            )
            for index, name in enumerate(contract.passive_parties)
        )

    def __iter__(self) -> Iterator[PassiveParty]:
        return iter(self._parties)

    def __len__(self) -> int:
        return len(self._parties)

    @property
    def is_multi_party(self) -> bool:
        return len(self._parties) > 1

    @property
    def have_opened(self) -> bool:
        return all(party.has_opened for party in self._parties)

    @property
    def have_left(self) -> bool:
        return all(party.has_left for party in self._parties)

    @property
    def have_asked(self) -> bool:
        return all(party.has_asked for party in self._parties)

    @property
    def questions(self) -> list[Question]:
        """The questions that wait for an answer, in the contract's order."""
        return [party.question for party in self._parties if party.question is not None]

    @property
    def pairs(self) -> list[Pair]:
        """The outcomes of the alignments that are complete, in the contract's order."""
        return [party.pair for party in self._parties if party.pair is not None]

    def named(self, name: str | None) -> PassiveParty:
        """Return the party of a name; a single party need not be named."""
        if name is None and not self.is_multi_party:
            return self._parties[0]
        for party in self._parties:
            if party.name == name:
                return party
        raise OutOfStep("a call from a party that is not in the contract")

    def recall(self, nonces: Sequence[bytes]) -> None:
        """Recognise every party by the nonces with which a stored run began."""
        for party, nonce in zip(self._parties, nonces, strict=True):
            party.recall(nonce)

    def answer(self, replies: Sequence[Reply]) -> None:
        """Keep the replies to the questions of all parties, in the contract's order."""
        for party, question, reply in zip(self._parties, self.questions, replies, strict=True):
            party.answer(question, reply)


def names_of(parties: Iterable[PassiveParty]) -> str:
    return " and ".join(repr(party.name) for party in parties)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    # By bits, not by value: 0.0 and -0.0 are different bytes.
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
