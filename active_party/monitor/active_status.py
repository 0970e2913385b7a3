"""The active party's metrics of a run: its leak, its ledger and its evaluations.

These figures depend on labels. They are about batches, epochs and whole runs, never about one
example, and so is the mean loss: a batch could have one example, an epoch has all training rows.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import Gauge

from splitveil.active_party.run.lifecycle import Stage
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party.party_status import RunStatus
from splitveil.common.privacy.figures import AttackFigure, LeakBounds, Spread
from splitveil.common.record.run_record import (
    AlarmLine,
    EpochLeakLine,
    EvaluationLine,
    LeakLine,
    Line,
)
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.progress import Phase

_STAGES = {
    Stage.WAITING: "waiting",
    Stage.REJOINING: "waiting",
    Stage.HANDSHAKEN: "aligning",
    Stage.TRAINING: "training",
    Stage.FINISHED: "finished",
    Stage.ENDED: "stopping",
}

_EVALUATION = {
    "loss": ("evaluation_loss", "Loss on held-out rows"),
    "auc": ("evaluation_auc", "AUC on held-out rows"),
    "rmse": (
        "evaluation_rmse",
        "Root mean squared error on held-out rows, in the label's unit; only of numbers",
    ),
    "r2": (
        "evaluation_r2",
        "Share of the labels' variance that predictions explain on held-out rows; only of numbers",
    ),
    "calibration_error": ("calibration_error", "Expected calibration error on held-out rows"),
}


class ActiveStatus(RunStatus):
    def __init__(self, settings: ActiveSettings) -> None:
        super().__init__(ACTIVE, settings.contract)
        for name in settings.contract.passive_parties:
            self.peers.expect(name)
        budget = settings.run_budget
        self._limit = None if budget is None else budget.limit
        gauge, counter = self.metrics.gauge, self.metrics.counter
        by_attack = ["layer", "attack"]
        self._leak = gauge(
            "leak_auc", "Raw leak AUC of an attack on the last batch that it measured.", by_attack
        )
        self._epoch_leak = gauge(
            "epoch_leak_auc",
            "Raw leak AUC of an attack after the last epoch that is measured: the mean over its "
            "batches, or of all batches together.",
            by_attack,
        )
        self._alarms = counter("leak_alarms", "Attacks that measured more than the ledger states.")

        self._bound = gauge(
            "ledger_leak_auc_bound",
            "AUC that no score of the adversary class exceeds, by statistic over the training "
            "examples; 1 without a bound.",
            ["adversary", "statistic"],
        )
        self._estimate = gauge(
            "ledger_leak_auc_estimate",
            "AUC of the best score under the Gaussian model, by statistic over the examples.",
            ["statistic"],
        )
        self._sum_kl = gauge(
            "ledger_sum_kl",
            "Symmetrised divergence that the answers have spent, by statistic over the examples.",
            ["statistic"],
        )
        self._mu = gauge(
            "ledger_mu", "Parameter of the Gaussian mechanism that all answers are.", ["adversary"]
        )
        self._epsilon = self.metrics.unknown_gauge(
            "ledger_epsilon", "Label differential privacy of all answers; +Inf for none."
        )
        if self._limit is not None:
            self._left = gauge(
                "budget_left_ratio",
                "Share of run_budget that the most exposed example has left; read after an epoch.",
            )
            self._left.set(1)

        self._train_loss = self.metrics.unknown_gauge(
            "train_loss", "Mean training loss of the last epoch."
        )
        self._evaluation = {
            figure: gauge(name, f"{meaning}.", ["split"])
            for figure, (name, meaning) in _EVALUATION.items()
        }

    @contextmanager
    def serving(self, session: ActiveSession) -> Iterator[None]:
        """Follow a session that is served within the block.

        This party is ready whether or not a peer is there: a supervisor that let no peer through to
        a party that is not ready would keep the two apart.
        """
        self.follow_stage(lambda: _STAGES[session.stage])
        self.set_ready("serving")
        try:
            with self.phases(Phase.WAIT):
                yield
        finally:
            self.enter_stage(self.stage)  # the session is of no interest after this
            self.set_ready("the run is over", ready=False)

    def note_line(self, line: Line) -> None:
        match line:
            case LeakLine():
                _set_each(self._leak, line.figures)
            case EpochLeakLine():
                _set_each(self._epoch_leak, line.figures)
            case EvaluationLine():
                for figure, gauge in self._evaluation.items():
                    if (value := getattr(line.figures, figure)) is not None:
                        gauge.labels(line.split).set(value)
                if line.train_loss is not None:
                    self._train_loss.set(line.train_loss)
            case AlarmLine():
                self._alarms.inc()

    def note_bounds(self, bounds: LeakBounds) -> None:
        for statistic in Spread._fields:
            self._sum_kl.labels(statistic).set(getattr(bounds.sum_kl, statistic))
            self._estimate.labels(statistic).set(getattr(bounds.estimate, statistic))
            for peers, spread in bounds.by_peers().items():
                self._bound.labels(peers.value, statistic).set(getattr(spread, statistic))
        for peers, mu in bounds.mu_by_peers().items():
            self._mu.labels(peers.value).set(float("inf") if mu is None else mu)
        self._epsilon.set(float("inf") if bounds.epsilon is None else bounds.epsilon)
        self._note_budget(bounds)

    def _note_budget(self, bounds: LeakBounds) -> None:
        limit = self._limit
        if limit is None:
            return
        is_exact = bounds.mu_by_peers()[limit.peers] is not None
        allowed = limit.max_gaussian_sum_kl if is_exact else limit.max_sum_kl
        self._left.set(max(1 - bounds.sum_kl.max / allowed, 0))


def _set_each(gauge: Gauge, figures: Iterable[AttackFigure]) -> None:
    for figure in figures:
        if figure.leak_auc is not None:
            gauge.labels(figure.layer, figure.attack).set(figure.leak_auc)
