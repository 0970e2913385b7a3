"""Keeps what predicts the training rows' labels, until the model has learned them by heart.

To tell what an attack finds beyond features, the monitor needs predictions of labels by models that
have not seen them. They are fitted across folds at the end of the run; what they are fitted on is
kept here: the active party's own features of each row, and from its last visit its activation, the
model's prediction of it, and the mean of its predictions so far, of which an attack over the run
may know more than of the last one.

A model that has learned its training labels by heart puts them into its activations, and an attack
would be adjusted for the very label that it found. So the visits of an epoch count only while the
model tells the training labels no better than held-out ones, by ``MAX_GAP`` of AUC; else those of
the epoch before stay. In the first epoch, the model has not seen a row that it predicts, and in the
second, once.
"""

import functools
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.active_party.training.predictions import measure_predictions
from splitveil.active_party.training.top_trainer import StepResult
from splitveil.common.data.features import Features
from splitveil.common.privacy.beyond_features import Covariates
from splitveil.common.privacy.leakage import OneClass
from splitveil.common.run.course import Batch
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions

MAX_ROWS = 30_000
"""Rows that are kept, and half as many for each further class: the first ones of the common order,
which is that of hashed ids, so that they are a random sample."""

MAX_VALUES = 64
"""Values of a row's activation that are kept, evenly spaced, and as many of its own features; the
model's predictions know the others."""

MAX_GAP = 0.02
"""AUC, or R2 of numbers, by which the model may tell training labels better than held-out ones."""

_TRUSTED_EPOCHS = 2
_LARGEST_LOGIT = 30.0
_LARGEST_HALF = 6e4


class _Visited(NamedTuple):
    """What is known about the rows that were visited."""

    positions: npt.NDArray[np.int64]
    activations: npt.NDArray[np.float32]
    outlooks: npt.NDArray[np.float32]
    own: npt.NDArray[np.float32]
    labels: npt.NDArray[Any]


