"""When the active party ends a run before its last epoch."""

from active_party.settings import EarlyStopping


class EarlyStop:
    """Watches the validation AUC, epoch by epoch."""

    def __init__(self, settings: EarlyStopping) -> None:
        self._settings = settings
        self._best = 0.0
        self._epochs_without_gain = 0

    def should_stop(self, validation_auc: float) -> bool:
        """Take one epoch's AUC and say whether the patience is used up."""
        if validation_auc > self._best + self._settings.min_gain:
            self._best = validation_auc
            self._epochs_without_gain = 0
        else:
            self._epochs_without_gain += 1
        return self._epochs_without_gain >= self._settings.patience_epochs
