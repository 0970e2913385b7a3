"""The audit desk: what the label owner measures for its peer, and the limits to it. No I/O.

A leak AUC of scores that the peer chooses is an answer about the labels. Therefore the desk is
closed unless the contract and this party's own settings open it, and then answers about all
training examples at once, at least ``MIN_EXAMPLES`` of each class, once per attack, layer and
epoch, for a few layers, with two digits. Of one positive among 20,000 rows four answers
would tell which it is. Whoever knows all labels but one still reads it from one answer, at the
edge between two figures. What was answered is counted for good; the ledger counts none of it.

With several classes the answer is the leak AUC of the pair told apart best, among the classes that
hold ``MIN_EXAMPLES`` training examples each; scores of the others change nothing.

Whether the scores are what the attack gives on the gradients that were sent is not checked. The
active party does not know the gradients of layers before the cut, nor which batches the peer had
time to measure, and its own figures at the cut would differ from the peer's in their last bits: a
margin for those is room for other scores.
"""

import hashlib
import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from splitveil.common.errors import AuditRefused, InvalidMessage, OutOfStep, TooLarge
from splitveil.common.privacy.label_free import LABEL_FREE
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.privacy.pair_aucs import worst_pair_leak_auc
from splitveil.common.run.messages import AuditQuestion
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions, positions_digest

MIN_EXAMPLES = 1000
"""Fewest training rows of each class that one audit is about: an AUC of a few positives, among
however many negatives, tells about each of them."""

MAX_LAYERS = 4
"""Different layers over the whole run. Their names are the peer's: without a limit each new one
would be another question."""

_LAYER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Printable as it is, in a report and on a terminal."""


class AuditDesk:
    """Keeps count of the questions of one run.

    Args:
        is_open: whether both the contract and this party's settings allow audits.
        asker: number of the party that asks; each has its own questions.
    """

    def __init__(self, *, is_open: bool, asker: int = 0) -> None:
        self._is_open = is_open
        self._asker = asker
        self._epoch: int | None = None
        self._layers: set[bytes] = set()

    def state_dict(self) -> State:
        """Return what goes back with the run."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: State) -> None:
        """Go back to an earlier epoch; which layers were asked about stays."""
        self._epoch = state["epoch"]

    def remember(self, noted: Iterable[bytes]) -> None:
        """Take up what earlier processes of this run answered about.

        Args:
            noted: of any party's questions.
        """
        self._layers |= {about for about in noted if about[:1] == self._asker_byte}

    def open_epoch(self, epoch: int) -> None:
        """Take questions about an epoch that is over, and no more about those before it."""
        self._epoch = epoch

    def answer(
        self,
        question: AuditQuestion,
        positions: Positions,
        labels_of: Callable[[Positions], Tensor],
        note: Callable[[int, Tensor, bytes], object],
        num_classes: int = 2,
    ) -> float:
        """Return the leak AUC of the scores, rounded to two digits.

        Args:
            question: what the peer sent.
            positions: of the training rows, ascending.
            labels_of: gives the labels of some positions.
            note: remembers which scores were measured under a number, and for which layer, for
                good; raises OutOfStep where others were before.
            num_classes: how many classes the labels are of.

        Raises:
            AuditRefused: there are no audits in this run, or too few examples for one.
            OutOfStep: another epoch or other rows than those due, or a second question: the same
                scores again get the same answer.
            TooLarge: a layer beyond the first few.
            InvalidMessage: the scores or names cannot be what they claim to be.
        """
        if not self._is_open:
            raise AuditRefused("an audit, which contract.audits_allowed or allow_audits forbids")
        labels = labels_of(positions).long()
        _refuse_rare_classes(labels, num_classes)
        self._check_time(question, positions)
        self._check_values(question, len(positions))
        measured = _measure(question.scores, labels, num_classes)
        about = self._about(question.layer)
        note(_number(question, self._asker), question.scores, about)
        self._layers.add(about)
        return round(measured, 2)

    @property
    def _asker_byte(self) -> bytes:
        return self._asker.to_bytes(1, "little")

    def _about(self, layer: str) -> bytes:
        """Return what names a layer of this asker's in the log of answers, 32 bytes."""
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
    values, places = scores.double().numpy(), labels.numpy()
    return worst_pair_leak_auc(values, places, num_classes, MIN_EXAMPLES)


def _number(question: AuditQuestion, asker: int) -> int:
    """Name asker, epoch, attack and layer by a number that is no batch's place."""
    text = f"{question.epoch} {question.attack} {question.layer}"
    text += f" {asker}" if asker else ""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1 << 63
