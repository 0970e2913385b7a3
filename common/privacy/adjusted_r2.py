"""How much a score tells of labels that are numbers beyond what features tell: a partial R2.

    y'    label less its prediction from features
    s'    score less its prediction from features
    R2    squared correlation of s' and y': the share of the variance which features leave of the
          labels that the score explains (Robinson, "Root-N-consistent semiparametric regression",
          Econometrica 1988)

Every prediction comes from a regression that has not seen the row (`FeatureModels`). A score that
repeats what these regressions know of the features has 0, however high its raw R2; one that is the
label has 1. A score that knows better than the regressions how features tell labels has more than 0
without any leak.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy.accumulation import RunScores
from splitveil.common.privacy.cross_fitting import FeatureModels

MIN_ROWS = 50
"""Rows below which regressions on features say nothing."""

_NORMAL_QUANTILE = 1.96
_NOTHING_LEFT = 1e-12
"""Share of a score's variance that counts as rounding."""

_Floats = npt.NDArray[np.float64]


class NumberCovariates(NamedTuple):
    """What predicts the labels of some training rows without having memorised them."""

    positions: npt.NDArray[np.int64]
    """Positions of the rows in the common order, ascending, (rows,)."""
    features: npt.NDArray[np.float32]
    """Activations, predictions and the active party's own features, (rows, values), finite."""
    labels: _Floats
    """Shares of the range, (rows,), for the measurement alone."""


class AdjustedR2(NamedTuple):
    """The R2 of one attack beyond features."""

    value: float
    low: float
    """Lower end of its 95 % interval; 0 where it may be chance."""
    high: float


def adjusted_r2(features: npt.NDArray[np.float32], labels: _Floats, scores: _Floats) -> AdjustedR2:
    """Return the share of the variance which features leave of labels that a score explains.

    The interval is that of a correlation by its influence function, which asks for no distribution.

    Args:
        features: (rows, values), finite.
        labels: (rows,), finite.
        scores: (rows,), finite.

    Returns:
        NaN where features leave nothing of the labels; 0 where they leave nothing of the scores.

    Raises:
        ValueError: there are fewer than ``MIN_ROWS`` rows.
    """
    if len(labels) < MIN_ROWS:
        raise ValueError(f"expected at least {MIN_ROWS} rows, got {len(labels)}")
    models = FeatureModels.of(features)
    label, score = (
        _standardised(values - models.explained(values), float(values.var()))
        for values in (labels - labels.mean(), scores - scores.mean())
    )
    if label is None:
        return AdjustedR2(float("nan"), float("nan"), float("nan"))
    if score is None:
        return AdjustedR2(0.0, 0.0, 0.0)
    correlation = float((label * score).mean())
    influence = label * score - correlation * (np.square(label) + np.square(score)) / 2
    margin = _NORMAL_QUANTILE * float(influence.std()) / len(labels) ** 0.5
    size = abs(correlation)
    low, high = max(size - margin, 0.0), min(size + margin, 1.0)
    return AdjustedR2(min(size, 1.0) ** 2, low**2, high**2)


def measure_numbers_beyond_features(
    covariates: NumberCovariates, attacks: Mapping[str, RunScores]
) -> dict[str, AdjustedR2]:
    """Measure attacks on some of a run's rows.

    Args:
        attacks: attack -> its scores, without the rows whose labels it was told.

    Returns:
        attack -> figure, without attacks that scored too few of the rows.
    """
    found = {}
    for attack, one in attacks.items():
        _, rows, scored = np.intersect1d(
            covariates.positions, one.positions, assume_unique=True, return_indices=True
        )
        if len(rows) < MIN_ROWS:
            continue
        labels, scores = covariates.labels[rows], one.scores[scored]
        figure = adjusted_r2(covariates.features[rows], labels, scores)
        if not np.isnan(figure.value):
            found[attack] = figure
    return found


def _standardised(rest: _Floats, variance: float) -> _Floats | None:
    """Return residuals with mean 0 and variance 1; None where they are rounding."""
    centred = rest - rest.mean()
    left = float(np.square(centred).mean())
    if left <= _NOTHING_LEFT * variance:
        return None
    scaled: _Floats = centred / left**0.5
    return scaled
