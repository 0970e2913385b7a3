"""AUCs of a score for more than two classes: each class against the rest, and in pairs.

    pair (i, j)     probability that a random example of class i scores above one of class j
    one vs rest     probability that one of class i scores above one of any other class

A tie counts one half. The second is the mean of the first over the other classes, weighted by their
numbers of examples: the worst pair always leaks at least as much as the worst class. All of them
come from one sort of the scores.

Two classes have one pair, (1, 0), whose AUC is that of `splitveil.common.privacy.leakage`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitveil.common.privacy.leakage import OneClass, areas

Floats = npt.NDArray[np.float64]
ClassIndices = npt.NDArray[np.int64]


class PairAucs(NamedTuple):
    """The AUCs of one score, or of one score per class; NaN where a class has no examples.

    Leading dimensions, if there are any, stand for attacks.
    """

    pairs: Floats
    """Row i, column j: the AUC of class i's score, class i against class j,
    (..., classes, classes)."""

    one_vs_rest: Floats
    """The AUC of class i's score, class i against all others, (..., classes)."""

    def leak(self) -> "PairAucs":
        """Return ``max(auc, 1 - auc)``: an inverted score is a leak, too."""
        return PairAucs(_folded(self.pairs), _folded(self.one_vs_rest))

    def worst_pair(self) -> tuple[int, int]:
        """Return the indices of the two classes told apart best: the score's class, the other.

        Raises:
            OneClass: there is no pair with examples.
        """
        if np.isnan(self.pairs).all():
            raise OneClass("no pair of classes has examples")
        first, second = np.unravel_index(int(np.nanargmax(_folded(self.pairs))), self.pairs.shape)
        return int(first), int(second)

    def worst(self) -> Floats:
        """Return the leak AUC of the pair told apart best, (...); NaN if no pair has an AUC."""
        folded = _folded(self.pairs)
        worst: Floats = np.fmax.reduce(folded, axis=(-2, -1))
        return worst

    def of(self, number: int) -> "PairAucs":
        """Return the AUCs of one attack, by its index in the leading dimension."""
        return PairAucs(self.pairs[number], self.one_vs_rest[number])

    def put(self, aucs: "PairAucs", of_class: int | None) -> None:
        """Copy the AUCs of one class's score, or of a score for all classes, into this table."""
        rows = slice(None) if of_class is None else of_class
        self.pairs[rows] = aucs.pairs[rows]
        self.one_vs_rest[rows] = aucs.one_vs_rest[rows]

    @classmethod
    def none(cls, num_classes: int, *leading: int) -> "PairAucs":
        """Return a table in which every AUC is missing."""
        pairs = np.full((*leading, num_classes, num_classes), np.nan)
        return cls(pairs, np.full((*leading, num_classes), np.nan))


class Score(NamedTuple):
    """One score of a batch's examples."""

    values: Tensor
    """(batch,)."""

    left_out: tuple[int, ...] = ()
    """Rows whose class the attack knew."""

    of_class: int | None = None
    """Index of the class to which the score belongs; None for a score for more than two classes."""


class BatchAucs(NamedTuple):
    """The AUCs that several attacks reached on one batch."""

    worst: list[float]
    """The leak AUC of each attack's worst pair; NaN for an attack without one."""

    leak: PairAucs | None
    """All leak AUCs, with a leading dimension, (attacks,); None for two classes, which have one
    pair."""


def batch_aucs(attacks: Sequence[Sequence[Score]], labels: Tensor, num_classes: int) -> BatchAucs:
    """Measure several attacks on one batch together.

    Args:
        attacks: each attack's scores, one or one per class; with two classes at most one.
        labels: class indices, (batch,), of more than one class.

    Raises:
        ValueError: a score is NaN, or the shapes differ.
    """
    if num_classes == 2:
        aucs = iter(_leak_aucs_of_one_pair([one for scores in attacks for one in scores], labels))
        return BatchAucs([next(aucs) if scores else math.nan for scores in attacks], None)
    indices = labels.cpu().numpy()
    table = PairAucs.none(num_classes, len(attacks))
    for number, scores in enumerate(attacks):
        for values, left_out, of_class in scores:
            chosen = np.ones(len(indices), dtype=np.bool_)
            chosen[list(left_out)] = False
            of_chosen = values.double().cpu().numpy()[chosen]
            of_class_or_all = pair_aucs(of_chosen, indices[chosen], num_classes, of_class)
            table.of(number).put(of_class_or_all, of_class)
    leak = table.leak()
    return BatchAucs(leak.worst().tolist(), leak)


