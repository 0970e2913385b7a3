"""Which questions the run has answered, so that none is ever answered twice in two ways.

What is done again after a restart is answered only where the same bytes come again, and then with
the same noise: its key follows from the questions and a secret of the run. Such an answer tells
nothing new, and is not charged again.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Sequence

import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from splitveil.common.errors import OutOfStep
from splitveil.common.storage.answer_log import (
    NO_PLACE,
    NO_REPLY,
    NOTHING_TOLD,
    AnswerLog,
    ChargedAnswer,
    Record,
)


class AnsweredQuestions:
    """Fingerprints of questions and replies, the keys of the noise, and what was charged.

    Args:
        secret: of the run, 32 bytes.
        log: keeps fingerprints and charges.
    """

    def __init__(self, secret: bytes, log: AnswerLog) -> None:
        self.secret = secret
        self._log = log

    def __len__(self) -> int:
        return len(self._log)

    def fingerprint(self, place: int, asker: int, values: Tensor) -> bytes:
        """Return what tells a question from others, 16 bytes.

        Args:
            place: in the run.
            asker: number of the party that asks.
            values: what it sent.

        Raises:
            OutOfStep: it was answered another question there.
        """
        fingerprint = self._tag(place * self._log.questions + asker, values)
        self._refuse_other(self._log.at(place), asker, fingerprint)
        return fingerprint

    def is_answered(self, place: int) -> bool:
        """Tell whether a place was answered before that may be asked again."""
        return self._log.at(place) is not None

    def reply_tag(self, place: int, values: Tensor) -> bytes:
        """Return what tells an answer from others, 16 bytes, which stay here.

        Args:
            place: in the run.
            values: what is about to be answered.
        """
        return self._tag(place, values.cpu(), b"reply")

    def is_repeated(self, place: int, charge: ChargedAnswer, reply: bytes = NO_REPLY) -> bool:
        """Tell whether the very same answer was given at a place before, at the same charge.

        Arithmetic that is not repeatable, or another device, gives another answer to the same
        question, whose charge may well be the same. With the same noise, the two tell their
        difference bare.

        Args:
            place: in the run.
            charge: of the answer.
            reply: its tag.
        """
        record = self._log.at(place)
        return record is not None and (record.charge, record.reply) == (charge, reply)

    def record(
        self,
        place: int,
        fingerprints: Sequence[bytes],
        charge: ChargedAnswer = NOTHING_TOLD,
        reply: bytes = NO_REPLY,
    ) -> None:
        """Note that the questions at a place are about to be answered, if they were not before.

        A crash between this and the answer costs nothing, for the same questions give the same
        answer.

        Raises:
            StorageError: it cannot be written: then they must not be answered.
        """
        if not self.is_repeated(place, charge, reply):
            self._log.record(place, fingerprints, charge, reply)

    def since(self, count: int) -> Iterator[Record]:
        """Yield what was answered, after the first few records, at places of the run.

        Raises:
            StorageError: there are not even so many: the log is not whole.
        """
        return (record for record in self._log.since(count) if record.number < NO_PLACE)

    def note(self, number: int, values: Tensor, about: bytes = b"") -> None:
        """Make sure that no other question is ever answered under a number.

        Args:
            number: of at least 2^63, for it is no place.
            values: the question.
            about: what may be read back later, at most 32 bytes.

        Raises:
            OutOfStep: one was.
            StorageError: it cannot be written: then it must not be answered.
        """
        fingerprint, known = self._tag(number, values), self._log.at(number)
        self._refuse_other(known, 0, fingerprint)
        if known is None:
            self._log.record(number, [fingerprint], ChargedAnswer(0.0, about, 0.0))

    def noted(self) -> list[bytes]:
        """Return what the noted questions were about, one for each."""
        return [record.charge.identity for record in self._log.of_no_place()]

    def answer_key(self, place: int, fingerprints: Sequence[bytes]) -> bytes:
        """Return what the noise of an answer is drawn from, 32 bytes.

        Args:
            place: in the run.
            fingerprints: of what all parties ask there.
        """
        question = place.to_bytes(8, "little") + b"".join(fingerprints)
        return _keyed(self.secret, b"answer", question)

    def forget_before(self, place: int) -> None:
        """Let those go that can never be asked again."""
        self._log.forget_before(place)

    def _tag(self, number: int, values: Tensor, purpose: bytes = b"fingerprint") -> bytes:
        key = _keyed(self.secret, purpose, number.to_bytes(8, "little"))
        return Poly1305.generate_tag(key, _bytes_of(values))

    @staticmethod
    def _refuse_other(known: Record | None, asker: int, fingerprint: bytes) -> None:
        if known is not None and not hmac.compare_digest(known.fingerprints[asker], fingerprint):
            raise OutOfStep("what was answered before came again with other bytes")


def run_secret(noise_seed: int | None) -> bytes:
    """Return what a run's answers and fingerprints are keyed with, 32 bytes.

    Args:
        noise_seed: for tests only: makes it predictable.
    """
    if noise_seed is None:
        return secrets.token_bytes(32)
    return hashlib.sha256(b"splitveil test secret %d" % noise_seed).digest()


def _keyed(secret: bytes, purpose: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=32, key=secret, person=purpose).digest()


def _bytes_of(values: Tensor) -> memoryview:
    return values.contiguous().view(torch.uint8).numpy().data.cast("B")
