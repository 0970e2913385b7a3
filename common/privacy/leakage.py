"""The leak AUC: a measure of how much a score reveals about the labels.

The AUC is the probability that a random positive scores above a random negative, where a tie counts
one half. An attacker may invert a score, so its leak is ``max(auc, 1 - auc)``.

With more than two classes, a score has an AUC for each pair, and for each class against the rest:

    pair (i, j)     probability that a random example of class i scores above one of class j
    one vs rest     probability that one of class i scores above one of any other class

The second is the mean of the first over the other classes, weighted by their numbers of examples:
the worst pair always leaks at least as much as the worst class. All of them come from one sort of
the scores. Two classes have one pair, (1, 0).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Values: TypeAlias = Tensor | npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
ClassIndices = npt.NDArray[np.int64]


class OneClass(ValueError):
    """The labels hold only one class, so that the AUC is not defined."""


def auc(scores: Values, labels: Values) -> float:
    """Return the area under the ROC curve, ties counted as one half.

    Computed in float64. Scores may be infinite, labels are 0 or 1 in any dtype, (batch,) or
    (batch, 1) each. Raises OneClass without both classes, and ValueError if shapes differ, a score
    is NaN, or a label is something else.
    """
    values = _one_per_example(scores, "scores").double()
    classes = _one_per_example(labels, "labels").cpu()
    if len(values) != len(classes):
        raise ValueError(f"expected one label per score, got {len(classes)} for {len(values)}")
    positive = classes == 1
    if not bool((positive | (classes == 0)).all()):
        raise ValueError("expected labels in {0, 1}")
    area = float(areas(values[None], positive)[0])
    if math.isnan(area):
        raise OneClass(f"{len(classes)} labels of one class have no AUC")
    return area


def areas(scores: Tensor, positive: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Return the AUC of several scores, (scores, batch) float64, at once, on their device.

    Only examples chosen for a score, (scores, batch), count. The result, (scores,) float64, is NaN
    where they are all of one class. The operations depend only on the scores and on the choice of
    examples. Raises ValueError if a score is NaN.
    """
    values, is_positive = scores.cpu().numpy(), positive.cpu().numpy()
    if np.isnan(values).any():
        raise ValueError("expected scores without NaN")
    found = np.full(len(values), np.nan)
    for number, row in enumerate(values):
        uses = slice(None) if chosen is None else chosen[number].cpu().numpy()
        order = np.argsort(row[uses])
        first, end = _ends_of_ties(row[uses][order])
        num_positives = int(np.count_nonzero(is_positive[uses]))
        # The sum of twice the average ranks, in integers, so that nothing is rounded.
        twice = int((first + end + 1) @ is_positive[uses][order])
        pairs = num_positives * (len(order) - num_positives)
        if pairs:
            found[number] = (twice - num_positives * (num_positives + 1)) / (2 * pairs)
    return torch.from_numpy(found).to(scores.device)


def leak_auc(scores: Values, labels: Values) -> float:
    """Return ``max(auc, 1 - auc)``, and raise as `auc` does: an inverted score is a leak too."""
    area = auc(scores, labels)
    return max(area, 1.0 - area)


class LeakInterval(NamedTuple):
    auc: float
    low: float  # below 1/2 where the sign of the score may have come out by chance
    high: float