def pair_aucs(
    scores: Floats, labels: ClassIndices, num_classes: int, of_class: int | None = None
) -> PairAucs:
    """Return the AUCs of one score, which belongs to all classes or to one.

    Args:
        of_class: the class to which the score belongs; other classes then have no AUC. None for a
            score for all classes.
    """
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(f"expected one class per score, got {labels.shape} for {scores.shape}")
    if np.isnan(scores).any():
        raise ValueError("expected scores without NaN")
    if num_classes == 2 and of_class == 1:
        return _of_one_pair(scores, labels)
    order = np.argsort(scores)
    ranked, members = scores[order], np.eye(num_classes)[labels[order]]
    up_to_here = np.concatenate([np.zeros((1, num_classes)), members.cumsum(axis=0)])
    first, last = (np.searchsorted(ranked, ranked, side) for side in ("left", "right"))
    # Lower examples of each class count twice, ties once: integers, so nothing is rounded.
    twice_below = up_to_here[first] + up_to_here[last]
    if of_class is None:
        wins = members.T @ twice_below
    else:
        wins = np.full((num_classes, num_classes), np.nan)
        wins[of_class] = members[:, of_class] @ twice_below
    sizes = up_to_here[-1]
    np.fill_diagonal(wins, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        pairs = wins / (2 * np.outer(sizes, sizes))
        one_vs_rest = wins.sum(axis=1) / (2 * sizes * (len(scores) - sizes))
    np.fill_diagonal(pairs, np.nan)
    return PairAucs(pairs, one_vs_rest)


def worst_pair_leak_auc(
    scores: Floats, labels: ClassIndices, num_classes: int, min_examples: int = 1
) -> float:
    """Return the leak AUC of the pair of classes that a score tells apart best.

    Args:
        min_examples: number of examples that each class of a pair needs for the pair to count.

    Raises:
        OneClass: no pair of classes has that many examples.
    """
    aucs = pair_aucs(scores, labels, num_classes)
    sizes = np.bincount(labels, minlength=num_classes)
    enough = np.minimum.outer(sizes, sizes) >= min_examples
    counted = PairAucs(np.where(enough, aucs.pairs, np.nan), aucs.one_vs_rest)
    return float(counted.leak().pairs[counted.worst_pair()])


def _of_one_pair(scores: Floats, labels: ClassIndices) -> PairAucs:
    """Return the AUC of the positives against the negatives, by a faster sort."""
    aucs = PairAucs.none(2)
    area = areas(torch.from_numpy(scores)[None], torch.from_numpy(labels == 1))
    aucs.pairs[1, 0] = aucs.one_vs_rest[1] = float(area[0])
    return aucs


def _leak_aucs_of_one_pair(scores: Sequence[Score], labels: Tensor) -> list[float]:
    """Return the leak AUCs of two classes by one sort of all scores, on the scores' device."""
    device = scores[-1].values.device
    chosen = np.ones((len(scores), len(labels)), dtype=np.bool_)
    for row, score in enumerate(scores):
        chosen[row, list(score.left_out)] = False
    values = torch.stack([score.values.to(device) for score in scores])
    if values.shape != chosen.shape:
        raise ValueError(f"expected one label per score, got {len(labels)} for {values.shape[1]}")
    aucs = areas(values.double(), labels.to(device) == 1, torch.from_numpy(chosen))
    leak_aucs: list[float] = torch.maximum(aucs, 1.0 - aucs).tolist()
    return leak_aucs


def _folded(aucs: Floats) -> Floats:
    folded: Floats = np.maximum(aucs, 1 - aucs)
    return folded
