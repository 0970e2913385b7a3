"""Answers requests of programs: who may ask for what, by which model, and what is recorded."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from splitveil.active_party.http.batcher import Batcher, Question
from splitveil.active_party.http.errors import NotAvailable, TooFast, Unusable
from splitveil.active_party.http.online_status import Call, CallLog, IdOutcome
from splitveil.active_party.http.own_features import GivenFeatures
from splitveil.active_party.http.peer_watch import PeerWatch
from splitveil.active_party.http.programs import RateLimit
from splitveil.active_party.predict.predictor import Predictions, Predictor
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind, kind_of
from splitveil.active_party.training.own_models import build_alone, predictions_alone
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.stored_ids import ABSENT
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party.served_rows import ServedRows
from splitveil.common.record.model_files import ALONE, TrainedModel
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.messages import ModelIdentity
from splitveil.common.wire.limits import ID_BYTES


class Fallback:
    """Answers ids from this party's own features. Several threads may use it."""

    def __init__(
        self, model: nn.Module, own_rows: ServedRows, labels: LabelKind = CLASS_LABELS
    ) -> None:
        self._model = model.eval()
        self._own_rows = own_rows
        self._labels = labels

    @classmethod
    def load(
        cls, settings: ActiveSettings, own_rows: ServedRows | None, joint: ModelIdentity
    ) -> "Fallback":
        folder = settings.run_folder(ACTIVE)
        if own_rows is None:
            raise SettingsError("serving.fallback: this party has no features of its own")
        if not (folder / "checkpoint" / ALONE).exists():
            raise SettingsError(
                f"serving.fallback: {folder} has no {ALONE}: only a run that was finished with "
                f"serving.fallback leaves one"
            )
        trained = TrainedModel.open(folder, settings.contract, ALONE)
        if trained.identity != joint:
            raise SettingsError(
                f"serving.fallback: {ALONE} is of {trained.identity}, the joint model of {joint}"
            )
        num_classes, seed = settings.data.num_classes, settings.model_seed
        model = build_alone(own_rows.encoder, num_classes, seed)
        trained.put_into(model)
        return cls(model, own_rows, kind_of(settings.data))

    def predict(self, question: Question, at: NDArray[np.int64]) -> Predictions:
        """Predict some of a question's ids. Shapes: ``at`` (rows,)."""
        if question.own is not None:
            found = np.ones(len(at), np.bool_)
            own = question.own.rows(torch.from_numpy(at))
        else:
            rows = self._own_rows.rows_of([question.ids[index] for index in at])
            found = rows != ABSENT
            own = self._own_rows.features_of(rows[found])
        known = np.empty(0, np.float32)
        if found.any():
            known = predictions_alone(self._model, own, self._labels)
        probabilities = np.full((len(at), *known.shape[1:]), np.nan, np.float32)
        if found.any():
            probabilities[found] = known
        return Predictions(probabilities, found, {})


class Rules(NamedTuple):
    max_ids: int
    timeout_s: float
    allowed_ids: frozenset[str] | None
    """In canonical form; None for all."""
    rate: RateLimit
    form: CanonicalForm = CanonicalForm()


@dataclass(frozen=True, eq=False)
class Pending:
    question: Question
    """With the ids that may be asked for alone."""
    num_ids: int
    is_allowed: NDArray[np.bool_]
    answer: "Future[Predictions] | None"
    """The joint model's answer to come; None if it is not asked."""
    trouble: str | None
    """Why it is not asked."""


class AnsweredBy(Enum):
    NONE = None
    """No model: the id is not known."""
    JOINT = "joint"
    """Both halves of the trained model."""
    FALLBACK = "fallback"
    """The model of the active party's own features alone."""


class Answer(NamedTuple):
    predicted: NDArray[np.float32]
    """Probabilities of label 1, (ids,), or of each class, (ids, classes), or numbers in the label's
    unit, (ids,); NaN for an id that is not known."""

    answered_by: tuple[AnsweredBy, ...]

    why_fallback: str | None = None
    """Why the joint model was not asked at all; None if it was."""

    @property
    def is_found(self) -> NDArray[np.bool_]:
        """Whether there is a prediction, (ids,)."""
        return np.array([by is not AnsweredBy.NONE for by in self.answered_by], np.bool_)


