"""Measures how well this party's columns can be guessed from its activations, without any label.

Somebody who knows a column for some rows guesses it for others. Each row's guess is made from rows
of the other folds: by the nearest class mean under one covariance, with the classes' shares (linear
discriminant analysis), by a vote of the nearest rows, and for a number by ridge regression; the way
that is right most often counts. A number's classes are its quarters, from lowest to highest; a
category's are its levels, each by itself, and those that are too rare count as one. The figure is
the share of rows that are guessed right, beside the share of the most frequent class, which needs
no activation.

It is a lower bound: another method, or the bottom model itself, may reveal more, and so may several
columns together.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.run.sample_order import Positions
from splitveil.passive_party.bottom_trainer import BottomTrainer

FOLDS = 5
LEAST_ROWS = 50  # fewer rows say nothing
MOST_DIMENSIONS = 512  # wider activations are projected onto as many random directions first
RARE_ROWS = 5  # levels in fewer of the rows are taken together
MOST_LEVELS = 1000  # the most frequent; the others are taken together

_STANDARD_ERRORS = 3  # by which a gain is more than chance
_NEIGHBOURS = 15
_QUARTERS = np.arange(4)
_RIDGE = 1e-6
_SEED = 0
_EMBEDDED_AT_ONCE = 1024

_Numbers = npt.NDArray[np.float64]
_Rows = npt.NDArray[np.int64]  # a class or the number of a row, for each row
Kind = Literal["number", "gap", "category", "list"]


@dataclass(frozen=True)
class ColumnExposure:
    name: str
    kind: Kind
    right: Annotated[float, Field(ge=0, le=1)]  # share of rows that are guessed right
    without: Annotated[float, Field(ge=0, lt=1)]  # the same without activations
    error: float  # standard error of the difference

    @property
    def gain(self) -> float:
        return self.right - self.without

    @property
    def gain_fraction(self) -> float:
        """Share of what was unknown without activations that they reveal, within 0 and 1."""
        return self.gain / (1 - self.without)

    @property
    def is_above_chance(self) -> bool:
        return self.gain > _STANDARD_ERRORS * self.error

    @property
    def is_mostly_known(self) -> bool:
        return self.is_above_chance and self.gain_fraction > 0.5

    def of_100(self, share: float) -> str:
        is_close = self.is_above_chance and (self.gain < 0.01 or 0.995 <= self.right < 1)
        return f"{100 * share:.{int(is_close)}f}"


@dataclass(frozen=True)
class FeatureExposure:
    rows: NonNegativeInt
    dimensions: NonNegativeInt  # values per activation
    columns: tuple[ColumnExposure, ...]
    own_rows: NonNegativeInt  # rows of this party's file, whose blinded ids were offered
    unjudged: tuple[str, ...]  # of one value, of sequences, or whose levels are mostly too rare
    has_images: bool = False  # whether there are images, whose reconstruction is not measured


def measure_exposure(
    trainer: BottomTrainer, encoder: FeatureEncoder, own_rows: int, most_rows: int
) -> FeatureExposure | None:
    """Guess features of aligned rows from activations; None if too few, or not finite."""
    aligned_rows = trainer.num_rows
    count = min(aligned_rows, most_rows)
    if count < LEAST_ROWS:
        return None
    generator = np.random.default_rng(_SEED)
    positions = np.sort(generator.choice(aligned_rows, count, replace=False))
    activations, features = _embedded(trainer, positions)
    if not np.isfinite(activations).all():  # training has diverged
        return None
    dimensions = activations.shape[1]
    if dimensions > MOST_DIMENSIONS:
        directions = generator.normal(size=(dimensions, MOST_DIMENSIONS))
        activations = activations @ directions / MOST_DIMENSIONS**0.5
    spread = activations.std(axis=0)
    # A unit that is silent on these rows says nothing.
    activations = (activations - activations.mean(axis=0)) / np.where(spread > 0, spread, np.inf)
    folds = generator.permutation(count) % FOLDS
    nearest = _nearest_rows(activations, folds)
    best: dict[str, ColumnExposure | None] = {}
    best |= {column.name: None for column in encoder.sequences}
    for name, kind, values in _columns(features, encoder):
        found, earlier = _exposure(name, kind, values, activations, nearest, folds), best.get(name)
        # Of a list, the category that is guessed best.
        best[name] = max(filter(None, (found, earlier)), key=_merit, default=None)
    return FeatureExposure(
        count,
        dimensions,
        tuple(column for column in best.values() if column is not None),
        own_rows,
        tuple(name for name, column in best.items() if column is None),
        encoder.image is not None,
    )


def _merit(column: ColumnExposure) -> tuple[bool, float]:
    return column.is_above_chance, column.gain_fraction


_EXPOSURE = TypeAdapter(FeatureExposure)


def exposure_to_json(exposure: FeatureExposure) -> Any:
    return _EXPOSURE.dump_python(exposure, mode="json")


def exposure_from_json(document: object) -> FeatureExposure | None:
    try:
        return _EXPOSURE.validate_python(document)
    except ValidationError:
        return None


def _embedded(trainer: BottomTrainer, positions: Positions) -> tuple[_Numbers, Features]:
    parts = np.array_split(positions, range(_EMBEDDED_AT_ONCE, len(positions), _EMBEDDED_AT_ONCE))
    activations = [trainer.embed(trainer.rows(part)).flatten(1).double().cpu() for part in parts]
    return (
        np.concatenate([part.numpy() for part in activations]),
        trainer.rows(positions).to(activations[0].device),
    )


def _columns(
    features: Features, encoder: FeatureEncoder
) -> Iterator[tuple[str, Kind, npt.NDArray[Any]]]:
    """Yield each column's values, (rows,); of a list, once for each of its categories."""
    if features.numeric is not None:
        kinds: list[Kind] = ["number" for _ in encoder.numeric]
        kinds += ["gap" for _ in encoder.indicators]
        kinds += ["list" for _ in encoder.lists]
        numbers = iter(features.numeric.numpy().T)
        for kind, (name, width) in zip(kinds, encoder.numeric_parts, strict=True):
            for values in islice(numbers, width):
                yield name, kind, values
    if features.categorical is not None:
        for vocabulary, slots in zip(
            encoder.categorical, features.categorical.numpy().T, strict=True
        ):
            yield vocabulary.name, "category", slots


