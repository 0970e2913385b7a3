"""What a party says about its run while it trains: the metrics that both kinds of party have.

Everything is about steps, messages, seconds and whole runs, never about one example. Nothing here
depends on labels, except what the active party adds (``active_party/monitor/active_status.py``): a
passive party tells its operators only what it would tell them if all labels were swapped.
"""

import time
from collections.abc import Callable

from splitveil.common.party.party_status import PartyStatus
from splitveil.common.party.registry import STEP_BUCKETS_S, PhaseCollector
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.phases import Phases

STAGES = ("starting", "waiting", "aligning", "training", "stopping", "finished", "ended")
"""The stages of a run, in order; a run that stops can be resumed, one that has ended cannot."""


class RunStatus(PartyStatus):
    """The state of one party's run, for its operators.

    Its methods take microseconds and never raise; any thread may call them.
    """

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
        self._add_run_metrics()
        self._add_step_metrics()

    def _add_run_metrics(self) -> None:
        gauge = self.metrics.gauge
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
        self._step_s = self.metrics.histogram(
            "step_seconds",
            "Seconds from the end of one training step to the end of the next.",
            STEP_BUCKETS_S,
        )

    def note_alignment(self, done_ids: int, total_ids: int) -> None:
        self._alignment.set(done_ids / total_ids if total_ids else 0.0)

    def note_aligned(self, rows: AlignedRows) -> None:
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
