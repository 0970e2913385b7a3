"""Answers requests of programs: who may ask for what, by which model, and what is recorded."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from splitveil.active_party.inference.predictor import Predictions, Predictor
from splitveil.active_party.online.batcher import Batcher
from splitveil.active_party.online.errors import (
    NotAdmitted,
    NotAvailable,
    RequestError,
    TooManyIds,
    Unusable,
)
from splitveil.active_party.online.fallback import Fallback
from splitveil.active_party.online.own_features import GivenFeatures
from splitveil.active_party.online.peer_watch import PeerWatch
from splitveil.active_party.online.questions import Answer, AnsweredBy, Question
from splitveil.active_party.online.rate_limit import RateLimit
from splitveil.common.data.features import Features
from splitveil.common.data.ids import canonical_texts
from splitveil.common.errors import SplitveilError
from splitveil.common.party.transcript import Transcript
from splitveil.common.party.transcript_lines import Answered
from splitveil.common.wire.limits import ID_BYTES

EncodeOwn = Callable[[GivenFeatures], Features | None]
"""Encodes the own features of a request, if it has any."""


class Rules(NamedTuple):
    """What programs may ask for."""

    max_ids: int
    timeout_s: float
    allowed_ids: frozenset[str] | None
    """In canonical form; None for all."""
    rate: RateLimit
    records_ids: bool
    """Whether the transcript names the ids of each request."""


@dataclass
class Call:
    """One request, for the transcript."""

    program: str
    protocol: str
    ids: Sequence[str] = ()
    found: int = 0
    status: int = 200


@dataclass(frozen=True, eq=False)
class Pending:
    """A request that was accepted."""

    question: Question
    """With the ids that may be asked for alone."""
    num_ids: int
    is_allowed: "np.ndarray[Any, np.dtype[np.bool_]]"
    answer: "Future[Predictions] | None"
    """The joint model's answer to come; None if it is not asked."""
    trouble: str | None
    """Why it is not asked."""


