"""Counts the gradients of a few batches of a run by class, for the label owner only."""

from collections.abc import Iterable

from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.top_trainer import StepResult
from splitveil.active_party.watch.distributions import gradient_distributions, spread_epochs
from splitveil.common.record.histogram_line import HistogramLine
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.run.course import Batch


class GradientCounter:
    """Counts the first batch with enough examples of both classes in each of some epochs.

    Args:
        settings: the epochs.
        metrics: gets two histograms for each batch counted.
    """

    def __init__(self, settings: ActiveSettings, metrics: MetricsLog) -> None:
        self._metrics = metrics
        self._uncounted_epochs = set(_epochs_to_count(settings))

    def note_step(self, batch: Batch, result: StepResult) -> None:
        """Count a batch, if its epoch still needs one."""
        if batch.epoch not in self._uncounted_epochs:
            return
        found = gradient_distributions(result.raw, result.defended, result.labels)
        if found is None:  # too few of a class: another batch of this epoch may have more
            return
        self._uncounted_epochs.remove(batch.epoch)
        for figure, edges, counts in found:
            self._metrics.write(HistogramLine(batch.epoch, batch.step, figure, edges, counts))

    def state_dict(self) -> list[int]:
        """Return the epochs that remain to be counted."""
        return sorted(self._uncounted_epochs)

    def load_state_dict(self, state: Iterable[int]) -> None:
        """Resume with the epochs that ``state_dict`` returned."""
        self._uncounted_epochs = set(state)


def _epochs_to_count(settings: ActiveSettings) -> Iterable[int]:
    chosen = settings.distributions
    if chosen is None or settings.data.num_classes != 2:
        return ()
    return spread_epochs(settings.contract.epochs) if chosen.epochs is None else chosen.epochs
