"""Attacks on labels that are numbers: how much of their variance gradients explain.

Without a defense, the gradient of row i is 2 (p_i - y_i) J_i / batch: nearly the label, times a
direction that rows share. A figure is an R2 with the labels, within 0 and 1: the share of their
variance that the attack explains, where 1 reads every label.

    top_direction              squared correlation of the labels with the gradients' projections on
                               the direction in which one batch stretches most; it knows nothing,
                               and the sign that is left open is one bit for the whole batch
    informed                   an oracle that knows predictions p and slopes J: it solves each row
                               for its label, and so reads whatever label the gradient is made of
    accumulated_top_direction  the first one on the sum of each example's gradients over the run
    accumulated_ridge_40       a ridge regression on these sums and the last activations, from 40
                               examples whose labels it knows; measured on all others

A model that predicts well sends little but what it could not predict, so that attacks which know
nothing see less and less of the labels while ``informed`` sees them all. What a score reveals
beyond what features reveal is a partial R2:

    y'    label less its prediction from features
    s'    score less its prediction from features
    R2    squared correlation of s' and y': the share of the variance which features leave of the
          labels that the score explains (Robinson, "Root-N-consistent semiparametric regression",
          Econometrica 1988)

Every prediction comes from a regression that has not seen the row (`FeatureModels`). A score that
knows better than these regressions how features reveal labels has more than 0 without any leak.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import RunScores
from splitveil.common.privacy.cross_fitting import FeatureModels
from splitveil.common.privacy.figures import STANDARD_ERRORS, NumberBeyond
from splitveil.common.privacy.gradient_rows import prepared

MIN_ROWS = 50  # rows below which regressions on features say nothing

NUM_HINTS = 40  # labels that the ridge regression knows, as many as model completion

_PENALTIES = tuple(10.0**power for power in range(-6, 4))  # in units of a column's mean square

_NOTHING_LEFT = 1e-12  # share of a score's variance that counts as rounding

_MOST_VALUES = 2**24  # of the sums: 64 MiB; of a long run, evenly spaced examples are kept

_Floats = npt.NDArray[np.float64]


def top_direction_r2(gradients: Tensor, labels: Tensor) -> float:
    """Return the squared correlation of labels and projections; NaN if one of them is constant."""
    return r2_of(prepared(gradients.cpu()).top.projections, labels)


def r2_of(scores: Tensor, labels: Tensor) -> float:
    """Return the squared correlation of scores and labels; NaN if one of them is constant."""
    centred, known = scores.numpy(), labels.detach().double().cpu().numpy()
    centred, known = centred - centred.mean(), known - known.mean()
    sizes = np.square(centred).sum() * np.square(known).sum()
    return float((centred @ known) ** 2 / sizes) if sizes > 0 else float("nan")


def informed_scores(gradients: Tensor, predictions: Tensor, slopes: Tensor) -> Tensor:
    """Return prediction less residual, (rows,) float64; slopes are of a residual of 1."""
    rows, units = (values.detach().flatten(1).cpu().double() for values in (gradients, slopes))
    powers = units.square().sum(dim=1)
    residuals = (rows * units).sum(dim=1) / powers.clamp_min(1e-300)
    return predictions.detach().cpu().double() - residuals


def ridge_scores(gradients: Tensor, labels: Tensor, seed: int) -> RunScores:
    """Estimate labels by a ridge regression from a few known ones, and score the others, unsorted.

    The penalty is the one with the smallest leave-one-out error on the known rows.
    """
    rows = prepared(gradients.cpu()).rows.numpy()
    known = labels.detach().double().cpu().numpy()
    order = np.random.default_rng(seed).permutation(len(rows))
    hints, others = order[:NUM_HINTS], order[NUM_HINTS:]
    centre, mean = rows[hints].mean(axis=0), known[hints].mean()
    weights = _ridge(rows[hints] - centre, known[hints] - mean)
    return RunScores(others, mean + (rows[others] - centre) @ weights)


def ridge_r2(gradients: Tensor, labels: Tensor, seed: int) -> float:
    """Return the R2 of `ridge_scores`, at least 0: that of the mean of the known labels.

    NaN if fewer than two other rows are left, or their labels are all the same.
    """
    if len(labels) < NUM_HINTS + 2:
        return float("nan")
    others, scores = ridge_scores(gradients, labels, seed)
    known = labels.detach().double().cpu().numpy()[others]
    if np.ptp(known) == 0:
        return float("nan")
    spread = np.square(known - known.mean()).sum()
    return float(max(0.0, 1 - np.square(known - scores).sum() / spread))


def _ridge(rows: _Floats, labels: _Floats) -> _Floats:
    left, sizes, right = np.linalg.svd(rows, full_matrices=False)
    unit = max(float(np.square(sizes).sum()) / max(rows.shape[1], 1), 1e-300)
    along = left.T @ labels

    def error(penalty: float) -> float:
        shrunk = np.square(sizes) / (np.square(sizes) + penalty * unit)
        # The centring took one more degree of freedom from every row.
        leverages = np.square(left) @ shrunk + 1 / len(rows)
        missed = (labels - left @ (shrunk * along)) / np.maximum(1 - leverages, 1e-9)
        return float(np.square(missed).mean())

    penalty = min(_PENALTIES, key=error)
    weights: _Floats = right.T @ (sizes / (np.square(sizes) + penalty * unit) * along)
    return weights


class SummedGradients:
    """Adds up each example's gradients over a run, and remembers its last activation."""

    def __init__(self, num_examples: int) -> None:
        self._num_examples = num_examples
        self._sums: Tensor | None = None
        self._last = torch.empty(0)
        self._labels = torch.empty(0)

    def add(
        self, positions: Tensor, gradients: Tensor, labels: Tensor, activations: Tensor
    ) -> None:
        """Add one batch; positions are those of the examples in the common order."""
        rows = gradients.detach().flatten(start_dim=1).cpu().float()
        every = _apart(self._num_examples, rows.shape[1])
        if self._sums is None:
            size = -(-self._num_examples // every)
            self._sums = torch.zeros(size, rows.shape[1])
            self._last = torch.zeros(size, rows.shape[1])
            self._labels = torch.full((size,), torch.nan)
        chosen = positions % every == 0
        places = positions[chosen] // every
        self._sums.index_add_(0, places, rows[chosen])
        self._last[places] = activations.detach().flatten(start_dim=1).cpu().float()[chosen]
        self._labels[places] = labels.detach().cpu().float()[chosen]

    def seen(self) -> "SeenSums | None":
        """Return the sums and labels of the examples that were visited; None without any."""
        if self._sums is None:
            return None
        visited = ~self._labels.isnan()
        every = _apart(self._num_examples, self._sums.shape[1])
        positions = visited.nonzero()[:, 0] * every
        sums, last = self._sums[visited], self._last[visited]
        return SeenSums(sums, last, self._labels[visited], positions)

    def state_dict(self) -> dict[str, Tensor | None]:
        sums = None if self._sums is None else self._sums.clone()
        return {"sums": sums, "last": self._last.clone(), "labels": self._labels.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        sums = state["sums"]
        self._sums = None if sums is None else sums.clone()
        self._last = state["last"].clone()
        self._labels = state["labels"].clone()


def _apart(num_examples: int, width: int) -> int:
    return max(1, -(-num_examples * 2 * width // _MOST_VALUES))


class SeenSums(NamedTuple):
    gradients: Tensor  # (examples, row_dim)
    activations: Tensor  # (examples, row_dim)
    labels: Tensor  # (examples,)
    positions: Tensor  # of the examples in the common order, ascending, (examples,)

    def figures(self, seed: int) -> tuple[float, float]:
        """Return those of ``accumulated_top_direction`` and ``accumulated_ridge_40``."""
        ridge = ridge_r2(self._for_ridge(), self.labels, seed)
        return top_direction_r2(self.gradients, self.labels), ridge

    def top_direction_scores(self) -> RunScores:
        """Return the scores of ``accumulated_top_direction``."""
        scores = prepared(self.gradients).top.projections.numpy()
        return RunScores(self.positions.numpy(), scores)

    def ridge_scores(self, seed: int) -> RunScores:
        """Return the scores of ``accumulated_ridge_40``, without the rows that it knows."""
        others, scores = ridge_scores(self._for_ridge(), self.labels, seed)
        order = np.argsort(others)
        return RunScores(self.positions.numpy()[others[order]], scores[order])

    def _for_ridge(self) -> Tensor:
        parts = (_standardised(self.gradients), _standardised(self.activations))
        return torch.cat(parts, dim=1)


def _standardised(columns: Tensor) -> Tensor:
    """Return columns with a mean of 0 and one common scale: single columns may be all noise."""
    centred = columns.double() - columns.double().mean(dim=0)
    return centred / centred.square().mean().sqrt().clamp_min(1e-300)


class NumberCovariates(NamedTuple):
    """What predicts the labels of some training rows without having memorised them."""

    positions: npt.NDArray[np.int64]  # in the common order, ascending, (rows,)
    features: npt.NDArray[np.float32]  # activations, predictions, own features, (rows, values)
    labels: _Floats  # shares of the range, (rows,), only for the measurement


def adjusted_r2(
    features: npt.NDArray[np.float32], labels: _Floats, scores: _Floats
) -> NumberBeyond:
    """Return the share of the variance which features leave of labels that a score explains.

    The interval is that of a correlation by its influence function, which asks for no distribution.
    NaN where features leave nothing of the labels; 0 where they leave nothing of the scores. Raises
    ValueError for fewer than ``MIN_ROWS`` rows.
    """
    if len(labels) < MIN_ROWS:
        raise ValueError(f"expected at least {MIN_ROWS} rows, got {len(labels)}")
    models = FeatureModels.of(features)
    label, score = (
        _normalised(values - models.explained(values), float(values.var()))
        for values in (labels - labels.mean(), scores - scores.mean())
    )
    if label is None:
        return NumberBeyond(float("nan"), float("nan"), float("nan"))
    if score is None:
        return NumberBeyond(0.0, 0.0, 0.0)
    correlation = float((label * score).mean())
    influence = label * score - correlation * (np.square(label) + np.square(score)) / 2
    margin = STANDARD_ERRORS * float(influence.std()) / len(labels) ** 0.5
    size = abs(correlation)
    low, high = max(size - margin, 0.0), min(size + margin, 1.0)
    return NumberBeyond(min(size, 1.0) ** 2, low**2, high**2)


def measure_numbers_beyond_features(
    covariates: NumberCovariates, attacks: Mapping[str, RunScores]
) -> dict[str, NumberBeyond]:
    """Measure attacks on some of a run's rows; those that scored too few of these are left out."""
    figures = {}
    for attack, seen in attacks.items():
        _, rows, scored = np.intersect1d(
            covariates.positions, seen.positions, assume_unique=True, return_indices=True
        )
        if len(rows) < MIN_ROWS:
            continue
        labels, scores = covariates.labels[rows], seen.scores[scored]
        figure = adjusted_r2(covariates.features[rows], labels, scores)
        if not np.isnan(figure.r2):
            figures[attack] = figure
    return figures


def _normalised(rest: _Floats, variance: float) -> _Floats | None:
    """Return residuals with mean 0 and variance 1; None where they are rounding."""
    centred = rest - rest.mean()
    left = float(np.square(centred).mean())
    if left <= _NOTHING_LEFT * variance:
        return None
    scaled: _Floats = centred / left**0.5
    return scaled
