"""The leak AUC: a measure of how much a score reveals about the labels.

The AUC is the probability that a random positive scores above a random negative, where a tie counts
one half. An attacker may invert a score, so its leak is ``max(auc, 1 - auc)``.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

Values: TypeAlias = Tensor | npt.NDArray[Any]

_LARGEST_KEY = 2**63 - 1


class OneClass(ValueError):
    """The labels hold only one class, for which the AUC is not defined."""


def auc(scores: Values, labels: Values) -> float:
    """Return the area under the ROC curve, ties counted as one half.

    Computed on the device of ``scores``, in float64.

    Args:
        scores: one number per example, (batch,) or (batch, 1); infinities are allowed.
        labels: 0 or 1 per example in any dtype, (batch,) or (batch, 1).

    Raises:
        OneClass: there is no positive, or no negative.
        ValueError: the shapes differ, a score is NaN, or a label is neither 0 nor 1.
    """
    values = _one_per_example(scores, "scores").double()
    classes = _one_per_example(labels, "labels").to(values.device)
    if len(values) != len(classes):
        raise ValueError(f"expected one label per score, got {len(classes)} for {len(values)}")
    _refuse_nan(values)
    positive = classes == 1
    num_positives = _count(positive)
    if num_positives + _count(classes == 0) != len(classes):
        raise ValueError("expected labels in {0, 1}")
    if num_positives in (0, len(classes)):
        raise OneClass(f"{len(classes)} labels of one class have no AUC")
    return float(areas(values[None], positive)[0])


def areas(scores: Tensor, positive: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Return the AUC of several scores of the same examples at once, on the scores' device.

    Which operations are done depends on the scores alone.

    Args:
        scores: (scores, batch), float64; infinities are allowed.
        positive: booleans, (batch,), on the scores' device.
        chosen: which examples count for which score, (scores, batch); all by default.

    Returns:
        (scores,) in float64; NaN where the chosen examples are all of one class.

    Raises:
        ValueError: a score is NaN.
    """
    _refuse_nan(scores)
    counted = None if chosen is None else chosen.to(scores.device)
    if scores.device.type != "cpu":
        return _by_average_ranks(scores, positive, counted)
    aucs, tied = map(torch.from_numpy, _by_sorted_keys(scores, positive, counted))
    if bool(tied.any()):
        of_tied = None if counted is None else counted[tied]
        aucs[tied] = _by_average_ranks(scores[tied], positive, of_tied)
    return aucs


def leak_auc(scores: Values, labels: Values) -> float:
    """Return ``max(auc, 1 - auc)``, and raise as `auc` does: an inverted score is a leak too."""
    area = auc(scores, labels)
    return max(area, 1.0 - area)


class LeakInterval(NamedTuple):
    """A leak AUC and its 95 % confidence interval."""

    auc: float
    low: float
    """Below 1/2 where the sign of the score may have come out by chance."""
    high: float


