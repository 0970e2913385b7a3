"""What a party says about its run while it trains: the metrics that both kinds of party have.

Everything is about steps, messages, seconds and whole runs, never about one example. Nothing here
depends on labels, except in what the active party adds (``active_party/watch/run_metrics.py``): a
passive party tells its operators only what it would tell them if all labels were swapped.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from prometheus_client import Counter

from splitveil.common.errors import ContractMismatch, PeerError, ProtocolError
from splitveil.common.party.transcript import Crossing
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.phases import Phases
from splitveil.common.status.presence import Presence
from splitveil.common.status.registry import Metrics, PhaseCollector
from splitveil.common.text.log_lines import add_to_log_lines
from splitveil.common.text.version import VERSION

STAGES = ("starting", "waiting", "aligning", "training", "stopping", "finished", "ended")
"""The stages of a run, in order; a run that stops can be resumed, one that has ended cannot."""


def _kinds_of(error: type[PeerError]) -> Iterator[str]:
    yield error.__name__
    for kind in error.__subclasses__():
        yield from _kinds_of(kind)


class Readiness(NamedTuple):
    """Whether a party can do its part now."""

    ready: bool
    reason: str
    """Why not, or what it is doing."""


class RunStatus:
    """The state of one party's run, for its operators.

    Its methods take microseconds and never raise; any thread may call them.

    Args:
        party: this party's name, as in the contract.
        contract: of the run.
        clock: returns seconds, for durations.
    """

    def __init__(
        self, party: str, contract: Contract, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.party = party
        self.run_name = contract.run_name
        self.run_id = ""
        self.metrics = Metrics()
        self.phases = Phases()
        self.metrics.registry.register(PhaseCollector(self.phases))
        self.peers = Presence(self.metrics, clock)
        self._contract = contract
        self._clock = clock
        self._stage_of: Callable[[], str] = lambda: STAGES[0]
        self._readiness = Readiness(ready=False, reason=STAGES[0])
        self._steps_per_epoch = 0
        self._last_step_at: float | None = None
        self._add_run_metrics()
        self._add_step_metrics()
        self._add_message_metrics()

    def _add_run_metrics(self) -> None:
        gauge = self.metrics.gauge
        self._info = gauge(
            "run_info",
            "Always 1; its labels name party, run and version.",
            ["party", "run", "run_id", "version"],
        )
        self._info.labels(self.party, self.run_name, "", VERSION).set(1)
        stages = gauge("stage", "1 for the stage that the run is in, 0 for others.", ["stage"])
        for one in STAGES:
            stages.labels(one).set_function(partial(self._is_in, one))
        self._ready = gauge("ready", "1 while /readyz answers with 200.")
        self._aligned = gauge("aligned_rows", "Rows that all parties have in common.")
        self._alignment = gauge(
            "alignment_progress_ratio", "Share of both parties' ids that the alignment has handled."
        )
        self._epoch = gauge("epoch", "The epoch that the run is in, counted from 1.")
        gauge("epochs", "Epochs of the whole run.").set(self._contract.epochs)
        self._checkpoint = self.metrics.unknown_gauge(
            "last_checkpoint_timestamp_seconds", "Unix time at which the last state was taken."
        )

    def _add_step_metrics(self) -> None:
        gauge, counter = self.metrics.gauge, self.metrics.counter
        self._steps = counter("steps", "Training steps that this process has done.")
        self._rows = counter("rows", "Training rows in these steps, counted in every epoch.")
        self._done = gauge("course_steps_done", "Steps of the whole run that are done.")
        self._total = gauge("course_steps", "Steps of the whole run, unless it stops early.")
        self._step_s = self.metrics.seconds_histogram(
            "step_seconds", "Seconds from the end of one training step to the end of the next."
        )

    def _add_message_metrics(self) -> None:
        counter = self.metrics.counter
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
        """One of ``STAGES``."""
        return self._stage_of()

    @property
    def readiness(self) -> Readiness:
        """Whether this party can do its part now."""
        return self._readiness

    def set_ready(self, reason: str, *, ready: bool = True) -> None:
        """Say whether this party can do its part, and why not."""
        self._readiness = Readiness(ready, reason)
        self._ready.set(ready)

    def enter_stage(self, stage: str) -> None:
        """Note the stage that the run is in."""
        self.follow_stage(lambda: stage)

    def follow_stage(self, stage_of: Callable[[], str]) -> None:
        """Ask for the stage whenever somebody wants to know it."""
        self._stage_of = stage_of

    def _is_in(self, stage: str) -> bool:
        return self.stage == stage

    # ---- the run ----

    def name_run(self, run_id: str) -> None:
        """Note the id of the run, once it is open."""
        if run_id == self.run_id:
            return
        self._info.remove(self.party, self.run_name, self.run_id, VERSION)
        self.run_id = run_id
        add_to_log_lines(run_id=run_id)
        self._info.labels(self.party, self.run_name, run_id, VERSION).set(1)

    def note_alignment(self, done_ids: int, total_ids: int) -> None:
        """Note how far the alignment is."""
        self._alignment.set(done_ids / total_ids if total_ids else 0.0)

    def note_aligned(self, rows: AlignedRows) -> None:
        """Note the common rows, and the length of the run that follows from them."""
        self._alignment.set(1)
        self._aligned.set(len(rows))
        self._steps_per_epoch = rows.order.steps_per_epoch
        self._total.set(rows.total_steps(self._contract))
        self._done.set(0)
        self._epoch.set(1)
        self._last_step_at = None

    def note_resumed(self, epoch: int | None) -> None:
        """Note that the run resumes in an epoch, or at its end if that is None."""
        epochs_done = self._contract.epochs if epoch is None else epoch
        self._done.set(epochs_done * self._steps_per_epoch)
        self._epoch.set(min(epochs_done + 1, self._contract.epochs))
        self._last_step_at = None

    def note_step(self, batch: Batch) -> None:
        """Note that a training step is done."""
        now = self._clock()
        if self._last_step_at is not None:
            self._step_s.observe(now - self._last_step_at)
        self._last_step_at = now
        self._steps.inc()
        self._rows.inc(len(batch.positions))
        self._done.set(batch.epoch * self._steps_per_epoch + batch.step + 1)
        self._epoch.set(batch.epoch + 1)

    def note_checkpoint(self) -> None:
        """Note that the run's state was taken."""
        self._checkpoint.set_to_current_time()

    # ---- messages ----

    def note(self, crossing: Crossing) -> None:
        """Count a message that crosses the wire."""
        crossed = self._crossed.get((crossing.direction, crossing.kind))
        if crossed is None:  # to look up a series by its labels takes longer than to count
            call = crossing.kind.partition(" ")[0]
            counters = (self._messages, self._bytes)
            crossed = tuple(one.labels(crossing.direction, call) for one in counters)
            self._crossed[crossing.direction, crossing.kind] = crossed
        crossed[0].inc()
        crossed[1].inc(len(crossing.data))

    def note_refused(self, error: Exception) -> None:
        """Count a message that was refused, by the kind of error."""
        self._refused.labels(type(error).__name__).inc()

    def note_failed_call(self, error: Exception) -> None:
        """Count a call that got no usable answer, by the kind of error."""
        self._failed.labels(type(error).__name__).inc()