def leak_auc_interval(
    scores: Values, labels: Values, generator: np.random.Generator
) -> LeakInterval:
    """Return the leak AUC with its bootstrap interval, over examples drawn within each class.

    It takes 500 draws of up to 10,000 examples, and fewer of more, but at least 100. Raises as
    `auc`.
    """
    area = auc(scores, labels)
    values = _one_per_example(scores, "scores").double().cpu()
    positive = (_one_per_example(labels, "labels") == 1).cpu()
    ranked, order = values.sort()
    first, end = _ends_of_ties(ranked.numpy())
    is_positive = positive[order].numpy()
    positives, negatives = np.flatnonzero(is_positive), np.flatnonzero(~is_positive)
    first, end = first[positives], end[positives]
    draws = []
    for _ in range(min(500, max(100, 5_000_000 // len(values)))):
        drawn = negatives[generator.integers(len(negatives), size=len(negatives))]
        below = np.concatenate([[0], np.bincount(drawn, minlength=len(values)).cumsum()])
        chosen = generator.integers(len(positives), size=len(positives))
        twice = (below[first] + below[end])[chosen].sum()
        draws.append(twice / (2 * len(positives) * len(negatives)))
    low, high = np.quantile(draws, [0.025, 0.975])
    if area < 0.5:
        area, low, high = 1.0 - area, 1.0 - high, 1.0 - low
    return LeakInterval(float(area), float(low), float(high))


class PairAucs(NamedTuple):
    """The AUCs of one score, or one per class; NaN without examples. Attacks may lead."""

    pairs: Floats  # of class i's score, class i against j, (..., classes, classes)
    one_vs_rest: Floats  # the AUC of class i's score, class i against all others, (..., classes)

    def leak(self) -> "PairAucs":
        """Return ``max(auc, 1 - auc)``: an inverted score is a leak, too."""
        return PairAucs(_folded(self.pairs), _folded(self.one_vs_rest))

    def worst_pair(self) -> tuple[int, int]:
        """Return the two classes separated best, the score's first. Raises OneClass."""
        if np.isnan(self.pairs).all():
            raise OneClass("no pair of classes has examples")
        first, second = np.unravel_index(int(np.nanargmax(_folded(self.pairs))), self.pairs.shape)
        return int(first), int(second)

    def worst(self) -> Floats:
        """Return the leak AUC of the pair that is separated best, (...); NaN without any pair."""
        folded = _folded(self.pairs)
        worst: Floats = np.fmax.reduce(folded, axis=(-2, -1))
        return worst

    def of(self, number: int) -> "PairAucs":
        return PairAucs(self.pairs[number], self.one_vs_rest[number])

    def put(self, aucs: "PairAucs", of_class: int | None) -> None:
        """Copy the AUCs of one class's score, or of a score for all classes, into this table."""
        rows = slice(None) if of_class is None else of_class
        self.pairs[rows] = aucs.pairs[rows]
        self.one_vs_rest[rows] = aucs.one_vs_rest[rows]

    @classmethod
    def none(cls, num_classes: int, *leading: int) -> "PairAucs":
        """Return a table without any AUC."""
        pairs = np.full((*leading, num_classes, num_classes), np.nan)
        return cls(pairs, np.full((*leading, num_classes), np.nan))


class Score(NamedTuple):
    values: Tensor  # (batch,)
    left_out: tuple[int, ...] = ()  # rows whose class the attack knew
    of_class: int | None = None  # the class that it belongs to; None for several classes


def batch_aucs(
    attacks: Sequence[Sequence[Score]], labels: Tensor, num_classes: int, *, is_plain: bool = False
) -> tuple[list[float], PairAucs | None]:
    """Measure several attacks on one batch together.

    Each has one score, or one per class; with two classes at most one, whose AUC is left below 1/2
    if ``is_plain``. Returns the leak AUC of each attack's worst pair, NaN for an attack without
    one, and for more than two classes all leak AUCs, first by attack. Raises ValueError if a score
    is NaN, or the shapes differ.
    """
    if num_classes == 2:
        every = [one for scores in attacks for one in scores]
        device = every[-1].values.device
        allowed = torch.ones(len(every), len(labels), dtype=torch.bool)
        for row, score in enumerate(every):
            allowed[row, list(score.left_out)] = False
        stacked = torch.stack([score.values.to(device) for score in every])
        if stacked.shape != allowed.shape:
            expected = f"expected one label per score, got {len(labels)}"
            raise ValueError(f"{expected} for {stacked.shape[1]}")
        aucs = areas(stacked.double(), labels.to(device) == 1, allowed)
        of_scores = iter((aucs if is_plain else torch.maximum(aucs, 1.0 - aucs)).tolist())
        return [next(of_scores) if scores else math.nan for scores in attacks], None
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
    return leak.worst().tolist(), leak


def pair_aucs(
    scores: Floats, labels: ClassIndices, num_classes: int, of_class: int | None = None
) -> PairAucs:
    """Return the AUCs of one score, of all classes or of one; other classes then have no AUC."""
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(f"expected one class per score, got {labels.shape} for {scores.shape}")
    if np.isnan(scores).any():
        raise ValueError("expected scores without NaN")
    order = np.argsort(scores)
    ranked, members = scores[order], np.eye(num_classes)[labels[order]]
    up_to_here = np.concatenate([np.zeros((1, num_classes)), members.cumsum(axis=0)])
    first, end = _ends_of_ties(ranked)
    # Lower examples of each class count twice, ties once: integers, so nothing is rounded.
    twice_below = up_to_here[first] + up_to_here[end]
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


def _ends_of_ties(ranked: Floats) -> tuple[ClassIndices, ClassIndices]:
    """Return for each of some sorted scores where its ties begin, and where they have ended."""
    starts = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1])))
    sizes = np.diff(starts, append=len(ranked))
    return np.repeat(starts, sizes), np.repeat(starts + sizes, sizes)


def _one_per_example(values: Values, name: str) -> Tensor:
    # The copy keeps torch from complaining about read-only memory.
    tensor = values.detach() if isinstance(values, Tensor) else torch.tensor(np.array(values))
    if tensor.ndim not in (1, 2) or tensor[0:1].numel() > 1:
        raise ValueError(
            f"expected {name} of shape (batch,) or (batch, 1), got {tuple(tensor.shape)}"
        )
    return tensor.reshape(-1)


def _folded(aucs: Floats) -> Floats:
    folded: Floats = np.maximum(aucs, 1 - aucs)
    return folded
