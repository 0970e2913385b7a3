"""Guesses columns from activations, and finds the rows that each method guesses right.

The ways are a network that learns all columns at once, the nearest class mean under one covariance
with the classes' shares (linear discriminant analysis), a vote of the nearest rows, and for a
number ridge regression.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.models.optimizers import Adam

MOST_DIMENSIONS = 512  # wider activations are projected onto as many random directions first
RARE_ROWS = 5  # levels in fewer of the rows are taken together
MOST_LEVELS = 1000  # the most frequent; the others are taken together

_NEIGHBOURS = 15
_AT_ONCE = 1024  # rows whose neighbours are looked for
_QUARTERS = np.arange(4)
_RIDGE = 1e-6
_SEED = 0
_HIDDEN, _EPOCHS, _BATCH, _MOST_GUESSED, _LEARNING_RATE = 128, 40, 100, 32, 3e-3  # of the network

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
        numbers = iter(features.numeric.numpy().T)
        for kind, (name, width) in zip(kinds, encoder.numeric_parts, strict=True):
            for values in islice(numbers, width):
                yield name, kind, values
    if features.categorical is not None:
        for vocabulary, slots in zip(
            encoder.categorical, features.categorical.numpy().T, strict=True
        ):
            yield vocabulary.name, "category", slots


class Column(NamedTuple):
    name: str
    kind: Kind
    values: npt.NDArray[Any]  # (rows,)
    classes: _Rows
    judged_as: _Rows  # of each class

    @classmethod
    def of(cls, name: str, kind: Kind, values: npt.NDArray[Any]) -> "Column":
        found = _levels(values) if kind == "category" else (_quarters(values), _QUARTERS)
        return cls(name, kind, values, *found)

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
    of_network = _by_network(activations, columns, known) if has_network else [None] * len(columns)
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


def _quarters(values: npt.NDArray[Any]) -> _Rows:
    # Equal numbers stay together, in the quarter of their middle.
    _, members, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2)[members]
    quarters: _Rows = (ranks * 4 / len(values)).astype(np.int64)
    return quarters


def _levels(values: npt.NDArray[Any]) -> tuple[_Rows, _Rows]:
    """Return levels, the most frequent 0, and the class of each: rare ones 0, others from 1."""
    _, members, counts = np.unique(values, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    single = min(int(np.sum(counts >= RARE_ROWS)), MOST_LEVELS)
    judged_as = np.arange(1, len(counts) + 1)
    judged_as[single:] = 0
    return np.minimum(rank[members], MOST_LEVELS), judged_as


def _by_network(activations: _Numbers, columns: Sequence[Column], known: int) -> _Rows:
    """Return the classes that a network guesses, (columns, rows): one for all columns at once."""
    most = min(_MOST_GUESSED, max((int(c.classes.max()) + 1 for c in columns), default=1))
    classes = [np.minimum(column.classes[:known], most - 1) for column in columns]
    targets = torch.from_numpy(np.stack(classes, axis=1)) if columns else torch.empty(known, 0)
    inputs = torch.from_numpy(activations).float()
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(_SEED)
        model = nn.Sequential(
            nn.Linear(inputs.shape[1], _HIDDEN),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(_HIDDEN, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, len(columns) * most),
        )
        optimizer = Adam(model.parameters(), _LEARNING_RATE, fused=True)
        steps = -(-_EPOCHS * known // _BATCH) if columns else 0
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * (1 + math.cos(math.pi * step / steps)) / 2
            rows = torch.randint(known, (min(known, _BATCH),))
            logits = model(inputs[rows]).reshape(-1, most)
            optimizer.zero_grad()
            loss = cross_entropy(logits, targets[rows].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(inputs[known:]).reshape(-1, len(columns), most)
    guessed: _Rows = logits.argmax(2).T.numpy()
    return guessed


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: more gain nothing on small batches, and wait on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
