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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from threadpoolctl import threadpool_limits

from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.errors import DataError
from splitveil.common.run.sample_order import Positions
from splitveil.passive_party.components_trainer import ComponentsTrainer
from splitveil.passive_party.information_value import ColumnLoss, ColumnValue

MOST_DIMENSIONS = 512  # wider activations are projected onto as many random directions first
RARE_ROWS = 5  # levels in fewer of the rows are taken together
MOST_LEVELS = 1000  # the most frequent; the others are taken together

_NEIGHBOURS = 15
_AT_ONCE = 256  # rows that are embedded, or whose neighbours are looked for
_QUARTERS = np.arange(4)
_RIDGE = 1e-6
_SEED = 0
_HIDDEN, _EPOCHS, _BATCH, _MOST_GUESSED, _LEARNING_RATE = 128, 40, 100, 32, 3e-3  # of the network
_DROPPED = np.float32(0.1)

_Numbers = npt.NDArray[np.float64]
_Rows = npt.NDArray[np.int64]  # a class or the number of a row, for each row
Kind = Literal["number", "gap", "category", "list"]


def columns_of(
    features: Features, encoder: FeatureEncoder
) -> Iterator[tuple[str, Kind, npt.NDArray[Any]]]:
    """Yield each column's values, (rows,); of a list, once for each of its categories."""
    if features.numeric is not None:
        kinds: list[Kind] = ["number" for _ in encoder.numeric]
        kinds += ["gap" for _ in encoder.indicators]
        kinds += ["list" for _ in encoder.lists]
        numbers = iter(features.numeric.T)
        for kind, (name, width) in zip(kinds, encoder.numeric_parts, strict=True):
            for values in islice(numbers, width):
                yield name, kind, values
    if features.categorical is not None:
        for vocabulary, slots in zip(encoder.categorical, features.categorical.T, strict=True):
            yield vocabulary.name, "category", slots


