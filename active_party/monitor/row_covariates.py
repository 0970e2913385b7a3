"""Collects predictors of the training rows' labels, until the model has memorised them.

To measure what an attack finds beyond features, the monitor needs predictions of labels by models
that have not seen them. They are fitted across folds at the end of the run, on the values stored
here: the active party's own features of each row, and from its last visit its activation, the
model's prediction of it, and the mean of its predictions so far, since an attack over the run may
know more of the mean than of the last one.

A model that has memorised its training labels puts them into its activations, and an attack
would be adjusted for the very label that it found. So the visits of an epoch count only while the
model predicts the training labels no better than held-out ones, by ``MAX_GAP`` of AUC; else those
of the epoch before stay. In the first epoch, the model has not seen a row that it predicts, and in
the second, once.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.training.label_kinds import LabelKind
from splitveil.common.data.features import Features
from splitveil.common.privacy.beyond_features import Covariates
from splitveil.common.run.course import Batch
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions

MAX_ROWS = 30_000
"""Rows that are stored, and half as many for each further class: the first ones of the common
order, which is that of hashed ids, so that they are a random sample."""

MAX_VALUES = 64
"""Values of a row's activation that are stored, evenly spaced, and as many of its own features; the
model's predictions know the others."""

MAX_GAP = 0.02
"""Largest excess of the training labels' AUC, or R2 of numbers, over the held-out labels'."""

_TRUSTED_EPOCHS = 2
_LARGEST_HALF = 6e4


@dataclass
class Latest:
    """The values stored at the last visit of each row."""

    activations: Tensor
    """(rows, values), float16, as they came: perhaps not finite."""
    logits: Tensor
    """The last logits, and the mean of all visits' logits, (rows, 2 * logits), float16."""

    @classmethod
    def empty(cls, num_rows: int, num_logits: int) -> Self:
        """Return the record of rows without any visit, whose number of values is unknown."""
        activations = torch.zeros(num_rows, 0, dtype=torch.float16)
        return cls(activations, torch.zeros(num_rows, 2 * num_logits, dtype=torch.float16))

    def copy(self) -> Self:
        """Return a copy that later visits do not change."""
        return type(self)(self.activations.clone(), self.logits.clone())

    def state_dict(self) -> dict[str, Tensor]:
        return {"activations": self.activations, "logits": self.logits}


