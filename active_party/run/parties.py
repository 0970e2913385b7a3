"""What the active party holds of each passive party of a run, between its messages."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.run.audit_desk import AuditDesk
from splitveil.common.alignment import Share
from splitveil.common.errors import OutOfStep
from splitveil.common.run.messages import Activation, Answer, BatchId, Course
from splitveil.common.run.sample_order import NONCE_BYTES, Positions


class Question(NamedTuple):
    """What a party asks, while the others have not asked yet."""

    activation: Activation
    fingerprint: bytes
    """Tells whether the same was asked at this place before, 16 bytes."""


class Answered(NamedTuple):
    """A party's last question, and what it was told."""

    batch: BatchId
    values: Tensor
    reply: Answer | Course


@dataclass(eq=False)
class PassiveParty:
    """One passive party of the contract."""

    name: str
    index: int
    """Its place in the contract's order."""

    audits: AuditDesk

    audited: set[tuple[int, str, str]] = field(default_factory=set)
    """Epoch, attack and layer of which the observer knows."""

    commitment: bytes = b""
    """To its nonce, from the handshake."""

    was_met: bool = False
    """Whether it has ever shaken hands with this process."""

    has_opened: bool = False
    """Whether it has, since the run was last opened or gone on with."""

    calls: int = 0
    """How many handshakes it began: only the newest one waits for others."""

    offer: frozenset[int] = frozenset()
    """Places where it can go on."""

    is_going_back: bool = False
    """Whether it waits for the others to go on from an earlier place."""

    nonce: bytes = b""
    pair_rows: Positions | None = None
    """The active party's rows of the ids that the two have in common, once they are aligned."""

    share: Share | None = None
    """Which of those all parties have, once all are aligned."""

    question: Question | None = None
    answered: Answered | None = None
    has_left: bool = False

    def forget_opening(self) -> None:
        """Let it open the run again, before any other message of it is taken."""
        self.has_opened = self.is_going_back = False
        self.question = None

    def forget_alignment(self) -> None:
        """Let it begin anew."""
        self.forget_opening()
        self.commitment = self.nonce = b""
        self.pair_rows = self.share = None

    def at_place(self) -> None:
        """Forget what was asked before the run went to another place."""
        self.question = self.answered = None

    def stored_reply(self, activation: Activation) -> Answer | Course | None:
        """Return what it was told when it asked this last.

        Raises:
            OutOfStep: it asks again with other bytes.
        """
        answered = self.answered
        if answered is None or activation.batch != answered.batch:
            return None
        if not _same_bytes(activation.values, answered.values):
            raise OutOfStep("a repeated step came with other bytes")
        return answered.reply

    def ask(self, question: Question) -> None:
        """Take a question that may have to wait for others.

        Raises:
            OutOfStep: it waits already, with other bytes.
        """
        waiting = self.question
        if waiting is not None and not _same_bytes(
            waiting.activation.values, question.activation.values
        ):
            raise OutOfStep("a step that waits for other parties came again with other bytes")
        self.question = question

    def answer(self, reply: Answer | Course) -> None:
        """Keep the answer to its question."""
        if self.question is None:
            raise RuntimeError("an answer without a question")
        activation, self.question = self.question.activation, None
        self.answered = Answered(activation.batch, activation.values, reply)

    def reply(self) -> Answer | Course:
        """Return what it was told last."""
        if self.answered is None:
            raise RuntimeError("no answer yet")
        return self.answered.reply


class PassiveParties:
    """All passive parties of a run, in the contract's order.

    Args:
        names: as the contract lists them.
        allow_audits: whether their scores are measured.
    """

    def __init__(self, names: Sequence[str], *, allow_audits: bool) -> None:
        self._parties = tuple(
            PassiveParty(name, index, AuditDesk(is_open=allow_audits, asker=index))
            for index, name in enumerate(names)
        )

    def __iter__(self) -> Iterator[PassiveParty]:
        return iter(self._parties)

    def __len__(self) -> int:
        return len(self._parties)

    @property
    def are_several(self) -> bool:
        """Whether there are more than one."""
        return len(self._parties) > 1

    @property
    def have_opened(self) -> bool:
        """Whether this process has opened the run with all of them."""
        return all(party.has_opened for party in self._parties)

    @property
    def have_asked(self) -> bool:
        """Whether each has asked what is due."""
        return all(party.question is not None for party in self._parties)

    def named(self, name: str | None) -> PassiveParty:
        """Return one of them; the only one need not be named.

        Raises:
            OutOfStep: there is none of that name.
        """
        if name is None and not self.are_several:
            return self._parties[0]
        for party in self._parties:
            if party.name == name:
                return party
        raise OutOfStep("a call of nobody whom the contract names")

    def take_nonces(self, joined: bytes) -> list[bytes]:
        """Give each party the nonce with which a stored run began, and return all of them."""
        nonces = [joined[i : i + NONCE_BYTES] for i in range(0, len(joined), NONCE_BYTES)]
        for party, nonce in zip(self._parties, nonces, strict=True):
            party.nonce, party.commitment = nonce, hashlib.sha256(nonce).digest()
        return nonces


def names_of(parties: Sequence[PassiveParty]) -> str:
    """Return their names in words."""
    return " and ".join(repr(party.name) for party in parties)


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    # By bits, not by value: 0.0 and -0.0 are different bytes.
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