class Column(NamedTuple):
    name: str
    kind: Kind
    values: npt.NDArray[Any]  # (rows,)
    classes: _Rows
    judged_as: _Rows  # of each class

    @classmethod
    def of(cls, name: str, kind: Kind, values: npt.NDArray[Any]) -> "Column":
        """Make a category's classes of its levels, and a number's of its quarters."""
        # Of a category, class 0 is of the most frequent level. Levels that are rare are judged as
        # 0, and others from 1.
        _, members, counts = np.unique(values, return_inverse=True, return_counts=True)
        if kind != "category":
            # Equal numbers stay together, in the quarter of their middle.
            ranks = (np.cumsum(counts) - counts / 2)[members]
            return cls(name, kind, values, (ranks * 4 / len(values)).astype(np.int64), _QUARTERS)
        order = np.argsort(-counts, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        single = min(int(np.sum(counts >= RARE_ROWS)), MOST_LEVELS)
        judged_as = np.arange(1, len(counts) + 1)
        judged_as[single:] = 0
        return cls(name, kind, values, np.minimum(rank[members], MOST_LEVELS), judged_as)

    @property
    def judged(self) -> _Rows:
        found: _Rows = self.judged_as[self.classes]
        return found

    @property
    def is_judged(self) -> bool:
        counts = np.bincount(self.judged)
        is_rare = self.kind == "category" and counts[0] > len(self.values) / 2
        return bool(np.count_nonzero(counts) > 1 and not is_rare)


def right_guesses(
    activations: _Numbers, columns: Sequence[Column], known: int, *, has_network: bool = True
) -> Iterator[list[npt.NDArray[np.bool_]]]:
    """Yield for each column which of the other rows each method guesses right."""
    dimensions = activations.shape[1]
    if dimensions > MOST_DIMENSIONS:
        activations = activations @ random_directions(dimensions, 0)
    spread = activations.std(axis=0)
    # A unit that is silent on these rows says nothing.
    activations = (activations - activations.mean(axis=0)) / np.where(spread > 0, spread, np.inf)
    nearest = _nearest_rows(activations, known)
    is_trained = has_network and len(columns)
    of_network = _by_network(activations, columns, known) if is_trained else [None] * len(columns)
    for column, guess in zip(columns, of_network, strict=True):
        guesses = [
            *(() if guess is None else (guess,)),
            _by_class_means(activations, column.classes, known),
            _by_vote(column.classes, *nearest),
        ]
        if column.kind == "number":
            guesses.append(_by_regression(activations, column.values, column.classes, known))
        yield [column.judged_as[one] == column.judged[known:] for one in guesses]


@lru_cache(maxsize=2)
def random_directions(dimensions: int, seed: int) -> _Numbers:
    """Return directions onto which wide activations are projected, (dimensions, fewer)."""
    drawn = np.random.default_rng([_SEED, seed]).normal(size=(dimensions, MOST_DIMENSIONS))
    found: _Numbers = drawn / MOST_DIMENSIONS**0.5
    return found


def _by_network(activations: _Numbers, columns: Sequence[Column], known: int) -> _Rows:
    """Return the classes that a network guesses, (columns, rows): one for all columns at once."""
    most = min(_MOST_GUESSED, max(int(c.classes.max()) + 1 for c in columns))
    targets = np.array([np.minimum(column.classes[:known], most - 1) for column in columns]).T
    given, drawn = activations.astype(np.float32), np.random.default_rng(_SEED)
    widths = (given.shape[1], _HIDDEN, _HIDDEN, len(columns) * most)
    layers = [
        (drawn.uniform(-1, 1, (before + 1, width)) / max(before, 1) ** 0.5).astype(np.float32)
        for before, width in pairwise(widths)
    ]  # the last row of each is its bias
    momenta, squares = ([np.zeros_like(layer) for layer in layers] for _ in range(2))
    steps = -(-_EPOCHS * known // _BATCH)
    with threadpool_limits(1):  # more threads gain nothing on small batches, and wait
        for step in range(steps):
            rows = drawn.integers(known, size=min(known, _BATCH))
            kept = (drawn.random((len(rows), _HIDDEN), np.float32) >= _DROPPED) / (1 - _DROPPED)
            *inputs, output = _forward(given[rows], layers, kept)
            scores = output.reshape(len(rows), len(columns), most)
            change = np.exp(scores - scores.max(axis=2, keepdims=True))
            change /= change.sum(axis=2, keepdims=True)
            change[np.arange(len(rows))[:, None], np.arange(len(columns)), targets[rows]] -= 1
            change = change.reshape(output.shape) / (len(rows) * len(columns))
            rate = _LEARNING_RATE * (1 + math.cos(math.pi * step / steps)) / 2
            for number in (2, 1, 0):  # cross entropy's gradient, from the last layer on
                slope, layer = inputs[number].T @ change, layers[number]
                if number:
                    change = change @ layer[:-1].T * (inputs[number][:, :-1] > 0)
                if number == 1:
                    change *= kept
                # Adam (Kingma and Ba, ICLR 2015)
                momenta[number] += 0.1 * (slope - momenta[number])
                squares[number] += 0.001 * (slope**2 - squares[number])
                deviation = np.sqrt(squares[number] / (1 - 0.999 ** (step + 1))) + 1e-8
                layer -= rate / (1 - 0.9 ** (step + 1)) * momenta[number] / deviation
        output = _forward(given[known:], layers)[-1]
    guessed: _Rows = output.reshape(-1, len(columns), most).argmax(2).T
    return guessed


def _forward(
    given: npt.NDArray[np.float32], layers: Sequence[npt.NDArray[np.float32]], kept: Any = 1
) -> list[npt.NDArray[np.float32]]:
    """Return what each layer is given, with a column of ones, and the output of the last."""
    found = []
    for number, layer in enumerate(layers):
        found.append(np.column_stack([given, np.ones(len(given), np.float32)]))
        given = found[-1] @ layer
        if number < len(layers) - 1:
            given = np.maximum(given, 0) * (kept if number == 0 else 1)
    return [*found, given]


def _nearest_rows(activations: _Numbers, known: int) -> tuple[_Rows, _Numbers]:
    of_known, asked, found = activations[:known], activations[known:], []
    squares = np.square(of_known).sum(axis=1)
    for part in np.array_split(asked, range(_AT_ONCE, len(asked), _AT_ONCE)):
        # Less the square of the row itself, which is the same for all of its neighbours.
        nearness = 2 * part @ of_known.T - squares
        rows = np.argpartition(-nearness, _NEIGHBOURS, axis=1)[:, :_NEIGHBOURS]
        distances = np.linalg.norm(part[:, None] - of_known[rows], axis=2)
        order = np.argsort(distances, axis=1)
        found.append([np.take_along_axis(one, order, axis=1) for one in (rows, distances)])
    rows, distances = map(np.concatenate, zip(*found, strict=True))
    return rows, 1 / (distances + 1e-6)


def _by_vote(classes: _Rows, rows: _Rows, weights: _Numbers) -> _Rows:
    voted = classes[rows]
    votes = ((voted[:, :, None] == voted[:, None, :]) * weights[:, None, :]).sum(axis=2)
    elected: _Rows = np.take_along_axis(voted, votes.argmax(axis=1)[:, None], axis=1)[:, 0]
    return elected


def _by_regression(
    activations: _Numbers, values: npt.NDArray[Any], classes: _Rows, known: int
) -> _Rows:
    """Return the class of the number nearest to the prediction of ridge regression."""
    order = np.argsort(values)
    ordered = values[order].astype(np.float64)
    mean, centre = values[:known].mean(dtype=np.float64), activations[:known].mean(axis=0)
    centred = activations - centre
    products = centred[:known].T @ centred[:known] + _RIDGE * np.eye(len(centre))
    slopes = np.linalg.solve(products, centred[:known].T @ (values[:known] - mean))
    nearest = np.searchsorted((ordered[1:] + ordered[:-1]) / 2, centred[known:] @ slopes + mean)
    guessed: _Rows = classes[order[nearest]]
    return guessed


def _by_class_means(activations: _Numbers, classes: _Rows, known: int) -> _Rows:
    levels, members, counts = np.unique(classes[:known], return_inverse=True, return_counts=True)
    means = np.zeros((len(levels), activations.shape[1]))
    np.add.at(means, members, activations[:known])
    means /= counts[:, None]
    centred = activations[:known] - means[members]
    covariance = centred.T @ centred / known
    unit = np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    shrunk = (1 - _RIDGE) * covariance + _RIDGE * unit
    weights = np.linalg.lstsq(shrunk, means.T, rcond=None)[0]
    merits = activations[known:] @ weights - (means.T * weights).sum(axis=0) / 2
    guessed: _Rows = levels[(merits + np.log(counts / known)).argmax(axis=1)]
    return guessed


GUESSED_ROWS = 4000  # at most
KNOWN_ROWS = 1000  # whose columns the guesser knows; of a small table, half of the rows
LEAST_ROWS = 50  # fewer rows say nothing

_STANDARD_ERRORS = 3  # that make a gain more than chance

_TARGET_LEVELS = 7  # that a score's target tells apart; rarer ones are taken together


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
    losses: tuple[ColumnLoss, ...] = ()  # and what is lost without each of them

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
    trainer: ComponentsTrainer,
    encoder: FeatureEncoder,
    own_rows: int,
    sample: Sample | None,
    of_epochs: SentInEpochs | None = None,
) -> FeatureExposure | None:
    """Guess features of aligned rows from activations; None if too few, or not finite."""
    if sample is None:
        return None
    positions = sample.positions
    parts = np.array_split(positions, range(_AT_ONCE, len(positions), _AT_ONCE))
    activations = np.concatenate([trainer.activations(part) for part in parts])
    features = trainer.arrays(positions)
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
    fit: Callable[[_Numbers], _Numbers],
    scores: int = 1,
) -> tuple[tuple[ColumnExposure, ...], str, npt.NDArray[np.float32]]:
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
    targets = (levels - levels.mean(axis=0)) / spread
    values = fit(targets)
    best: dict[str, ColumnExposure] = {}
    places: dict[str, int] = {}
    for place, column in enumerate(columns):
        (right,) = right_guesses(values[:, [place]], [column], known, has_network=False)
        found = _exposure(column, right, known)
        if column.name not in best or _merit(found) > _merit(best[column.name]):
            best[column.name], places[column.name] = found, place
    aimed = sorted(best, key=lambda one: _merit(best[one]), reverse=True)[:scores]
    numbers = targets[:, [places[one] for one in aimed]].astype(np.float32)
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
    written = _EXPOSURE.dump_python(exposure, mode="json")
    names = ("disclosure", "strongest_disclosure")
    return written | {name: getattr(exposure, name) for name in names}


def exposure_from_json(document: object) -> FeatureExposure | None:
    try:
        return _EXPOSURE.validate_python(document)
    except ValidationError:
        return None
