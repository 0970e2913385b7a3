"""Early stopping: ending a run before its last epoch."""

import math

from splitveil.active_party.settings import EarlyStopping
from splitveil.common.run.progress import State


class EarlyStop:
    """Watches a score, epoch by epoch: of the validation rows, or on released targets.

    It is an AUC, or for labels that are numbers an error with a minus sign.
    """

    def __init__(self, settings: EarlyStopping) -> None:
        self._settings = settings
        self._best = -math.inf
        self._epochs_without_gain = 0

    def state_dict(self) -> State:
        return {"best": self._best, "epochs_without_gain": self._epochs_without_gain}

    def load_state_dict(self, state: State) -> None:
        self._best = state["best"]
        self._epochs_without_gain = state["epochs_without_gain"]

    def should_stop(self, reached: float) -> bool:
        """Take in one epoch's score and return whether the patience is used up."""
        if reached > self._best + self._settings.min_gain:
            self._best = reached
            self._epochs_without_gain = 0
        else:
            self._epochs_without_gain += 1
        return self._epochs_without_gain >= self._settings.patience_epochs
