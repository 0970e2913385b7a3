"""Which questions the run has answered, so that none is ever answered twice in two ways.

What is done again after a restart is answered only where the same bytes come again, and then with
the same noise: its key follows from the questions and a secret of the run.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence

import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from common.checkpoint import AnswerLog
from common.errors import OutOfStep


class AnsweredQuestions:
    """Fingerprints of questions by their numbers, and the keys of their answers.

    Args:
        secret: of the run, 32 bytes.
        log: keeps the fingerprints.
    """

    def __init__(self, secret: bytes, log: AnswerLog) -> None:
        self.secret = secret
        self._log = log

    def __len__(self) -> int:
        return len(self._log)

    def fingerprint(self, number: int, values: Tensor) -> bytes:
        """Return what tells a question from others, 16 bytes.

        Raises:
            OutOfStep: another question than this one was answered under this number.
        """
        key = _keyed(self.secret, b"fingerprint", number.to_bytes(8, "little"))
        fingerprint = Poly1305.generate_tag(key, _bytes_of(values))
        earlier = self._log.fingerprint(number)
        if earlier is not None and not hmac.compare_digest(earlier, fingerprint):
            raise OutOfStep("what was answered before came again with other bytes")
        return fingerprint

    def record(self, number: int, fingerprint: bytes) -> None:
        """Note that a question is about to be answered.

        Written before anything is computed: a crash between the two costs nothing, for the same
        question gives the same answer.

        Raises:
            StorageError: it cannot be written: then it must not be answered.
        """
        if self._log.fingerprint(number) is None:
            self._log.record(number, fingerprint)

    def note(self, number: int, values: Tensor) -> None:
        """Make sure that no other question is ever answered under a number.

        Raises:
            OutOfStep: one was.
        """
        self.record(number, self.fingerprint(number, values))

    def answer_key(self, place: int, fingerprints: Sequence[bytes]) -> bytes:
        """Return what the noise of an answer is drawn from, 32 bytes.

        Args:
            place: in the run.
            fingerprints: of what all parties ask there.
        """
        question = place.to_bytes(8, "little") + b"".join(fingerprints)
        return _keyed(self.secret, b"answer", question)

    def forget_before(self, number: int) -> None:
        """Let those go that can never be asked again."""
        self._log.forget_before(number)


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
