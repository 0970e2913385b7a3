"""Measures what this party's activations reveal of its own features, without any label.

Somebody who knows the features of some rows fits a linear map from activations to a column, and
applies it to rows whose features they do not know. Here the map is ridge regression, cross-fitted:
each row is predicted by a map that has not seen it. A numeric column's figure is R^2, the share of
its variance that is reconstructed (0: no better than the mean). A category's figure is the accuracy
of the category with the highest score, beside the share of the most frequent category, which needs
no activation; of a column with very many categories, in the rows of the most frequent ones.

It is a lower bound: a nonlinear map, or the bottom model itself, may reveal more, and so may
several columns together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.run.sample_order import Positions
from splitveil.passive_party.bottom_trainer import BottomTrainer

FOLDS = 5
LEAST_ROWS = 50  # fewer rows say nothing
MOST_DIMENSIONS = 1024  # wider activations are projected onto as many random directions first
MOST_CATEGORIES = 64
"""The most frequent categories of a column; rows of the others are not asked about."""

_RIDGE = 1e-3  # penalty per row, in units of the variance of a standardised activation
_SEED = 0
_EMBEDDED_AT_ONCE = 1024

_Numbers = npt.NDArray[np.float64]
Kind = Literal["numeric", "categorical"]


@dataclass(frozen=True)
class ColumnExposure:
    name: str
    kind: Kind
    figure: float  # R^2, or accuracy; of rows that the map has not seen
    without: float  # the same without activations: 0, or the share of the most frequent category

    @property
    def gain_fraction(self) -> float:
        """Share of what was unknown without activations that they reveal, within 0 and 1."""
        unknown = 1 - self.without
        return max(0.0, (self.figure - self.without) / unknown) if unknown > 0 else 0.0


@dataclass(frozen=True)
class FeatureExposure:
    rows: NonNegativeInt
    dimensions: NonNegativeInt  # values per activation
    columns: tuple[ColumnExposure, ...]
    own_rows: NonNegativeInt  # rows of this party's file, whose blinded ids were offered
    has_images: bool = False  # whether there are images, whose reconstruction is not measured


def measure_exposure(
    trainer: BottomTrainer, encoder: FeatureEncoder, own_rows: int, most_rows: int
) -> FeatureExposure | None:
    """Reconstruct the features of some aligned rows from activations; None if they are too few."""
    aligned_rows = trainer.num_rows
    count = min(aligned_rows, most_rows)
    if count < LEAST_ROWS:
        return None
    generator = np.random.default_rng(_SEED)
    positions = np.sort(generator.choice(aligned_rows, count, replace=False))
    activations, features = _embedded(trainer, positions)
    dimensions = activations.shape[1]
    if dimensions > MOST_DIMENSIONS:
        directions = generator.normal(size=(dimensions, MOST_DIMENSIONS))
        activations = activations @ directions / MOST_DIMENSIONS**0.5
    folds = generator.permutation(count) % FOLDS
    columns = tuple(_columns(activations, features, encoder, folds))
    return FeatureExposure(count, dimensions, columns, own_rows, encoder.image is not None)


_EXPOSURE = TypeAdapter(FeatureExposure)


def exposure_to_json(exposure: FeatureExposure) -> Any:
    return _EXPOSURE.dump_python(exposure, mode="json")


def exposure_from_json(document: object) -> FeatureExposure | None:
    try:
        return _EXPOSURE.validate_python(document)
    except ValidationError:
        return None


def cross_fitted(inputs: _Numbers, targets: _Numbers, folds: npt.NDArray[np.int64]) -> _Numbers:
    """Predict targets, (rows, targets), by ridge regression on the other folds' rows.

    Inputs are (rows, dimensions), and folds the number of each row's fold.
    """
    predicted = np.empty_like(targets)
    for fold in np.unique(folds):
        known, asked = folds != fold, folds == fold
        centre, spread = inputs[known].mean(axis=0), inputs[known].std(axis=0)
        # A unit that is silent on the known rows says nothing.
        spread = np.where(spread > 0, spread, np.inf)
        fitted_on = (inputs[known] - centre) / spread
        mean = targets[known].mean(axis=0)
        penalty = _RIDGE * len(fitted_on) * np.eye(inputs.shape[1])
        weights = np.linalg.solve(
            fitted_on.T @ fitted_on + penalty, fitted_on.T @ (targets[known] - mean)
        )
        predicted[asked] = (inputs[asked] - centre) / spread @ weights + mean
    return predicted


def _embedded(trainer: BottomTrainer, positions: Positions) -> tuple[_Numbers, Features]:
    parts = np.array_split(positions, range(_EMBEDDED_AT_ONCE, len(positions), _EMBEDDED_AT_ONCE))
    activations = [trainer.embed(trainer.rows(part)).flatten(1).double().cpu() for part in parts]
    return (
        np.concatenate([part.numpy() for part in activations]),
        trainer.rows(positions).to(activations[0].device),
    )


def _columns(
    activations: _Numbers, features: Features, encoder: FeatureEncoder, folds: npt.NDArray[np.int64]
) -> Iterator[ColumnExposure]:
    if features.numeric is not None:
        numbers = features.numeric.double().numpy()
        predicted = cross_fitted(activations, numbers, folds)
        errors = ((numbers - predicted) ** 2).sum(axis=0)
        totals = ((numbers - numbers.mean(axis=0)) ** 2).sum(axis=0)
        # The numbers of one list of categories are taken together.
        names, widths = zip(*encoder.numeric_parts, strict=True)
        starts = np.cumsum([0, *widths[:-1]])
        sums = np.add.reduceat(errors, starts), np.add.reduceat(totals, starts)
        for name, error, total in zip(names, *sums, strict=True):
            if total > 0:
                yield ColumnExposure(name, "numeric", float(1 - error / total), 0.0)
    if features.categorical is not None:
        for vocabulary, slots in zip(
            encoder.categorical, features.categorical.numpy().T, strict=True
        ):
            found = _of_category(activations, slots, folds)
            if found is not None:
                yield ColumnExposure(vocabulary.name, "categorical", *found)


def _of_category(
    activations: _Numbers, slots: npt.NDArray[np.int64], folds: npt.NDArray[np.int64]
) -> tuple[float, float] | None:
    _, members, counts = np.unique(slots, return_inverse=True, return_counts=True)
    if len(counts) < 2:
        return None
    rank = np.empty(len(counts), dtype=np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    classes = rank[members]
    asked = min(len(counts), MOST_CATEGORIES)
    predicted = cross_fitted(activations, np.eye(len(counts), asked)[classes], folds)
    is_asked = classes < asked
    is_named = predicted.argmax(axis=1)[is_asked] == classes[is_asked]
    return float(is_named.mean()), float(counts.max() / is_asked.sum())