def leak_auc_interval(
    scores: Values, labels: Values, generator: np.random.Generator
) -> LeakInterval:
    """Return the leak AUC with its bootstrap interval, over examples drawn within each class.

    It takes 500 draws of up to 10,000 examples, and fewer of more examples, but at least 100.

    Raises:
        OneClass: there is no positive, or no negative.
        ValueError: as for `auc`.
    """
    area = auc(scores, labels)
    values = _one_per_example(scores, "scores").double().cpu()
    positive = (_one_per_example(labels, "labels") == 1).cpu()
    ranked, order = values.sort()
    first, last = (ends[0].numpy() for ends in _ends_of_ties(ranked[None]))
    is_positive = positive[order].numpy()
    positives, negatives = np.flatnonzero(is_positive), np.flatnonzero(~is_positive)
    first, last = first[positives], last[positives]
    draws = []
    for _ in range(min(500, max(100, 5_000_000 // len(values)))):
        drawn = negatives[generator.integers(len(negatives), size=len(negatives))]
        below = np.concatenate([[0], np.bincount(drawn, minlength=len(values)).cumsum()])
        chosen = generator.integers(len(positives), size=len(positives))
        twice = (below[first] + below[last + 1])[chosen].sum()
        draws.append(twice / (2 * len(positives) * len(negatives)))
    low, high = np.quantile(draws, [0.025, 0.975])
    if area < 0.5:
        area, low, high = 1.0 - area, 1.0 - high, 1.0 - low
    return LeakInterval(float(area), float(low), float(high))


def _by_sorted_keys(
    values: Tensor, positives: Tensor, chosen: Tensor | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return the AUCs by one plain sort of 64-bit keys, and which rows have ties.

    A float64's bits, read as an integer, are in the order of the numbers, apart from the sign. The
    lowest bit makes room for the label, so that nothing has to be looked up in the order found: a
    third of the time. Scores that differ in that bit alone count as tied.
    """
    positive = positives.numpy()
    keys = (values.numpy() + 0.0).view(np.int64)  # turns -0.0 into 0.0
    keys = keys ^ ((keys >> 63) & _LARGEST_KEY)
    keys = (keys & ~1) | positive
    num_positives: Any = np.count_nonzero(positive)
    num_chosen: Any = len(positive)
    if chosen is not None:
        uses = chosen.numpy()
        keys[~uses] = _LARGEST_KEY - 1  # above every score, where it changes no rank
        num_positives = np.count_nonzero(uses & positive, axis=1)
        num_chosen = np.count_nonzero(uses, axis=1)
    keys.sort(axis=1)
    tied = ((keys[:, 1:] ^ keys[:, :-1]) <= 1).any(axis=1)
    ranks = (keys & 1) @ np.arange(len(positive))
    below = ranks - num_positives * (num_positives - 1) // 2
    pairs = num_positives * (num_chosen - num_positives)
    return np.divide(below, pairs, out=np.full(len(keys), np.nan), where=pairs > 0), tied


def _by_average_ranks(values: Tensor, positive: Tensor, chosen: Tensor | None) -> Tensor:
    """Return the AUCs for scores with any ties."""
    order = _ascending(values)
    ranked = values.gather(1, order)
    positive, negative = positive[order], ~positive[order]
    if chosen is not None:
        counts = chosen.gather(1, order)
        positive, negative = positive & counts, negative & counts
    up_to_here = negative.cumsum(dim=1)
    first, last = _ends_of_ties(ranked)
    # Negatives below a positive count twice here, its ties once: the average rank, in integers.
    below = (up_to_here - negative.long()).gather(1, first)
    below_or_tied = up_to_here.gather(1, last)
    twice = ((below + below_or_tied) * positive).sum(dim=1)
    return twice.double() / (2.0 * positive.sum(dim=1) * negative.sum(dim=1))


def _refuse_nan(scores: Tensor) -> None:
    if _count(scores.isnan()):
        raise ValueError("expected scores without NaN")


def _count(true: Tensor) -> int:
    if true.device.type == "cpu":  # there numpy takes a fraction of torch's time
        return int(np.count_nonzero(true.numpy()))
    return int(true.sum())


def _ascending(values: Tensor) -> Tensor:
    """Return the order of each row, ties in any order."""
    if values.device.type == "cpu":  # numpy's is several times faster than torch's
        return torch.from_numpy(np.argsort(values.numpy(), axis=1))
    return values.argsort(dim=1)


def _ends_of_ties(ranked: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each index of sorted rows the first and the last index of the same value."""
    num_columns = ranked.shape[1]
    place = torch.arange(num_columns, device=ranked.device)
    differs = ranked[:, 1:] != ranked[:, :-1]
    starts, ends = pad(differs, (1, 0), value=True), pad(differs, (0, 1), value=True)
    first = torch.where(starts, place, 0).cummax(dim=1).values
    last = torch.where(ends, place, num_columns - 1).flip(1).cummin(dim=1).values.flip(1)
    return first, last


def _one_per_example(values: Values, name: str) -> Tensor:
    # The copy keeps torch from complaining about read-only memory.
    tensor = values.detach() if isinstance(values, Tensor) else torch.tensor(np.array(values))
    if tensor.ndim not in (1, 2) or tensor[0:1].numel() > 1:
        raise ValueError(
            f"expected {name} of shape (batch,) or (batch, 1), got {tuple(tensor.shape)}"
        )
    return tensor.reshape(-1)
