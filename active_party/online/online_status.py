"""What the active party says about its online predictions: how many, how fast, by which model.

Everything is a count of requests, ids, questions or seconds. No figure depends on what was
predicted: with all labels of the training swapped, the metrics are the same.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial

from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.status.party_status import PartyStatus, Readiness
from splitveil.common.status.registry import ANSWER_BUCKETS_S, SIZE_BUCKETS

STAGES = ("starting", "serving", "closing")
"""The stages of the program, in order."""

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
FALLBACK = "fallback"
"""The outcome of a request that was answered without the joint model."""


class IdOutcome(Enum):
    """What has become of one id of a request."""

    JOINT = "joint"
    """The joint model has answered."""
    FALLBACK = "fallback"
    """The model of the active party's own features has answered."""
    UNKNOWN = "unknown"
    """There is no prediction, because a party has no row of it."""
    NOT_ALLOWED = "not_allowed"
    """It is not in ``serving.allowed_ids``."""
    RATE_LIMITED = "rate_limited"
    """Its program asks for too many."""
    UNAVAILABLE = "unavailable"
    """A passive party is away or late, and there is no other model."""


class OnlineStatus(PartyStatus):
    """The state of ``splitveil active serve``, for its operators.

    Args:
        contract: of the run that trained the model.
    """

    def __init__(self, contract: Contract) -> None:
        super().__init__(ACTIVE, contract, STAGES)
        for name in contract.passive_parties:
            self.peers.expect(name)
        self._trouble_of: Callable[[], str | None] = lambda: "starting"
        self._has_fallback = False
        self._add_request_metrics()
        self._add_question_metrics()

    def _add_request_metrics(self) -> None:
        counter = self.metrics.counter
        self._requests = counter("predict_requests", "Requests of programs.", ["outcome"])
        self._seconds = self.metrics.histogram(
            "predict_seconds",
            "Seconds from the reading of a request to its answer or refusal.",
            ANSWER_BUCKETS_S,
        )
        # From 0 on: an increase from nothing to 1 is none to Prometheus.
        for outcome in (*_OUTCOMES.values(), FALLBACK):
            self._requests.labels(outcome)
        self._ids = counter("predict_ids", "Ids in these requests.", ["outcome"])
        for one in IdOutcome:
            self._ids.labels(one.value)

    def _add_question_metrics(self) -> None:
        gauge = self.metrics.gauge
        self._question_ids = self.metrics.histogram(
            "question_ids", "Ids in one question to the passive parties.", SIZE_BUCKETS
        )
        self._question_requests = self.metrics.histogram(
            "question_requests", "Requests that one question answers.", SIZE_BUCKETS
        )
        self._timeouts = self.metrics.counter(
            "predict_timeouts", "Requests without an answer within serving.timeout_s."
        )
        self._waiting = gauge("predict_waiting", "Requests that wait to be asked.")
        models = gauge("answering", "1 for the model that answers requests now.", ["model"])
        for model in ("joint", FALLBACK, "none"):
            models.labels(model).set_function(partial(self._is_answering, model))

    # ---- health ----

    def follow(
        self, trouble_of: Callable[[], str | None], waiting_of: Callable[[], int], *, fallback: bool
    ) -> None:
        """Ask for the state whenever somebody wants to know it.

        Args:
            trouble_of: returns why the joint model cannot answer, or None.
            waiting_of: returns the number of requests that wait to be asked.
            fallback: whether another model answers meanwhile.
        """
        self._trouble_of = trouble_of
        self._waiting.set_function(waiting_of)
        self._has_fallback = fallback
        self.enter_stage("serving")

    def close(self) -> None:
        """Note that no more requests are taken."""
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
    def readiness(self) -> Readiness:
        """Whether the joint model answers."""
        trouble = self._trouble_of()
        if trouble is None:
            return Readiness(ready=True, reason="the joint model answers")
        return Readiness(ready=False, reason=trouble)

    def facts(self) -> dict[str, str]:
        """Return what the endpoint tells beside health and readiness."""
        return super().facts() | {"answering": self.answering}

    # ---- requests ----

    def note_request(self, status: int, seconds: float, *, used_fallback: bool = False) -> None:
        """Count a request.

        Args:
            status: its HTTP status.
            seconds: how long it took.
            used_fallback: whether the joint model was not asked, or has not answered.
        """
        outcome = FALLBACK if used_fallback else _OUTCOMES.get(status, "fault")
        self._requests.labels(outcome).inc()
        self._seconds.observe(seconds)

    def note_ids(self, numbers: Mapping[IdOutcome, int]) -> None:
        """Count the ids of a request by what has become of them."""
        for outcome, number in numbers.items():
            self._ids.labels(outcome.value).inc(number)

    def note_question(self, num_requests: int, num_ids: int) -> None:
        """Count a question to the passive parties."""
        self._question_requests.observe(num_requests)
        self._question_ids.observe(num_ids)

    def note_timeout(self) -> None:
        """Count a request that was not answered in time."""
        self._timeouts.inc()