class AnswerDesk:
    """Answers requests. Several threads may use it.

    Args:
        predictor: the joint model, with this party's rows.
        batcher: asks it.
        watch: knows whether the passive parties answer.
        given: encodes own features that programs send.
        rules: what programs may ask for.
        fallback: answers in place of the joint model, if there is one.
        transcript: records every request, if there is one.
    """

    def __init__(
        self,
        predictor: Predictor,
        batcher: Batcher,
        watch: PeerWatch,
        given: GivenFeatures,
        rules: Rules,
        fallback: Fallback | None = None,
        transcript: Transcript | None = None,
    ) -> None:
        self.rules = rules
        self.given = given
        self.answered: Counter[int] = Counter()
        """Number of requests by status."""
        self._predictor = predictor
        self._batcher = batcher
        self._watch = watch
        self._fallback = fallback
        self._transcript = transcript

    @property
    def run_id(self) -> str:
        """The run that trained the model."""
        return self._predictor.model.identity.run_id

    @property
    def trouble(self) -> str | None:
        """Why requests get no answer of the joint model now; None if they do."""
        found = self._watch.trouble
        return None if found is None else found.reason

    @property
    def has_fallback(self) -> bool:
        """Whether another model answers meanwhile."""
        return self._fallback is not None

    @contextmanager
    def noted(self, program: str, protocol: str) -> Iterator[Call]:
        """Record a request once it is answered or refused, whatever its outcome."""
        call, began = Call(program, protocol), time.monotonic()
        try:
            yield call
        except RequestError as error:
            call.status = error.status
            raise
        except BaseException:
            call.status = 500
            raise
        finally:
            self.answered[call.status] += 1
            if self._transcript is not None:
                self._transcript.note_answered(
                    Answered(
                        program=program,
                        protocol=protocol,
                        num_ids=len(call.ids),
                        found=call.found,
                        status=call.status,
                        milliseconds=round(1000 * (time.monotonic() - began), 3),
                        ids=tuple(call.ids) if self.rules.records_ids else None,
                    )
                )

    def accept(self, call: Call, raw_ids: Sequence[str], encode: EncodeOwn) -> Pending:
        """Check a request, and ask for its answer without waiting.

        Args:
            call: records its ids.
            raw_ids: as the program wrote them.
            encode: encodes its own features.

        Raises:
            RequestError: the request is not accepted.
        """
        ids = self._checked(raw_ids)
        call.ids = ids
        self.rules.rate.charge(call.program, len(ids))
        own = encode(self.given)
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
        """Return the answer to a request whose question is answered, or has failed.

        Raises:
            NotAvailable: a passive party is away, and there is no other model.
        """
        predictions, why = self._joint(pending)
        answer = self._answer(pending, predictions, why)
        call.found = int(answer.is_found.sum())
        if not call.found and why is None:
            call.status = 404
        return answer

    def _checked(self, raw_ids: Sequence[str]) -> list[str]:
        if not raw_ids:
            raise Unusable("ids: there are none")
        most = self.rules.max_ids
        if len(raw_ids) > most:
            raise TooManyIds(f"ids: at most {most}, got {len(raw_ids)}")
        ids = canonical_texts(raw_ids)
        for text in ids:
            if not text:
                raise Unusable("ids: one is empty")
            try:
                size = len(text.encode())
            except UnicodeEncodeError as error:
                raise Unusable("ids: one is not valid Unicode") from error
            if size > ID_BYTES:
                raise Unusable(f"ids: one has more than {ID_BYTES} bytes")
        return ids

    def _joint(self, pending: Pending) -> tuple[Predictions | None, str | None]:
        """Return the joint model's answer, or why there is none."""
        if pending.answer is None:
            return None, pending.trouble
        try:
            return pending.answer.result(0), None
        except SplitveilError as error:
            self._watch.lost(error)
            return None, str(error)
        except TimeoutError:
            pending.answer.cancel()
            return None, f"no answer within {self.rules.timeout_s:g} s (serving.timeout_s)"

    def _answer(self, pending: Pending, predictions: Predictions | None, why: str | None) -> Answer:
        if why is not None and self._fallback is None:
            raise NotAvailable(why)
        shape = self._predictor.model.shape_of_row
        probabilities = np.full((pending.num_ids, *shape), np.nan, np.float32)
        answered_by = np.full(pending.num_ids, AnsweredBy.NONE, object)
        asked = np.flatnonzero(pending.is_allowed)
        left = np.arange(len(asked))
        if predictions is not None:
            found = np.flatnonzero(predictions.found)
            probabilities[asked[found]] = predictions.probabilities[found]
            answered_by[asked[found]] = AnsweredBy.JOINT
            left = np.flatnonzero(~predictions.found)
        if self._fallback is not None and len(left):
            alone = self._fallback.predict(pending.question, left)
            found = np.flatnonzero(alone.found)
            probabilities[asked[left[found]]] = alone.probabilities[found]
            answered_by[asked[left[found]]] = AnsweredBy.FALLBACK
        return Answer(probabilities, tuple(answered_by), why)


def admitted(desk: AnswerDesk, find: Callable[[], str]) -> str:
    """Return the name of the program that asks; one that is not admitted is counted.

    Raises:
        NotAdmitted: it is not known.
    """
    try:
        return find()
    except NotAdmitted as error:
        desk.answered[error.status] += 1
        raise


def as_columns(columns: Sequence[tuple[str, Sequence[Any]]], num_ids: int) -> Mapping[str, Any]:
    """Return named columns after checking that each name comes once, with a value for each id.

    Raises:
        Unusable: one does not.
    """
    named = dict(columns)
    if len(named) < len(columns):
        raise Unusable("features: a column comes twice")
    if any(len(values) != num_ids for values in named.values()):
        raise Unusable(f"features: expected {num_ids} values in each column")
    return named
