"""Reports a party's state while one of its programs runs, as metrics and as health.

Everything is about steps, messages, seconds, a thousand rows and whole runs, never about one
example. Nothing here depends on labels, except what the active party adds
(``active_party/monitor/active_status.py``, and in ``active_party/http/status.py`` the drift of its
scores): a passive party's operators would see the same if all labels were swapped. Nothing is
global: a process may hold several parties, each with a registry of its own.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from splitveil.common.errors import ContractMismatch, PeerError, ProtocolError
from splitveil.common.record.progress import ProgressBar
from splitveil.common.record.transcript import Crossing
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.progress import Phases
from splitveil.common.text.log_lines import add_to_log_lines
from splitveil.common.text.wording import VERSION

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
"""Upper bounds of the histogram of seconds per step: from a small model on one machine to a peer
that was away."""

ANSWER_BUCKETS_S = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
"""The same for seconds per answer of a program that serves."""

SIZE_BUCKETS = tuple(float(digit * 10**power) for power in range(5) for digit in (1, 2, 5))
"""The same for numbers of ids or requests."""

OPEN = "the run is open with the active party"

_PREFIX = "splitveil"

_logger = logging.getLogger(__name__)


class Registry(CollectorRegistry):
    """A registry without the creation time of each series."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class PartyMetrics:
    def __init__(self) -> None:
        self.registry = Registry()
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, meaning, labels, namespace=_PREFIX, registry=self.registry)

    def gauge(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, meaning, labels, namespace=_PREFIX, registry=self.registry)

    def unknown_gauge(self, name: str, meaning: str) -> Gauge:
        """Make a gauge that is NaN until it is known: 0 would be read as a figure."""
        made = self.gauge(name, meaning)
        made.set(math.nan)
        return made

    def histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, meaning, namespace=_PREFIX, registry=self.registry, buckets=buckets)


class PhaseCollector(Collector):
    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "splitveil_phase_seconds",
            "Seconds that this process has spent in each phase; they add up to its age.",
            labels=["phase"],
        )
        for phase, seconds in self._phases.seconds().items():
            family.add_metric([phase.value], seconds)
        return [family]