class RowCovariates:
    """What is known about some training rows.

    Args:
        training: positions of the training rows, ascending.
        num_examples: number of aligned examples.
        num_classes: number of classes of the labels.
    """

    _LABEL_TYPE: ClassVar[torch.dtype] = torch.int8

    def __init__(self, training: Positions, num_examples: int, num_classes: int) -> None:
        self._positions = training[: 2 * MAX_ROWS // num_classes]
        self._slots = np.full(num_examples, -1, dtype=np.int32)
        self._slots[self._positions] = np.arange(len(self._positions), dtype=np.int32)
        self._num_logits = 1 if num_classes == 2 else num_classes
        self._labels = torch.full((len(self._positions),), -1, dtype=self._LABEL_TYPE)
        self._visits = torch.zeros(len(self._positions), dtype=torch.int32)
        self._own = torch.zeros(len(self._positions), 0, dtype=torch.float16)
        self._latest: Tensor | None = None
        """Activation, logits and mean logits of each row's last visit, (rows, values)."""
        self._kept: Tensor | None = None
        """The same as the last epoch left it that counts."""
        self._held_out = math.nan

    def note_step(self, batch: Batch, result: StepResult) -> None:
        """Note the activations and predictions of one batch's rows."""
        slots = self._slots[batch.positions]
        kept: npt.NDArray[np.intp] = np.flatnonzero(slots >= 0)
        if not len(kept):
            return
        among = torch.from_numpy(kept)
        rows = torch.from_numpy(slots[kept].astype(np.int64))
        activations = _thinned(result.activation.detach().flatten(start_dim=1), among)
        logits = self._outlooks(result.probabilities.detach().cpu()[among])
        if self._latest is None:
            width = activations.shape[1] + 2 * self._num_logits
            self._latest = torch.zeros(len(self._positions), width, dtype=torch.float16)
        self._visits[rows] += 1
        mean = self._latest[rows, -self._num_logits :].float()
        mean += (logits - mean) / self._visits[rows, None]
        self._latest[rows] = _half(torch.cat([activations, logits, mean], dim=1))
        self._note_own(rows, among, result.own)
        self._labels[rows] = result.labels.detach().reshape(-1).cpu()[among].to(self._LABEL_TYPE)

    def note_held_out(self, figure: float) -> None:
        """Note how well the model tells the labels of held-out rows: AUC, or R2 of numbers."""
        self._held_out = figure

    def end_epoch(self, epoch: int) -> None:
        """Keep the visits of an epoch, unless the model has learned labels by heart."""
        if self._latest is not None and (epoch < _TRUSTED_EPOCHS or self._gap() <= MAX_GAP):
            self._kept = self._latest.clone()

    def result(self) -> Covariates | None:
        """Return what is known about the rows that were visited; None before the first one."""
        known = self._visited()
        if known is None:
            return None
        return Covariates(*known[:-1], known.labels.astype(np.int64))

    def _visited(self) -> _Visited | None:
        kept = self._latest if self._kept is None else self._kept
        if kept is None:
            return None
        visited = self._visits.numpy() > 0
        known = kept.float().numpy()[visited]
        split = known.shape[1] - 2 * self._num_logits
        labels = self._labels.numpy()[visited]
        own = self._own.float().numpy()[visited]
        return _Visited(self._positions[visited], known[:, :split], known[:, split:], own, labels)

    def state_dict(self) -> State:
        """Return a copy of everything noted."""
        return {
            "labels": self._labels.clone(),
            "visits": self._visits.clone(),
            "own": self._own.clone(),
            "latest": None if self._latest is None else self._latest.clone(),
            "kept": None if self._kept is None else self._kept.clone(),
            "held_out_auc": self._held_out,
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state that ``state_dict`` returned, and forget everything noted since."""
        self._labels, self._visits = state["labels"].clone(), state["visits"].clone()
        self._own = state["own"].clone()
        self._latest = None if state["latest"] is None else state["latest"].clone()
        self._kept = None if state["kept"] is None else state["kept"].clone()
        self._held_out = state["held_out_auc"]

    def _note_own(self, rows: Tensor, among: Tensor, own: Features | None) -> None:
        """Note a batch's own features: numbers, and categories by the number of their slot."""
        if own is None:
            return
        parts = [part.cpu().float() for part in (own.numeric, own.categorical) if part is not None]
        if not parts:
            return
        values = _thinned(torch.cat(parts, dim=1), among)
        if self._own.shape[1] != values.shape[1]:
            self._own = torch.zeros(len(self._positions), values.shape[1], dtype=torch.float16)
        self._own[rows] = _half(values)

    def _gap(self) -> float:
        """Return by how much the model tells training labels better; infinite if unknown."""
        if self._latest is None or math.isnan(self._held_out):
            return math.inf
        visited = self._visits > 0
        outlooks = self._latest[visited, -2 * self._num_logits : -self._num_logits].float()
        in_training = self._told_in_training(outlooks, self._labels[visited])
        return math.inf if math.isnan(in_training) else in_training - self._held_out

    @staticmethod
    def _outlooks(probabilities: Tensor) -> Tensor:
        """Return the predictions' logits, (rows, 1), or log-probabilities, (rows, classes)."""
        if probabilities.ndim == 1:
            logits = probabilities.double().logit()[:, None]
        else:
            logits = probabilities.double().log()
        return logits.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).float()

    def _told_in_training(self, outlooks: Tensor, labels: Tensor) -> float:
        """Return the AUC of predictions of training rows; NaN if it cannot be measured."""
        logits = outlooks[:, 0] if self._num_logits == 1 else outlooks
        try:
            return measure_predictions(logits, labels.float()).auc
        except OneClass:
            return math.nan


def _half(values: Tensor) -> Tensor:
    # A model that diverged predicts NaN, which would end the run where its figures are due.
    return torch.nan_to_num(values).clamp(-_LARGEST_HALF, _LARGEST_HALF).half()


def _thinned(values: Tensor, rows: Tensor) -> Tensor:
    """Return some rows with at most ``MAX_VALUES`` columns, evenly spaced, on the CPU."""
    num_values = values.shape[1]
    if num_values > MAX_VALUES:
        values = values.index_select(1, _columns(num_values).to(values.device))
    return values.index_select(0, rows.to(values.device)).cpu().float()


@functools.cache
def _columns(num_values: int) -> Tensor:
    columns: npt.NDArray[np.int64] = np.linspace(0, num_values - 1, MAX_VALUES).astype(np.int64)
    return torch.from_numpy(columns)
