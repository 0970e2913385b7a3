"""Attacks on labels that are numbers: how much of their variance gradients explain.

Without a defense, the gradient of row i is 2 (p_i - y_i) J_i / batch: nearly the label, times a
direction that rows share. A figure is an R2 with the labels, within 0 and 1: the share of their
variance that the attack explains, where 1 reads every label.

    top_direction              squared correlation of the labels with the gradients' projections on
                               the direction in which one batch stretches most; it knows nothing,
                               and the sign that is left open is one bit for the whole batch, so
                               that its scores in different batches do not compare
    informed                   an oracle that knows predictions p and slopes J: it solves each row
                               for its label, and so reads whatever label the gradient is made of
    accumulated_top_direction  the first one on the sum of each example's gradients over the run
    accumulated_ridge_40       a ridge regression on these sums and the last activations, from 40
                               examples whose labels it knows; measured on all others

A model that predicts well sends little but its errors, so that attacks without knowledge see less
and less of the labels while ``informed`` sees them all. A partial R2 measures what a score reveals
beyond features:

    y'    label less its prediction from features
    s'    score less its prediction from features
    R2    squared correlation of s' and y': the share of the variance which features leave of the
          labels that the score explains (Robinson, "Root-N-consistent semiparametric regression",
          Econometrica 1988)

Every prediction comes from a regression that has not seen the row (`FeatureModels`). A score that
knows better than these regressions how features reveal labels has more than 0 without any leak.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy.accumulation import RunScores
from splitveil.common.privacy.attacks import CUT, Attack, SideInformation
from splitveil.common.privacy.beyond_features import Covariates
from splitveil.common.privacy.cross_fitting import FeatureModels
from splitveil.common.privacy.figures import STANDARD_ERRORS, NumberBeyond, NumberLeak
from splitveil.common.privacy.gradient_rows import GradientRows, Gradients, prepared
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.privacy.leakage import PairAucs, Score
from splitveil.common.privacy.observation import LayerScores
from splitveil.common.privacy.run_level import SEED, RunAudit

_LEAST_ROWS = 8  # rows below which a batch's R2 is mostly chance

MIN_ROWS = 50  # rows below which regressions on features say nothing

NUM_HINTS = 40  # labels that the ridge regression knows, as many as model completion

_PENALTIES = tuple(10.0**power for power in range(-6, 4))  # in units of a column's mean square

_NOTHING_LEFT = 1e-12  # share of a score's variance that counts as rounding

_MOST_VALUES = 2**24  # of the sums: 64 MiB; of a long run, evenly spaced examples are kept

_Floats = npt.NDArray[np.float64]


def r2_of(scores: Tensor, labels: Tensor) -> float:
    """Return the squared correlation of scores and labels; NaN if one of them is constant."""
    centred, known = scores.cpu().numpy(), labels.detach().double().cpu().numpy()
    centred, known = centred - centred.mean(), known - known.mean()
    sizes = np.square(centred).sum() * np.square(known).sum()
    return float((centred @ known) ** 2 / sizes) if sizes > 0 else float("nan")


def top_direction(gradients: Gradients) -> Tensor:
    """Score each row by its projection on the top direction, whose sign says nothing."""
    return prepared(gradients).top.projections


def informed(gradients: Gradients, known: KnownPredictions, _target: int = 1) -> Tensor:
    """Return prediction less residual, (rows,) float64; slopes are of a residual of 1."""
    sent = gradients.gradients if isinstance(gradients, GradientRows) else gradients
    rows, units = (values.detach().flatten(1).cpu().double() for values in (sent, known.slopes))
    powers = units.square().sum(dim=1)
    residuals = (rows * units).sum(dim=1) / powers.clamp_min(1e-300)
    return known.probabilities.detach().cpu().double() - residuals


BATCH_ATTACKS = {
    "top_direction": Attack(top_direction),
    "informed": Attack(informed, frozenset({SideInformation.PREDICTIONS})),
}
COMPARABLE = ("informed",)  # whose scores mean the same in every batch

TOP, RIDGE = "accumulated_top_direction", "accumulated_ridge_40"


class LabelNumbers:
    """Labels that are shares of a range: what attacks find of them is an R2."""

    names: tuple[str, ...] = ()
    num_classes = 1  # one value is predicted for each row
    is_multi_class = False
    needs_predictions = True  # for ``informed``, which always runs
    targets = (1,)
    floor = 0.0

    @staticmethod
    def of_scores(_num_scores: int) -> tuple[None]:
        return (None,)

    @staticmethod
    def indices(labels: Tensor) -> Tensor:
        """Return the labels, (batch,) float32."""
        return labels.detach().reshape(-1).cpu().float()

    @staticmethod
    def is_mixed(labels: Tensor) -> bool:
        """Return whether a batch has an R2 that is not mostly chance."""
        return len(labels) >= _LEAST_ROWS and bool((labels != labels[:1]).any())

    @staticmethod
    def measure(
        attacks: Sequence[Sequence[Score]], labels: Tensor, *, is_plain: bool = False
    ) -> tuple[list[float], PairAucs | None]:
        """Return the R2 of several attacks on one batch; random scores have the mean of theirs."""
        del is_plain
        chance = 1 / max(len(labels) - 1, 1)
        return [chance, *(r2_of(one.values, labels) for (one,) in attacks[1:])], None


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
    """Return the R2 of `ridge_scores`, at least 0, the R2 of the mean of the known labels.

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