class Presence:
    def __init__(self, metrics: PartyMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._heard_at: dict[str, float] = {}
        self._lost: set[str] = set()
        self._away: set[str] = set()
        self._connected = metrics.gauge(
            "peer_connected",
            "1 while the peer is there, 0 before its first message and while it is away.",
            ["peer"],
        )
        self._silence = metrics.gauge(
            "peer_silence_seconds", "Seconds since the peer's last message.", ["peer"]
        )
        self._losses = metrics.counter(
            "connection_losses", "Times that the connection to the peer broke off.", ["peer"]
        )
        self._returns = metrics.counter(
            "reconnects", "Times that a peer that was lost came back.", ["peer"]
        )

    def expect(self, peer: str) -> None:
        """Name a peer before it is heard, so that its series exist from the start."""
        self._connected.labels(peer).set(0)
        self._losses.labels(peer)
        self._returns.labels(peer)

    def heard(self, peer: str) -> None:
        now = self._clock()
        with self._lock:
            is_new = peer not in self._heard_at
            self._heard_at[peer] = now
            was_lost, was_away = peer in self._lost, peer in self._away
            self._lost.discard(peer)
            self._away.discard(peer)
        if was_lost:
            self._returns.labels(peer).inc()
        if was_lost or was_away or is_new:
            self._connected.labels(peer).set(1)
        if is_new:
            self._silence.labels(peer).set_function(lambda: self.silent_s(peer) or 0.0)

    def lost(self, peer: str) -> None:
        with self._lock:
            if peer in self._lost or peer not in self._heard_at:
                return
            self._lost.add(peer)
        self._losses.labels(peer).inc()
        self._connected.labels(peer).set(0)

    def left(self, peer: str) -> None:
        """Note that the peer has left because it has nothing to ask, which is no loss."""
        with self._lock:
            if peer in self._lost or peer not in self._heard_at:
                return
            self._away.add(peer)
        self._connected.labels(peer).set(0)

    def silent_s(self, peer: str) -> float | None:
        """Return the seconds since the peer's last message; None before the first one."""
        with self._lock:
            heard_at = self._heard_at.get(peer)
        return None if heard_at is None else self._clock() - heard_at


def _kinds_of(error: type[PeerError]) -> Iterator[str]:
    yield error.__name__
    for kind in error.__subclasses__():
        yield from _kinds_of(kind)


class ServingState(NamedTuple):
    ready: bool
    reason: str  # why not, or what it is doing


class PartyStatus:
    """The state of one party's program, for its operators.

    Its methods take microseconds and never raise; any thread may call them.
    """

    def __init__(
        self,
        party: str,
        contract: Contract,
        stages: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.party = party
        self.run_name = contract.run_name
        self.run_id = ""
        self.metrics = PartyMetrics()
        self.peers = Presence(self.metrics, clock)
        self._stage_of: Callable[[], str] = lambda: stages[0]
        self._readiness = ServingState(ready=False, reason=stages[0])
        gauge, counter = self.metrics.gauge, self.metrics.counter
        self._info = gauge(
            "run_info",
            "Always 1; its labels name party, run and version.",
            ["party", "run", "run_id", "version"],
        )
        self._info.labels(self.party, self.run_name, "", VERSION).set(1)
        shown = gauge("stage", "1 for the stage that the program is in, 0 for others.", ["stage"])
        for one in stages:
            shown.labels(one).set_function(partial(self._is_in, one))
        ready = gauge("ready", "1 while /readyz answers with 200.")
        ready.set_function(lambda: self.readiness.ready)
        self._messages = counter(
            "messages", "Messages that crossed the wire.", ["direction", "call"]
        )
        self._bytes = counter(
            "message_bytes",
            "Bytes of these messages, without the framing of TLS and HTTP/2.",
            ["direction", "call"],
        )
        self._crossed: dict[tuple[str, str], tuple[Counter, ...]] = {}
        self._refused = counter(
            "refused_messages", "Messages of the peer that this party refused.", ["reason"]
        )
        self._failed = counter(
            "failed_calls", "Calls to the peer that got no usable answer.", ["reason"]
        )
        # From 0 on: an increase from nothing to 1 is none to Prometheus.
        for reason in (ContractMismatch.__name__, *_kinds_of(ProtocolError)):
            self._refused.labels(reason)
        for reason in _kinds_of(PeerError):
            self._failed.labels(reason)

    # ---- health ----

    @property
    def stage(self) -> str:
        return self._stage_of()

    @property
    def readiness(self) -> ServingState:
        return self._readiness

    def facts(self) -> dict[str, str]:
        return {
            "party": self.party,
            "run": self.run_name,
            "run_id": self.run_id,
            "stage": self.stage,
        }

    def set_ready(self, reason: str, *, ready: bool = True) -> None:
        self._readiness = ServingState(ready, reason)

    def enter_stage(self, stage: str) -> None:
        self.follow_stage(lambda: stage)

    def follow_stage(self, stage_of: Callable[[], str]) -> None:
        self._stage_of = stage_of

    def _is_in(self, stage: str) -> bool:
        return self.stage == stage

    def name_run(self, run_id: str) -> None:
        if run_id == self.run_id:
            return
        self._info.remove(self.party, self.run_name, self.run_id, VERSION)
        self.run_id = run_id
        add_to_log_lines(run_id=run_id)
        self._info.labels(self.party, self.run_name, run_id, VERSION).set(1)

    # ---- messages ----

    def note(self, crossing: Crossing) -> None:
        crossed = self._crossed.get((crossing.direction, crossing.kind))
        if crossed is None:  # to look up a series by its labels takes longer than to count
            call = crossing.kind.partition(" ")[0]
            counters = (self._messages, self._bytes)
            crossed = tuple(one.labels(crossing.direction, call) for one in counters)
            self._crossed[crossing.direction, crossing.kind] = crossed
        crossed[0].inc()
        crossed[1].inc(len(crossing.data))

    def note_refused(self, error: Exception) -> None:
        self._refused.labels(type(error).__name__).inc()

    def note_failed_call(self, error: Exception) -> None:
        self._failed.labels(type(error).__name__).inc()


STAGES = ("starting", "waiting", "aligning", "training", "stopping", "finished", "ended")
"""The stages of a run, in order; a run that stops can be resumed, one that has ended cannot."""


class RunStatus(PartyStatus):
    def __init__(
        self, party: str, contract: Contract, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(party, contract, STAGES, clock)
        self.phases = Phases()
        self.metrics.registry.register(PhaseCollector(self.phases))
        self._contract = contract
        self._clock = clock
        self._steps_per_epoch = 0
        self._last_step_at: float | None = None
        self.alignment_bar: ProgressBar | None = None
        gauge, counter = self.metrics.gauge, self.metrics.counter
        self._aligned = gauge("aligned_rows", "Rows that all parties have in common.")
        self._alignment = gauge(
            "alignment_progress_ratio", "Share of both parties' ids that the alignment has handled."
        )
        self._epoch = gauge("epoch", "The epoch that the run is in, counted from 1.")
        self._epochs = 1 if self._contract.is_one_shot else self._contract.epochs
        gauge("epochs", "Epochs of the whole run.").set(self._epochs)
        self._checkpoint = self.metrics.unknown_gauge(
            "last_checkpoint_timestamp_seconds", "Unix time at which the last state was taken."
        )
        self._steps = counter("steps", "Training steps that this process has done.")
        self._rows = counter("rows", "Training rows in these steps, counted in every epoch.")
        self._done = gauge("course_steps_done", "Steps of the whole run that are done.")
        self._total = gauge("course_steps", "Steps of the whole run, unless it stops early.")
        self._step_s = self.metrics.histogram(
            "step_seconds",
            "Seconds from the end of one training step to the end of the next.",
            STEP_BUCKETS_S,
        )

    def note_alignment(self, done_ids: int, total_ids: int) -> None:
        self._alignment.set(done_ids / total_ids if total_ids else 0.0)
        if self.alignment_bar is not None:
            self.alignment_bar.note(done_ids, total_ids)

    def note_aligned(self, rows: AlignedRows) -> None:
        self._alignment.set(1)
        self._aligned.set(len(rows))
        is_one_shot = self._contract.is_one_shot
        self._steps_per_epoch = 0 if is_one_shot else rows.order.steps_per_epoch
        self._total.set(self._epochs * self._steps_per_epoch)
        self._done.set(0)
        self._epoch.set(1)
        self._last_step_at = None

    def note_resumed(self, epoch: int | None) -> None:
        """Note that the run resumes in an epoch, or at its end if that is None."""
        epochs_done = self._epochs if epoch is None else epoch
        self._done.set(epochs_done * self._steps_per_epoch)
        self._epoch.set(min(epochs_done + 1, self._epochs))
        self._last_step_at = None

    def note_step(self, batch: Batch) -> None:
        now = self._clock()
        if self._last_step_at is not None:
            self._step_s.observe(now - self._last_step_at)
        self._last_step_at = now
        self._steps.inc()
        self._rows.inc(len(batch.positions))
        self._done.set(batch.epoch * self._steps_per_epoch + batch.step + 1)
        self._epoch.set(batch.epoch + 1)

    def note_checkpoint(self) -> None:
        self._checkpoint.set_to_current_time()