class RowCovariates:
    def __init__(self, training: Positions, num_examples: int, kind: LabelKind) -> None:
        self._kind = kind
        self._num_logits = math.prod(kind.shape_of_row)
        self._positions = training[: 2 * MAX_ROWS // max(self._num_logits, 2)]
        num_rows = len(self._positions)
        self._slots = np.full(num_examples, -1, dtype=np.int64)
        self._slots[self._positions] = np.arange(num_rows)
        self._labels = torch.full((num_rows,), -1, dtype=kind.stored_type)
        self._own = torch.zeros(num_rows, 0, dtype=torch.float16)
        self._knows_rows = False
        """True if every row was visited, so that its label and own features are known."""
        self._visits = torch.zeros(num_rows, dtype=torch.int32)
        self._unsummed = np.zeros(num_rows, dtype=np.bool_)
        """The rows whose last prediction is not yet in ``_latest``."""
        self._predictions = torch.zeros(num_rows, self._num_logits)
        """Of these rows, as the model made them."""
        self._latest = Latest.empty(num_rows, self._num_logits)
        self._trusted: Latest | None = None
        """The latest visits as the last epoch left them that counts; never changed in place."""
        self._held_out = math.nan

    def note_step(self, batch: Batch, step: Step) -> None:
        slots = self._slots[batch.positions]
        stored: npt.NDArray[np.intp] = np.flatnonzero(slots >= 0)
        if not len(stored):
            return
        visited = slots[stored]
        rows, among = torch.from_numpy(visited), torch.from_numpy(stored)
        values = _thinned(step.activation.detach().flatten(start_dim=1), among)
        if self._latest.activations.shape[1] != values.shape[1]:
            self._latest.activations = torch.zeros(len(self._positions), values.shape[1]).half()
        self._latest.activations.index_copy_(0, rows, values.half())
        predictions = step.probabilities.detach().cpu().reshape(-1, self._num_logits)
        self._predictions.index_copy_(0, rows, predictions.float().index_select(0, among))
        self._unsummed[visited] = True
        if not self._knows_rows:
            self._note_own(rows, among, step.own)
            labels = step.labels.detach().reshape(-1).cpu()[among]
            self._labels[rows] = labels.to(self._kind.stored_type)

    def note_held_out(self, figure: float) -> None:
        """Note how well the model predicts the labels of held-out rows: AUC, or R2 of numbers."""
        self._held_out = figure

    def end_epoch(self, epoch: int) -> None:
        """Trust the visits of an epoch, unless the model has memorised labels."""
        self._sum_up()
        self._knows_rows = bool((self._visits > 0).all())
        # The peer waits for this: the same work, whatever the gap, which depends on labels.
        gap, latest = self._gap(), self._latest.copy()
        if epoch < _TRUSTED_EPOCHS or gap <= MAX_GAP:
            self._trusted = latest

    def result(self) -> Covariates | None:
        """Return the stored values of the rows visited so far; None before the first visit."""
        self._sum_up()
        known = self._latest if self._trusted is None else self._trusted
        visited = self._visits.numpy() > 0
        if not visited.any():
            return None
        labels = self._labels.double() if self._labels.is_floating_point() else self._labels.long()
        activations, logits, own = (
            _finite(part.float()).numpy()[visited]
            for part in (known.activations, known.logits, self._own)
        )
        return Covariates(
            self._positions[visited], activations, logits, own, labels.numpy()[visited]
        )

    def state_dict(self) -> State:
        self._sum_up()
        return {
            "labels": self._labels.clone(),
            "visits": self._visits.clone(),
            "own": self._own.clone(),
            "latest": self._latest.copy().state_dict(),
            "trusted": None if self._trusted is None else self._trusted.state_dict(),
            "held_out_auc": self._held_out,
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state that ``state_dict`` returned, and forget everything noted since."""
        self._labels, self._visits = state["labels"].clone(), state["visits"].clone()
        self._own = state["own"].clone()
        self._knows_rows = bool((self._visits > 0).all())
        self._unsummed[:] = False
        self._trusted = None if state["trusted"] is None else Latest(**state["trusted"]).copy()
        self._latest = Latest(**state["latest"]).copy()
        self._held_out = state["held_out_auc"]

    def _sum_up(self) -> None:
        """Enter the predictions since the last time into the rows' logits.

        An epoch visits a row once, so that it is enough to do this once an epoch.
        """
        if not self._unsummed.any():
            return
        rows = torch.from_numpy(np.flatnonzero(self._unsummed))
        self._unsummed[:] = False
        self._visits[rows] += 1
        logits = self._kind.logits_of(self._predictions[rows])
        mean = self._latest.logits[rows, self._num_logits :].float()
        mean += (logits - mean) / self._visits[rows, None]
        self._latest.logits[rows] = _finite(torch.cat([logits, mean], dim=1)).half()

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
        self._own[rows] = _finite(values).half()

    def _gap(self) -> float:
        visited = self._visits > 0
        logits = self._latest.logits[visited, : self._num_logits].float()
        gap = self._kind.agreement(logits, self._labels[visited]) - self._held_out
        return math.inf if math.isnan(gap) else gap


def _finite(values: Tensor) -> Tensor:
    # A model that diverged predicts NaN, which would end the run where its figures are due.
    return torch.nan_to_num(values).clamp(-_LARGEST_HALF, _LARGEST_HALF)


def _thinned(values: Tensor, rows: Tensor) -> Tensor:
    """Return some rows with at most ``MAX_VALUES`` columns, evenly spaced, on the CPU."""
    num_values = values.shape[1]
    values = values.index_select(0, rows.to(values.device))
    if num_values > MAX_VALUES:
        columns = torch.from_numpy(np.linspace(0, num_values - 1, MAX_VALUES).astype(np.int64))
        values = values.index_select(1, columns.to(values.device))
    return values.cpu().float()
