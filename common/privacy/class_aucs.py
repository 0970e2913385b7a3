"""How much a score tells about one of several classes: each against the rest, and in pairs.

    pair (i, j)     the chance that a random example of class i scores above one of class j
    one vs rest     the chance that one of class i scores above one of any other class

A tie counts one half. The second is the mean of the first over the other classes, weighted by their
examples: the worst pair always leaks at least as much as the worst class. All of them come from one
sort of the scores.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy.leakage import OneClass

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


class ClassAucs(NamedTuple):
    """The AUCs of one score, or of one for each class; NaN where a class has no examples."""

    pairs: Floats
    """Row i, column j: that of class i's score, class i against class j, (classes, classes)."""

    one_vs_rest: Floats
    """That of class i's score, class i against all others, (classes,)."""

    def leak(self) -> "ClassAucs":
        """Return ``max(auc, 1 - auc)``: an inverted score is a leak too."""
        return ClassAucs(np.maximum(self.pairs, 1 - self.pairs), _folded(self.one_vs_rest))

    def worst_pair(self) -> tuple[int, int]:
        """Return the places of the two classes told apart best: the one of the score, the other.

        Raises:
            OneClass: there is no pair with examples.
        """
        if np.isnan(self.pairs).all():
            raise OneClass("no pair of classes has examples")
        first, second = np.unravel_index(int(np.nanargmax(_folded(self.pairs))), self.pairs.shape)
        return int(first), int(second)

    def worst(self) -> float:
        """Return the leak AUC of the pair told apart best.

        Raises:
            OneClass: there is no pair with examples.
        """
        return float(_folded(self.pairs)[self.worst_pair()])

    @classmethod
    def none(cls, num_classes: int) -> "ClassAucs":
        """Return those of no score at all."""
        return cls(np.full((num_classes, num_classes), np.nan), np.full(num_classes, np.nan))


def class_aucs(
    scores: Floats, places: Places, num_classes: int, of_class: int | None = None
) -> ClassAucs:
    """Return the AUCs of one score that serves for all classes, or for one.

    Args:
        scores: (examples,); infinities are allowed.
        places: of their classes, (examples,).
        num_classes: how many there are.
        of_class: whose score it is; the others then have none. None where it is that of all.

    Raises:
        ValueError: a score is NaN, or the shapes differ.
    """
    if scores.shape != places.shape or scores.ndim != 1:
        raise ValueError(f"expected one class per score, got {places.shape} for {scores.shape}")
    if np.isnan(scores).any():
        raise ValueError("expected scores without NaN")
    order = np.argsort(scores)
    ranked, members = scores[order], np.eye(num_classes)[places[order]]
    up_to_here = np.concatenate([np.zeros((1, num_classes)), members.cumsum(axis=0)])
    first, last = (np.searchsorted(ranked, ranked, side) for side in ("left", "right"))
    # Examples of each class below count twice, ties once: whole numbers, and nothing is rounded.
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
    return ClassAucs(pairs, one_vs_rest)


def worst_pair_leak_auc(
    scores: Floats, places: Places, num_classes: int, min_examples: int = 1
) -> float:
    """Return the leak AUC of the pair of classes that a score tells apart best.

    Args:
        scores: (examples,).
        places: of their classes, (examples,).
        num_classes: how many there are.
        min_examples: that each class of a pair must have for the pair to count.

    Raises:
        OneClass: no pair has as many.
        ValueError: as for `class_aucs`.
    """
    found = class_aucs(scores, places, num_classes)
    sizes = np.bincount(places, minlength=num_classes)
    enough = np.minimum.outer(sizes, sizes) >= min_examples
    return ClassAucs(np.where(enough, found.pairs, np.nan), found.one_vs_rest).worst()


def _folded(aucs: Floats) -> Floats:
    folded: Floats = np.maximum(aucs, 1 - aucs)
    return folded
