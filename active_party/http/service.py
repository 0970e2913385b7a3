"""Answers programs' requests: checks rights, chooses the model and keeps records."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from splitveil.active_party.http.batcher import Batcher, IdQuestion
from splitveil.active_party.http.own_features import Fallback, GivenFeatures
from splitveil.active_party.http.programs import NotAvailable, RateLimit, TooFast, Unusable
from splitveil.active_party.http.status import Call, CallLog, IdOutcome, OnlineStatus
from splitveil.active_party.predict.embed_client import EmbedClient
from splitveil.active_party.predict.predictor import Predictions, Predictor
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.errors import SplitveilError
from splitveil.common.party.drift import Drift
from splitveil.common.wire.limits import ID_BYTES

logger = logging.getLogger(__name__)


LOOK_EVERY_S = 0.1
RETRY_EVERY_S = 0.5
CHECK_TIMEOUT_S = 5.0


class PeerWatch:
    """Asks passive parties which model they serve until all serve the right one, in a thread.

    Whoever notices that one is away calls ``lost``; a stream that ends is noticed here. Requests
    are then refused at once, until all have been asked again.
    """

    def __init__(self, clients: Sequence[EmbedClient], status: OnlineStatus) -> None:
        self._clients = clients
        self._status = status
        self.trouble: str | None = "no passive party was asked yet"  # of the joint model, if any
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(len(clients), thread_name_prefix="peer-check")
        self._thread = threading.Thread(target=self._work, name="peer-watch", daemon=True)

    def __enter__(self) -> Self:
        self._check()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._pool.shutdown()

    def lost(self, error: Exception) -> None:
        with self._lock:
            if self.trouble is None:
                self.trouble = str(error)
                logger.warning("the joint model cannot answer: %s", error)

    def _work(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            for client in self._clients:
                if client.has_lost_stream:
                    self._status.peers.lost(client.party)
                    self.lost(SplitveilError(f"passive party {client.party!r} is away"))
            if self.trouble is not None and not self._check():
                self._ended.wait(RETRY_EVERY_S)

    def _check(self) -> bool:
        reasons = [reason for reason in self._pool.map(self._reason_of, self._clients) if reason]
        if reasons:
            reason = "; ".join(reasons)
            with self._lock:
                if self.trouble != reason:
                    logger.warning("the joint model cannot answer: %s", reason)
                self.trouble = reason
            return False
        with self._lock:
            self.trouble = None
        logger.info("all passive parties serve the model: the joint model answers")
        return True

    def _reason_of(self, client: EmbedClient) -> str | None:
        try:
            client.connection.renew()  # certificates may have been replaced meanwhile
            client.check_model(CHECK_TIMEOUT_S)
            client.open_stream()
        except Exception as error:
            # Over a line that was dead for a while, the old connection would need as long again to
            # notice that it is back; a new one does not.
            client.close()
            self._status.peers.lost(client.party)
            if isinstance(error, SplitveilError):
                self._status.note_failed_call(error)
                return f"passive party {client.party!r}: {error}"
            logger.exception("fault while a passive party was asked for its model")
            return f"passive party {client.party!r}: {type(error).__name__}"
        self._status.peers.heard(client.party)
        return None


class Rules(NamedTuple):
    max_ids: int
    timeout_s: float
    allowed_ids: frozenset[str] | None  # in canonical form; None for all
    rate: RateLimit
    form: CanonicalForm = CanonicalForm()


@dataclass(frozen=True, eq=False)
class PendingReply:
    question: IdQuestion  # with those ids only that may be asked for
    num_ids: int
    is_allowed: NDArray[np.bool_]
    answer: "Future[Predictions] | None"  # the joint model's, to come; None if it is not asked
    trouble: str | None  # why it is not asked


Model = Literal["joint", "fallback"]  # of both halves, or of the active party's features only


class ServedPredictions(NamedTuple):
    predicted: NDArray[np.float32]
    """Probabilities of label 1, (ids,), or of each class, (ids, classes), or numbers in the label's
    unit, (ids,); NaN for an id that is not known."""
    models: list[Model | None]  # the model that answers each id; None for an unknown id
    why_fallback: str | None = None  # why the joint model was not asked at all; None if it was


class AnswerService:
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
        self.drift: Drift | None = None  # of the joint model's predictions

    @property
    def run_id(self) -> str:
        return self._predictor.model.identity.run_id

    @property
    def trouble(self) -> str | None:
        """Why requests get no answer of the joint model now; None if they do."""
        return self._watch.trouble

    @property
    def has_fallback(self) -> bool:
        return self._fallback is not None

    def accept(
        self, call: Call, raw_ids: Sequence[str], rows: Sequence[Mapping[str, Any]] | None
    ) -> PendingReply:
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
            at = np.flatnonzero(is_allowed)
            ids = [ids[index] for index in at]
            own = None if own is None else own.rows(torch.from_numpy(at))
        question = IdQuestion(ids, own)
        trouble = self.trouble if ids else None
        answer = self._batcher.submit(question) if ids and trouble is None else None
        return PendingReply(question, len(is_allowed), is_allowed, answer, trouble)

    def finish(self, call: Call, pending: PendingReply) -> ServedPredictions:
        """Return the answer to a request whose question is answered, or has failed."""
        predictions, why = self._joint(call, pending)
        num_allowed = int(pending.is_allowed.sum())
        call.outcomes[IdOutcome.NOT_ALLOWED] = pending.num_ids - num_allowed
        call.used_fallback = why is not None and self._fallback is not None
        if why is not None and self._fallback is None:
            call.outcomes[IdOutcome.UNAVAILABLE] = num_allowed
            raise NotAvailable(why)
        answer = self._answer(pending, predictions, why)
        call.outcomes[IdOutcome.JOINT] = answer.models.count("joint")
        call.outcomes[IdOutcome.FALLBACK] = answer.models.count("fallback")
        call.found = len(answer.models) - answer.models.count(None)
        call.outcomes[IdOutcome.UNKNOWN] = num_allowed - call.found
        if not call.found and why is None:
            call.status = 404
        return answer

    def _checked(self, raw_ids: Sequence[str]) -> list[str]:
        _check_sizes(raw_ids)  # first: marks in a row take the square of their number to normalise
        ids = self.rules.form.of(raw_ids)
        for text, raw in zip(ids, raw_ids, strict=True):
            if not text:
                what = "no id by the rules of contract.ids" if raw.strip() else "empty"
                raise Unusable(f"ids: one is {what}")
        _check_sizes(ids)
        return ids

    def _joint(self, call: Call, pending: PendingReply) -> tuple[Predictions | None, str | None]:
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

    def _answer(
        self, pending: PendingReply, predictions: Predictions | None, why: str | None
    ) -> ServedPredictions:
        shape = self._predictor.model.shape_of_row
        predicted = np.full((pending.num_ids, *shape), np.nan, np.float32)
        models = np.full(pending.num_ids, None, object)
        asked = np.flatnonzero(pending.is_allowed)
        left = np.arange(len(asked))
        if predictions is not None:
            found = np.flatnonzero(predictions.found)
            predicted[asked[found]] = predictions.probabilities[found]
            models[asked[found]] = "joint"
            if self.drift is not None:
                self.drift.note(predictions.probabilities[found])
            left = np.flatnonzero(~predictions.found)
        if self._fallback is not None and len(left):
            own = self._fallback.predict(pending.question, left)
            found = np.flatnonzero(own.found)
            predicted[asked[left[found]]] = own.probabilities[found]
            models[asked[left[found]]] = "fallback"
        return ServedPredictions(predicted, models.tolist(), why)


def _check_sizes(ids: Sequence[str]) -> None:
    try:
        largest = max(len(text.encode()) for text in ids)
    except UnicodeEncodeError as error:
        raise Unusable("ids: one is not valid Unicode") from error
    if largest > ID_BYTES:
        raise Unusable(f"ids: one has more than {ID_BYTES} bytes")
