"""When the active party ends a run before its last epoch."""

from splitveil.active_party.settings import EarlyStopping
from splitveil.common.run.progress import State


class EarlyStop:
    """Watches the validation AUC, epoch by epoch."""

    def __init__(self, settings: EarlyStopping) -> None:
        self._settings = settings
        self._best = 0.0
        self._epochs_without_gain = 0

    def state_dict(self) -> State:
        """Return what was seen so far."""
        return {"best": self._best, "epochs_without_gain": self._epochs_without_gain}

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        self._best = state["best"]
        self._epochs_without_gain = state["epochs_without_gain"]

    def should_stop(self, validation_auc: float) -> bool:
        """Take one epoch's AUC and say whether the patience is used up."""
        if validation_auc > self._best + self._settings.min_gain:
            self._best = validation_auc
            self._epochs_without_gain = 0
        else:
            self._epochs_without_gain += 1
        return self._epochs_without_gain >= self._settings.patience_epochs
