"""The audit service: measures a peer's scores for it, within limits. No I/O.

A leak AUC of scores that the peer chooses is an answer about the labels. Therefore the service is
closed unless the contract and this party's own settings open it, and then answers about all
training examples at once, at least ``MIN_EXAMPLES`` of each class, once per attack, layer and
epoch, for a few layers, with two digits. If there were only one positive among 20,000 rows, four
answers would identify it. Even so, a peer that knows all labels but one can read that one from a
single answer at the edge between two figures. Answers are counted for good; none is in the ledger.

With more than two classes the answer is the leak AUC of the best-separated pair among the classes
that have ``MIN_EXAMPLES`` training examples each; scores of the other classes change nothing.

The service does not check whether the scores are those of the attack on the gradients that were
sent. The active party knows neither the gradients of layers before the cut nor which batches the
peer had time to measure, and its own figures at the cut would differ from the peer's in their last
bits: a tolerance for those would leave room for other scores.
"""

import hashlib
import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from splitveil.active_party.run.questions import QuestionNumber
from splitveil.common.errors import AuditRefused, InvalidMessage, OutOfStep, TooLarge
from splitveil.common.privacy.attacks import LABEL_FREE
from splitveil.common.privacy.leakage import leak_auc, worst_pair_leak_auc
from splitveil.common.run.messages import AuditQuestion
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions, positions_digest

MIN_EXAMPLES = 1000
"""Fewest training rows of each class in an audit: an AUC over a few positives, among any number of
negatives, reveals something about each of them."""

MAX_LAYERS = 4
"""Most layers over the whole run. The peer chooses their names: without a limit, each new name
would be another question."""

_LAYER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names that can be printed unchanged in a report and on a terminal."""


class AuditService:
    def __init__(self, *, is_open: bool, asker: int = 0) -> None:
        self._is_open = is_open
        self._asker = asker
        self._epoch: int | None = None
        self._layers: set[bytes] = set()
        self._reported: set[tuple[int, str, str]] = set()

    def state_dict(self) -> State:
        """Return the state that goes back with the run to a checkpoint."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: State) -> None:
        """Go back to an earlier epoch; the layers that were asked about stay counted."""
        self._epoch = state["epoch"]
        self._reported.clear()  # an observer forgets it as well

    def report_once(self, question: AuditQuestion) -> bool:
        """Return whether a question is the first of its kind since the run was last resumed."""
        asked = (question.epoch, question.attack, question.layer)
        is_first = asked not in self._reported
        self._reported.add(asked)
        return is_first

    def remember(self, noted: Iterable[bytes]) -> None:
        """Count the layers about which earlier processes of this run answered."""
        self._layers |= {about for about in noted if about[:1] == self._asker_byte}

    def open_epoch(self, epoch: int) -> None:
        """Accept questions about an epoch that is over, and none about earlier epochs."""
        self._epoch = epoch

    def answer(
        self,
        question: AuditQuestion,
        positions: Positions,
        labels_of: Callable[[Positions], Tensor],
        note: Callable[[QuestionNumber, Tensor, bytes], object],
        num_classes: int = 2,
    ) -> float:
        """Return the leak AUC of the scores, rounded to two digits."""
        if not self._is_open:
            raise AuditRefused("an audit, which contract.audits_allowed or allow_audits forbids")
        labels = labels_of(positions).long()
        _refuse_rare_classes(labels, num_classes)
        self._check_time(question, positions)
        self._check_values(question, len(positions))
        measured = _measure(question.scores, labels, num_classes)
        about = self._about(question.layer)
        number = QuestionNumber.of_audit(
            question.epoch, question.attack, question.layer, self._asker
        )
        note(number, question.scores, about)
        self._layers.add(about)
        return round(measured, 2)

    @property
    def _asker_byte(self) -> bytes:
        return self._asker.to_bytes(1, "little")

    def _about(self, layer: str) -> bytes:
        digest = hashlib.blake2b(layer.encode(), digest_size=31, person=b"audited layer")
        return self._asker_byte + digest.digest()

    def _check_time(self, question: AuditQuestion, positions: Positions) -> None:
        if question.epoch != self._epoch:
            due = "none" if self._epoch is None else self._epoch + 1
            raise OutOfStep(f"an audit of epoch {question.epoch + 1}; due is {due}")
        if question.positions_digest != positions_digest(positions):
            raise OutOfStep("an audit of other rows than the training rows")

    def _check_values(self, question: AuditQuestion, num_rows: int) -> None:
        if question.attack not in LABEL_FREE:
            raise InvalidMessage(f"audit: expected one of the attacks {', '.join(LABEL_FREE)}")
        if not _LAYER_NAME.fullmatch(question.layer):
            raise InvalidMessage("audit: expected a layer's name of up to 64 plain characters")
        if len(self._layers | {self._about(question.layer)}) > MAX_LAYERS:
            raise TooLarge(f"an audit of more than {MAX_LAYERS} layers")
        scores = question.scores
        if str(scores.dtype) != "torch.float32" or scores.shape != (num_rows,):
            raise InvalidMessage(
                f"audit: expected {num_rows} float32 scores, got {scores.dtype} "
                f"{tuple(scores.shape)}"
            )
        if not bool(scores.isfinite().all()):
            raise InvalidMessage("audit: expected finite scores")


def _refuse_rare_classes(labels: Tensor, num_classes: int) -> None:
    counts = torch.bincount(labels, minlength=num_classes)
    if int((counts >= MIN_EXAMPLES).sum()) < 2:
        raise AuditRefused(
            f"an audit of {len(labels)} training rows: at least {MIN_EXAMPLES} of each of two "
            f"classes are needed"
        )


def _measure(scores: Tensor, labels: Tensor, num_classes: int) -> float:
    if num_classes == 2:
        return leak_auc(scores, labels)
    values, classes = scores.double().numpy(), labels.numpy()
    return worst_pair_leak_auc(values, classes, num_classes, MIN_EXAMPLES)