def _exposure(
    name: str,
    kind: Kind,
    values: npt.NDArray[Any],
    activations: _Numbers,
    nearest: tuple[_Rows, _Numbers],
    folds: _Rows,
) -> ColumnExposure | None:
    classes, judged_as = _levels(values) if kind == "category" else (_quarters(values), _QUARTERS)
    judged = judged_as[classes]
    counts = np.bincount(judged)
    if np.count_nonzero(counts) < 2 or (kind == "category" and counts[0] > len(judged) / 2):
        return None
    is_most_frequent = judged == counts.argmax()
    guesses = [_by_class_means(activations, classes, folds), _by_vote(classes, *nearest)]
    if kind == "number":
        guesses.append(_by_regression(activations, values, classes, folds))
    is_right = max((judged_as[guess] == judged for guess in guesses), key=np.count_nonzero)
    gains = is_right.astype(np.float64) - is_most_frequent
    without = float(is_most_frequent.mean())
    error = float(gains.std() / len(gains) ** 0.5)
    return ColumnExposure(name, kind, max(float(is_right.mean()), without), without, error)


def _quarters(values: npt.NDArray[Any]) -> _Rows:
    from scipy.stats import rankdata  # noqa: PLC0415

    # Equal numbers stay together, in the quarter of their middle.
    quarters: _Rows = ((rankdata(values) - 0.5) * 4 / len(values)).astype(np.int64)
    return quarters


def _levels(values: npt.NDArray[Any]) -> tuple[_Rows, _Rows]:
    """Return levels, the most frequent 0, and what each is judged as: the rare 0, others from 1."""
    _, members, counts = np.unique(values, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    single = min(int(np.sum(counts >= RARE_ROWS)), MOST_LEVELS)
    judged_as = np.arange(1, len(counts) + 1)
    judged_as[single:] = 0
    return np.minimum(rank[members], MOST_LEVELS), judged_as


def _nearest_rows(activations: _Numbers, folds: _Rows) -> tuple[_Rows, _Numbers]:
    # Importing it takes time that only a run that is measured should pay.
    from sklearn.neighbors import NearestNeighbors  # noqa: PLC0415

    rows = np.empty((len(activations), _NEIGHBOURS), dtype=np.int64)
    weights = np.empty(rows.shape)
    for fold in range(FOLDS):
        known, asked = np.flatnonzero(folds != fold), folds == fold
        nearest = NearestNeighbors(n_neighbors=_NEIGHBOURS).fit(activations[known])
        distances, places = nearest.kneighbors(activations[asked])
        rows[asked], weights[asked] = known[places], 1 / (distances + 1e-6)
    return rows, weights


def _by_vote(classes: _Rows, rows: _Rows, weights: _Numbers) -> _Rows:
    voted = classes[rows]
    votes = ((voted[:, :, None] == voted[:, None, :]) * weights[:, None, :]).sum(axis=2)
    elected: _Rows = np.take_along_axis(voted, votes.argmax(axis=1)[:, None], axis=1)[:, 0]
    return elected


def _by_regression(
    activations: _Numbers, values: npt.NDArray[Any], classes: _Rows, folds: _Rows
) -> _Rows:
    """Return the class of the number that is nearest to the one that ridge regression predicts."""
    from sklearn.linear_model import Ridge  # noqa: PLC0415

    order = np.argsort(values)
    ordered = values[order].astype(np.float64)
    predicted = _predicted(Ridge(_RIDGE), activations, values, folds)
    nearest = np.searchsorted((ordered[1:] + ordered[:-1]) / 2, predicted)
    guessed: _Rows = classes[order[nearest]]
    return guessed


def _by_class_means(activations: _Numbers, classes: _Rows, folds: _Rows) -> _Rows:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis  # noqa: PLC0415

    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=_RIDGE)
    guessed: _Rows = _predicted(model, activations, classes, folds)
    return guessed


def _predicted(
    model: Any, activations: _Numbers, values: npt.NDArray[Any], folds: _Rows
) -> npt.NDArray[Any]:
    predicted = np.empty_like(values)
    for fold in range(FOLDS):
        known, asked = folds != fold, folds == fold
        if (values[known] == values[known][0]).all():
            predicted[asked] = values[known][0]
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a class with one row in the other folds
            predicted[asked] = model.fit(activations[known], values[known]).predict(
                activations[asked]
            )
    return predicted
