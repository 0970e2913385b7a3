"""Measures how well this party's columns can be guessed from what was sent, without any label.

Somebody who knows the columns of some rows guesses those of others: by a network that is trained on
all columns at once, by the nearest class mean under one covariance, with the classes' shares
(linear discriminant analysis), by a vote of the nearest rows, and for a number by ridge regression;
the way that is right most often counts. A number's classes are its quarters, from lowest to
highest; a category's are its levels, each by itself, and those that are too rare count as one. The
figure is the share of rows that are guessed right, beside the share of the most frequent class,
which needs nothing that was sent.

It is a lower bound: another method, or the bottom model itself, may reveal more, and so may what
the label owner knows besides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.errors import DataError
from splitveil.common.run.sample_order import Positions
from splitveil.passive_party.bottom_trainer import BottomTrainer
from splitveil.passive_party.column_guesses import Column, Kind, columns_of, right_guesses
from splitveil.passive_party.information_value import ColumnValue

GUESSED_ROWS = 4000  # at most
KNOWN_ROWS = 1000  # whose columns the guesser knows; of a small table, half of the rows
LEAST_ROWS = 50  # fewer rows say nothing

_STANDARD_ERRORS = 3  # that make a gain more than chance
_SEED = 0
_EMBEDDED_AT_ONCE = 1024

_TARGET_LEVELS = 7  # that a score's target tells apart; rarer ones are taken together

_Numbers = npt.NDArray[np.float64]


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
        """Share of the unknown without activations that activations reveal, within 0 and 1."""
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
    rows: NonNegativeInt  # that were guessed
    dimensions: NonNegativeInt  # values that were sent of each row
    columns: tuple[ColumnExposure, ...]
    own_rows: NonNegativeInt  # rows of this party's file, whose blinded ids were offered
    unjudged: tuple[str, ...]  # of one value, of sequences, or whose levels are mostly too rare
    has_images: bool = False  # whether there are images, whose reconstruction is not measured
    known_rows: NonNegativeInt = KNOWN_ROWS
    epochs: NonNegativeInt = 0  # whose activations are counted; 0 if each row was sent once
    remedy: str = ""  # what fewer numbers would have given away, in words
    values: tuple[ColumnValue, ...] = ()  # what the columns say about the outcome, by a release

    @property
    def disclosure(self) -> float:
        """Mean over columns of the revealed share of the unknown, 0 to 1."""
        return sum(one.gain_fraction for one in self.columns) / max(len(self.columns), 1)

    @property
    def strongest(self) -> ColumnExposure | None:
        return max(self.columns, key=_merit, default=None)

    @property
    def strongest_disclosure(self) -> float:
        return max((one.gain_fraction for one in self.columns), default=0.0)


class Sample(NamedTuple):
    """Rows whose columns are known, then rows whose columns are guessed."""

    known: int
    positions: Positions

    @classmethod
    def draw(cls, among: Positions, most_rows: int = GUESSED_ROWS) -> "Sample | None":
        """Draw rows at random, always the same; None if there are too few."""
        if len(among) < LEAST_ROWS:
            return None
        known = min(KNOWN_ROWS, len(among) // 2)
        drawn = np.random.default_rng(_SEED).permutation(among)
        return cls(known, drawn[: known + most_rows])


class SentInEpochs(NamedTuple):
    """Activations of a run with gradients, which sends each row anew in every epoch."""

    epochs: int
    dimensions: int  # values per row
    values: npt.NDArray[np.float32]  # side by side, or projected, (rows of the sample, values)


def measure_exposure(
    trainer: BottomTrainer,
    encoder: FeatureEncoder,
    own_rows: int,
    sample: Sample | None,
    of_epochs: SentInEpochs | None = None,
) -> FeatureExposure | None:
    """Guess features of aligned rows from activations; None if too few, or not finite."""
    if sample is None:
        return None
    activations, features = _embedded(trainer, sample.positions)
    sent, epochs, dimensions = [activations], 0, activations.shape[1]
    if of_epochs is not None:
        epochs, dimensions = of_epochs[:2]
        sent.append(of_epochs.values.astype(np.float64))
    return exposure_of(sent, features, encoder, sample.known, own_rows, dimensions, epochs)


def exposure_of(
    sent: Sequence[_Numbers],
    features: Features,
    encoder: FeatureEncoder,
    known: int,
    own_rows: int,
    dimensions: int = 0,
    epochs: int = 0,
) -> FeatureExposure | None:
    """Guess features of all rows but the first, which are known; None unless all is finite.

    The columns are guessed from each of the arrays in ``sent``, (rows, values); the best counts.
    """
    columns = [Column.of(*one) for one in columns_of(features, encoder)]
    judged = [column for column in columns if column.is_judged]
    right: list[list[npt.NDArray[np.bool_]]] = [[] for _ in judged]
    for values in sent:
        if not np.isfinite(values).all():  # training has diverged
            return None
        for found, of_column in zip(right, right_guesses(values, judged, known), strict=True):
            found.extend(of_column)
    best: dict[str, ColumnExposure | None] = {column.name: None for column in encoder.sequences}
    best |= {column.name: None for column in columns}
    for column, guesses in zip(judged, right, strict=True):
        # Of a list, the category that is guessed best.
        one, earlier = _exposure(column, guesses, known), best[column.name]
        best[column.name] = max(filter(None, (one, earlier)), key=_merit)
    return FeatureExposure(
        len(features) - known,
        dimensions or sent[0].shape[1],
        tuple(column for column in best.values() if column is not None),
        own_rows,
        tuple(name for name, column in best.items() if column is None),
        encoder.image is not None,
        known,
        epochs,
    )


def by_targets(
    features: Features,
    encoder: FeatureEncoder,
    known: int,
    fit: Callable[[torch.Tensor], torch.Tensor],
    scores: int = 1,
) -> tuple[tuple[ColumnExposure, ...], str, torch.Tensor]:
    """Guess each column from one number that is fitted to it.

    ``fit`` returns of the columns of the known rows as numbers, (known, columns), what is sent of
    all rows, (rows, columns).

    Returns the figures, the columns that are guessed best, one for each of so many scores, and
    their numbers, (known, scores) float32.
    """
    every = (Column.of(*one) for one in columns_of(features, encoder))
    columns = [column for column in every if column.is_judged]
    if not columns:
        raise DataError("data.features: no column can be judged")
    levels = np.stack([np.minimum(one.classes[:known], _TARGET_LEVELS) for one in columns], axis=1)
    spread = np.maximum(levels.std(axis=0), 1e-9)
    targets = torch.from_numpy((levels - levels.mean(axis=0)) / spread)
    values = fit(targets).double().numpy()
    best: dict[str, ColumnExposure] = {}
    places: dict[str, int] = {}
    for place, column in enumerate(columns):
        (right,) = right_guesses(values[:, [place]], [column], known, has_network=False)
        found = _exposure(column, right, known)
        if column.name not in best or _merit(found) > _merit(best[column.name]):
            best[column.name], places[column.name] = found, place
    aimed = sorted(best, key=lambda one: _merit(best[one]), reverse=True)[:scores]
    numbers = targets[:, [places[one] for one in aimed]].float()
    return tuple(best.values()), " and ".join(aimed), numbers


def _exposure(column: Column, right: Sequence[npt.NDArray[np.bool_]], known: int) -> ColumnExposure:
    judged = column.judged[known:]  # whose most frequent class is the best guess without anything
    is_most_frequent = judged == np.bincount(judged).argmax()
    is_right = max([is_most_frequent, *right], key=np.count_nonzero)
    gains = is_right.astype(np.float64) - is_most_frequent
    # Below 1, so that there is something to reveal, though no guessed row differs.
    without = min(float(is_most_frequent.mean()), 1 - 1e-9)
    error = float(gains.std() / len(gains) ** 0.5)
    return ColumnExposure(
        column.name, column.kind, max(float(is_right.mean()), without), without, error
    )


def _merit(column: ColumnExposure) -> tuple[bool, float]:
    return column.is_above_chance, column.gain_fraction


_EXPOSURE = TypeAdapter(FeatureExposure)


def exposure_to_json(exposure: FeatureExposure) -> Any:
    return _EXPOSURE.dump_python(exposure, mode="json") | {"disclosure": exposure.disclosure}


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
