"""Remembers the questions that a run has answered, so that none is ever answered in two ways.

After a restart, a repeated step is answered only if the same bytes come again, and then with the
same noise: its key is derived from the questions and a secret of the run. Such an answer reveals
nothing new and is not charged again.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from splitveil.common.errors import OtherAnswer, OutOfStep
from splitveil.common.privacy.charge import Charge
from splitveil.common.record.answer_log import FIRST_RESUMPTION_NUMBER, AnswerLog, Record

MAX_RESUMPTIONS = 100
"""Times that a run goes back over answers that it has given: a peer that measures how long this
party takes for the same work could average over more of them."""


class AnsweredQuestions:
    """Fingerprints of questions and replies, the keys of the noise, and the charges."""

    def __init__(self, secret: bytes, log: AnswerLog) -> None:
        self.secret = secret
        self._log = log

    def __len__(self) -> int:
        return len(self._log)

    def fingerprint(self, batch_number: int, asker: int, values: Tensor) -> bytes:
        """Return 16 bytes for a question; OutOfStep if another one about the batch was answered."""
        key, known = batch_number * self._log.questions + asker, self._log.at(batch_number)
        fingerprint = _tag(self.secret, key, values, b"fingerprint")
        if known and not hmac.compare_digest(known.fingerprints[asker], fingerprint):
            raise OutOfStep("a question that was answered before came again with other bytes")
        return fingerprint

    def is_answered(self, batch_number: int) -> bool:
        """Return whether a batch that may come again has been answered before."""
        return self._log.at(batch_number) is not None

    def answer_key(self, batch_number: int, fingerprints: Sequence[bytes]) -> bytes:
        """Return the key of the noise of the answer to all parties' questions, 32 bytes."""
        question = batch_number.to_bytes(8, "little") + b"".join(fingerprints)
        return _keyed(self.secret, b"answer", question)

    def record(self, batch_number: int, fingerprints: Sequence[bytes]) -> None:
        """Log questions about held-out rows before they are answered, unless they were before.

        A crash between this and the answer costs nothing: the same questions get the same answer.
        """
        if not self.is_answered(batch_number):
            self._log.record(batch_number, fingerprints)

    def admission(
        self,
        batch_number: int,
        fingerprints: Sequence[bytes],
        charge: Charge,
        answer: Tensor,
        where: str,
    ) -> tuple[bool, Callable[[], None]]:
        """Return whether this very answer was given before, and a function that logs it.

        Arithmetic that is not repeatable, or another device, gives another answer to the same
        question, possibly at the same charge. Since both carry the same noise, together they would
        reveal their difference without any noise, so that it is refused.
        """
        tag = _tag(self.secret, batch_number, answer, b"reply")
        known = self._log.at(batch_number)
        if known is None:
            return False, partial(self._log.record, batch_number, fingerprints, charge, tag)
        if (known.charge, known.reply) != (charge, tag):
            raise OtherAnswer(
                f"{where}: the same question would get another answer than before: the arithmetic "
                f"has changed, as with another device, torch_threads, autocast, compile or version "
                f"of a library; restore those, or start over with --fresh at both parties"
            )
        return True, lambda: None

    @property
    def replies(self) -> bytes:
        """A hash of all answers that were given."""
        return self._log.replies

    def sync(self) -> None:
        """Make the records survive a power failure."""
        self._log.sync()

    def since(self, count: int) -> Iterator[Record]:
        """Yield the answers about batches that follow the first few records."""
        records = self._log.since(count)
        return (record for record in records if record.number < FIRST_RESUMPTION_NUMBER)

    @property
    def num_resumptions(self) -> int:
        return self._log.num_resumptions()

    def note_resumption(self) -> None:
        """Note that the run goes back over a batch; OutOfStep after ``MAX_RESUMPTIONS`` times."""
        count = self.num_resumptions
        if count >= MAX_RESUMPTIONS:
            raise OutOfStep(
                f"the run has gone back to a checkpoint {count} times, as often as it may: start "
                f"over with --fresh at both parties"
            )
        self._log.record(FIRST_RESUMPTION_NUMBER + count, [])

    def forget_before(self, batch_number: int) -> None:
        """Drop from memory the questions about earlier batches, which can never come again."""
        self._log.forget_before(batch_number)


def run_secret(noise_seed: int | None) -> bytes:
    """Return the secret that keys a run's answers and fingerprints, 32 bytes."""
    if noise_seed is None:
        return secrets.token_bytes(32)
    return hashlib.sha256(b"splitveil test secret %d" % noise_seed).digest()


def _keyed(secret: bytes, purpose: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=32, key=secret, person=purpose).digest()


def _tag(secret: bytes, number: int, values: Tensor, purpose: bytes) -> bytes:
    key = _keyed(secret, purpose, number.to_bytes(8, "little"))
    return Poly1305.generate_tag(
        key, values.contiguous().view(torch.uint8).numpy().reshape(-1).data
    )