class AnswerDesk:
    """Answers requests. Several threads may use it."""

    def __init__(
        self,
        predictor: Predictor,
        batcher: Batcher,
        watch: PeerWatch,
        given: GivenFeatures,
        rules: Rules,
        log: CallLog,
        fallback: Fallback | None = None,
    ) -> None:
        self.rules = rules
        self.given = given
        self.log = log
        self._predictor = predictor
        self._batcher = batcher
        self._watch = watch
        self._fallback = fallback

    @property
    def run_id(self) -> str:
        return self._predictor.model.identity.run_id

    @property
    def trouble(self) -> str | None:
        """Why requests get no answer of the joint model now; None if they do."""
        found = self._watch.trouble
        return None if found is None else found.reason

    @property
    def has_fallback(self) -> bool:
        return self._fallback is not None

    def accept(
        self, call: Call, raw_ids: Sequence[str], rows: Sequence[Mapping[str, Any]] | None
    ) -> Pending:
        """Check a request, and ask for its answer without waiting."""
        ids = self._checked(raw_ids)
        call.ids = ids
        try:
            self.rules.rate.charge(call.program, len(ids))
        except TooFast:
            call.outcomes[IdOutcome.RATE_LIMITED] = len(ids)
            raise
        own = None if rows is None else self.given.of_rows(rows, len(ids))
        allowed = self.rules.allowed_ids
        is_allowed = np.array([allowed is None or text in allowed for text in ids], np.bool_)
        if not is_allowed.all():
            kept = np.flatnonzero(is_allowed)
            ids = [ids[index] for index in kept]
            own = None if own is None else own.rows(torch.from_numpy(kept))
        question = Question(ids, own)
        trouble = self.trouble if ids else None
        answer = self._batcher.submit(question) if ids and trouble is None else None
        return Pending(question, len(is_allowed), is_allowed, answer, trouble)

    def finish(self, call: Call, pending: Pending) -> Answer:
        """Return the answer to a request whose question is answered, or has failed."""
        predictions, why = self._joint(call, pending)
        num_allowed = int(pending.is_allowed.sum())
        call.outcomes[IdOutcome.NOT_ALLOWED] = pending.num_ids - num_allowed
        call.used_fallback = why is not None and self._fallback is not None
        if why is not None and self._fallback is None:
            call.outcomes[IdOutcome.UNAVAILABLE] = num_allowed
            raise NotAvailable(why)
        answer = self._answer(pending, predictions, why)
        call.found = int(answer.is_found.sum())
        by = Counter(answer.answered_by)
        call.outcomes[IdOutcome.JOINT] = by[AnsweredBy.JOINT]
        call.outcomes[IdOutcome.FALLBACK] = by[AnsweredBy.FALLBACK]
        call.outcomes[IdOutcome.UNKNOWN] = num_allowed - call.found
        if not call.found and why is None:
            call.status = 404
        return answer

    def _checked(self, raw_ids: Sequence[str]) -> list[str]:
        ids = self.rules.form.of(raw_ids)
        for text, raw in zip(ids, raw_ids, strict=True):
            if not text and raw.strip():
                raise Unusable("ids: one is no id by the rules of contract.ids")
            if not text:
                raise Unusable("ids: one is empty")
            try:
                size = len(text.encode())
            except UnicodeEncodeError as error:
                raise Unusable("ids: one is not valid Unicode") from error
            if size > ID_BYTES:
                raise Unusable(f"ids: one has more than {ID_BYTES} bytes")
        return ids

    def _joint(self, call: Call, pending: Pending) -> tuple[Predictions | None, str | None]:
        """Return the joint model's answer, or why there is none."""
        if pending.answer is None:
            return None, pending.trouble
        try:
            return pending.answer.result(0), None
        except SplitveilError as error:
            self._watch.lost(error)
            call.timed_out = time.monotonic() - call.began >= self.rules.timeout_s
            return None, str(error)
        except TimeoutError:
            pending.answer.cancel()
            call.timed_out = True
            return None, f"no answer within {self.rules.timeout_s:g} s (serving.timeout_s)"

    def _answer(self, pending: Pending, predictions: Predictions | None, why: str | None) -> Answer:
        shape = self._predictor.model.shape_of_row
        predicted = np.full((pending.num_ids, *shape), np.nan, np.float32)
        answered_by = np.full(pending.num_ids, AnsweredBy.NONE, object)
        asked = np.flatnonzero(pending.is_allowed)
        left = np.arange(len(asked))
        if predictions is not None:
            found = np.flatnonzero(predictions.found)
            predicted[asked[found]] = predictions.probabilities[found]
            answered_by[asked[found]] = AnsweredBy.JOINT
            left = np.flatnonzero(~predictions.found)
        if self._fallback is not None and len(left):
            alone = self._fallback.predict(pending.question, left)
            found = np.flatnonzero(alone.found)
            predicted[asked[left[found]]] = alone.probabilities[found]
            answered_by[asked[left[found]]] = AnsweredBy.FALLBACK
        return Answer(predicted, tuple(answered_by), why)