class GradientSums(RunAudit):
    """Adds up each example's gradients over a run, and remembers its last activation."""

    needs_activations = True

    def __init__(self, num_examples: int) -> None:
        super().__init__((), num_examples)
        self._sums: tuple[Tensor, Tensor, Tensor] | None = None
        """Of gradients, (examples, row_dim), with the last activations and the labels."""

    def add(
        self,
        epoch: int,
        positions: Tensor,
        labels: Tensor,
        layers: Mapping[str, LayerScores],
        activations: Tensor | None = None,
    ) -> None:
        """Add one batch, with the examples' positions in the common order."""
        rows = layers[CUT].rows.cpu().float()
        with self._lock:
            self._enter(epoch)
            every = _apart(self._num_examples, rows.shape[1])
            if self._sums is None:
                size = -(-self._num_examples // every)
                sums, last = torch.zeros(2, size, rows.shape[1])
                self._sums = sums, last, torch.full((size,), torch.nan)
            sums, last, known = self._sums
            chosen = positions.cpu() % every == 0
            places = positions.cpu()[chosen] // every
            sums.index_add_(0, places, rows[chosen])
            if activations is not None:
                last[places] = activations.detach().flatten(1).cpu().float()[chosen]
            known[places] = labels[chosen]

    def _seen(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Return the figures of the examples that were visited; None without any.

        Their sums of gradients, (examples, row_dim), what the ridge regression looks at, their
        labels, (examples,), and their positions in the common order, ascending, (examples,).
        """
        if self._sums is None:
            return None
        sums, last, known = self._sums
        visited = ~known.isnan()
        positions = visited.nonzero()[:, 0] * _apart(self._num_examples, sums.shape[1])
        both = torch.cat([_standardised(sums[visited]), _standardised(last[visited])], dim=1)
        return sums[visited], both, known[visited], positions

    def _figures(self) -> Iterator[tuple[str, str, float]]:
        if (seen := self._seen()) is not None:
            gradients, both, labels, _ = seen
            yield CUT, TOP, r2_of(top_direction(gradients), labels)
            yield CUT, RIDGE, ridge_r2(both, labels, SEED)

    def numbers(
        self,
        batches: Mapping[str, NumberLeak],
        latest: Mapping[str, Sequence[RunScores]],
        covariates: Covariates | None,
    ) -> dict[str, NumberLeak]:
        """Return attack -> its figures; ``latest`` are scores that mean the same in every batch."""
        seen, figures = self._seen(), dict(batches)
        if seen is None:
            return figures
        gradients, both, labels, positions = seen[0], seen[1], seen[2], seen[3].numpy()
        examples = len(labels)
        for _, attack, r2 in self._figures():
            if not math.isnan(r2):
                figures[attack] = NumberLeak(r2, random=1 / max(examples - 1, 1), examples=examples)
        if covariates is None:
            return figures
        scores = {attack: of_all for attack, (of_all,) in latest.items()}
        scores[TOP] = RunScores(positions, top_direction(gradients).numpy())
        if examples > NUM_HINTS:
            others, values = ridge_scores(both, labels, SEED)
            order = np.argsort(others)
            scores[RIDGE] = RunScores(positions[others[order]], values[order])
        beyond = measure_numbers_beyond_features(covariates, scores)
        return {name: one._replace(beyond=beyond.get(name)) for name, one in figures.items()}

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            sums = None if self._sums is None else [one.clone() for one in self._sums]
        return super().state_dict() | {"sums": sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        with self._lock:
            sums = state["sums"]
            self._sums = None if sums is None else tuple(one.clone() for one in sums)


def _apart(num_examples: int, width: int) -> int:
    return max(1, -(-num_examples * 2 * width // _MOST_VALUES))


def _standardised(columns: Tensor) -> Tensor:
    """Return columns with a mean of 0 and one common scale: single columns may be all noise."""
    centred = columns.double() - columns.double().mean(dim=0)
    return centred / centred.square().mean().sqrt().clamp_min(1e-300)


def adjusted_r2(
    features: npt.NDArray[np.float32], labels: _Floats, scores: _Floats
) -> NumberBeyond:
    """Return the share of the labels' variance left by features that a score explains.

    The interval comes from a correlation's influence function, which assumes no distribution.
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
    covariates: Covariates, attacks: Mapping[str, RunScores]
) -> dict[str, NumberBeyond]:
    """Measure attacks on some of a run's rows; those that scored too few of these are left out."""
    features = covariates.features
    figures = {}
    for attack, seen in attacks.items():
        rows, scores = covariates.scored(seen)
        if len(rows) < MIN_ROWS:
            continue
        labels = covariates.labels[rows]
        figure = adjusted_r2(features[rows], labels.astype(np.float64), scores)
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
