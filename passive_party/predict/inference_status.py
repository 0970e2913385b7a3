"""Reports the activations that a passive party serves: how many, how fast, to whom.

Everything is a count of requests, ids, streams or seconds; no figure depends on a label or a
prediction, and this party never has either.
"""

from collections.abc import Callable

from splitveil.common.errors import Busy, OtherModel, TableRefused
from splitveil.common.party.party_status import ANSWER_BUCKETS_S, PartyStatus
from splitveil.common.run.contract import ACTIVE, Contract

STAGES = ("starting", "serving", "closing")  # the stages of the program, in order
CALLS = ("Describe", "Embed", "EmbedTable")


class InferenceStatus(PartyStatus):
    def __init__(self, party: str, contract: Contract) -> None:
        super().__init__(party, contract, STAGES)
        self.peers.expect(ACTIVE)
        self._rows = self.metrics.gauge("served_rows", "Rows that are answered for.")
        self._streams = self.metrics.gauge("embed_streams", "Streams of requests that are open.")
        self._requests = self.metrics.counter(
            "embed_requests", "Requests of the active party that were answered.", ["call"]
        )
        self._seconds = self.metrics.histogram(
            "embed_seconds",
            "Seconds for the activations of one request, without waits for answers.ids_per_second.",
            ANSWER_BUCKETS_S,
        )
        self._ids = self.metrics.counter("embed_ids", "Ids in these requests.", ["outcome"])
        self._waited = self.metrics.counter(
            "embed_waited_seconds", "Seconds for which answers.ids_per_second held requests back."
        )
        # From 0 on: an increase from nothing to 1 is none to Prometheus.
        for call in CALLS:
            self._requests.labels(call)
        for outcome in ("known", "unknown", "masked"):
            self._ids.labels(outcome)
        for reason in (Busy, OtherModel, TableRefused):
            self._refused.labels(reason.__name__)

    def follow(self, run_id: str, num_rows: int, streams_of: Callable[[], int]) -> None:
        self.name_run(run_id)
        self._rows.set(num_rows)
        self._streams.set_function(streams_of)
        self.enter_stage("serving")
        self.set_ready("serving")

    def close(self) -> None:
        self.enter_stage("closing")
        self.set_ready("stopping", ready=False)

    def note_described(self) -> None:
        self._heard("Describe")

    def note_embedded(self, num_ids: int, num_known: int, seconds: float) -> None:
        self._heard("Embed")
        self._ids.labels("known").inc(num_known)
        self._ids.labels("unknown").inc(num_ids - num_known)
        self._seconds.observe(seconds)

    def note_masked(self, num_ids: int) -> None:
        """Count masked ids whose keys for sealed rows were requested."""
        self._heard("EmbedTable")
        self._ids.labels("masked").inc(num_ids)

    def note_waited(self, seconds: float) -> None:
        self._waited.inc(seconds)

    def note_stream_ended(self, num_left: int) -> None:
        if not num_left:
            self.peers.left(ACTIVE)

    def _heard(self, call: str) -> None:
        self.peers.heard(ACTIVE)
        self._requests.labels(call).inc()
