"""Metrics of the active party's online predictions: how many, how fast, by which model.

Every request is recorded in the metrics and in the transcript. No record has an id or a prediction.
Everything is a count of requests, ids, questions or seconds. One figure depends on what was
predicted, the drift of scores, which is about a thousand predictions together: with all labels of
the training swapped, the other metrics are the same.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from splitveil.active_party.http.programs import RequestError
from splitveil.common.party import party_status
from splitveil.common.record.transcript import AnsweredRequest, Transcript
from splitveil.common.run.contract import ACTIVE, Contract

STAGES = ("starting", "serving", "closing")

_OUTCOMES = {
    200: "answered",
    401: "not_admitted",
    404: "not_found",
    413: "too_large",
    415: "unusable",
    422: "unusable",
    429: "rate_limited",
    503: "unavailable",
    500: "fault",
}
FALLBACK = "fallback"  # the outcome of a request that was answered without the joint model


class IdOutcome(Enum):
    JOINT = "joint"
    FALLBACK = "fallback"  # the model of the active party's own features has answered
    UNKNOWN = "unknown"  # no prediction, because a party has no row of it
    NOT_ALLOWED = "not_allowed"
    RATE_LIMITED = "rate_limited"  # its program asks for too many
    UNAVAILABLE = "unavailable"  # a passive party is away or late, and there is no other model


class OnlineStatus(party_status.PartyStatus):
    def __init__(self, contract: Contract) -> None:
        super().__init__(ACTIVE, contract, STAGES)
        for name in contract.passive_parties:
            self.peers.expect(name)
        self._trouble_of: Callable[[], str | None] = lambda: "starting"
        self._has_fallback = False
        counter = self.metrics.counter
        self._requests = counter("predict_requests", "Requests of programs.", ["outcome"])
        self._seconds = self.metrics.histogram(
            "predict_seconds",
            "Seconds from the reading of a request to its answer or refusal.",
            party_status.ANSWER_BUCKETS_S,
        )
        # From 0 on: an increase from nothing to 1 is none to Prometheus.
        for outcome in (*_OUTCOMES.values(), FALLBACK):
            self._requests.labels(outcome)
        self._ids = counter("predict_ids", "Ids in these requests.", ["outcome"])
        for one in IdOutcome:
            self._ids.labels(one.value)
        gauge = self.metrics.gauge
        self._question_ids = self.metrics.histogram(
            "question_ids", "Ids in one question to the passive parties.", party_status.SIZE_BUCKETS
        )
        self._question_requests = self.metrics.histogram(
            "question_requests", "Requests that one question answers.", party_status.SIZE_BUCKETS
        )
        self._timeouts = self.metrics.counter(
            "predict_timeouts", "Requests without an answer within serving.timeout_s."
        )
        self._waiting = gauge("predict_waiting", "Requests that wait to be asked.")
        about = "Drift of the last 1,000 predictions from those of test rows; above .25, of note."
        self.drift = gauge("score_psi", about, ["score"])
        models = gauge("answering", "1 for the model that answers requests now.", ["model"])
        for model in ("joint", FALLBACK, "none"):
            models.labels(model).set_function(partial(self._is_answering, model))

    # ---- health ----

    def follow(
        self, trouble_of: Callable[[], str | None], waiting_of: Callable[[], int], *, fallback: bool
    ) -> None:
        """Ask for the state whenever somebody wants to know it."""
        self._trouble_of = trouble_of
        self._waiting.set_function(waiting_of)
        self._has_fallback = fallback
        self.enter_stage("serving")

    def close(self) -> None:
        self.follow(lambda: "stopping", lambda: 0, fallback=False)
        self.enter_stage("closing")

    @property
    def answering(self) -> str:
        """The model that answers requests now: joint, fallback or none."""
        if self._trouble_of() is None:
            return "joint"
        return FALLBACK if self._has_fallback else "none"

    def _is_answering(self, model: str) -> bool:
        return self.answering == model

    @property
    def readiness(self) -> party_status.ServingState:
        trouble = self._trouble_of()
        if trouble is None:
            return party_status.ServingState(ready=True, reason="the joint model answers")
        return party_status.ServingState(ready=False, reason=trouble)

    def facts(self) -> dict[str, str]:
        return super().facts() | {"answering": self.answering}

    # ---- requests ----

    def note_call(self, call: "Call", seconds: float) -> None:
        """Count a request that is answered or refused, and its ids by what has become of them."""
        outcome = FALLBACK if call.used_fallback else _OUTCOMES.get(call.status, "fault")
        self._requests.labels(outcome).inc()
        self._seconds.observe(seconds)
        for of_ids, number in call.outcomes.items():
            self._ids.labels(of_ids.value).inc(number)
        if call.timed_out:
            self._timeouts.inc()

    def note_question(self, num_requests: int, num_ids: int) -> None:
        self._question_requests.observe(num_requests)
        self._question_ids.observe(num_ids)


@dataclass
class Call:
    program: str
    ids: Sequence[str] = ()
    found: int = 0
    status: int = 200
    used_fallback: bool = False  # whether the joint model was not asked, or has not answered
    timed_out: bool = False  # whether there was no answer within ``serving.timeout_s``
    began: float = field(default_factory=time.monotonic)
    outcomes: Counter[IdOutcome] = field(default_factory=Counter)


class CallLog:
    """Records requests. Several threads may use it."""

    def __init__(self, status: OnlineStatus, transcript: Transcript | None = None) -> None:
        self.answered: Counter[int] = Counter()  # requests by status
        self._status = status
        self._transcript = transcript

    @contextmanager
    def noted(self, program: str) -> Iterator[Call]:
        """Record a request once it is answered or refused, whatever its outcome."""
        call = Call(program)
        try:
            yield call
        except RequestError as error:
            call.status = error.status
            raise
        except BaseException:
            call.status = 500
            raise
        finally:
            self._record(call, time.monotonic() - call.began)

    @contextmanager
    def turning_away(self) -> Iterator[None]:
        """Only count a request that is refused within the block, so that nobody fills the disk."""
        try:
            yield
        except RequestError as error:
            self.answered[error.status] += 1
            self._status.note_call(Call("", status=error.status), 0.0)
            raise

    def _record(self, call: Call, seconds: float) -> None:
        self.answered[call.status] += 1
        self._status.note_call(call, seconds)
        if self._transcript is not None:
            self._transcript.note_answered(
                AnsweredRequest(
                    program=call.program,
                    num_ids=len(call.ids),
                    found=call.found,
                    status=call.status,
                    milliseconds=round(1000 * seconds, 3),
                )
            )
