"""The rows that a table is worth under projected labels, known before a run.

In an orthonormal direction of the features, the coefficient of the label vector has a sampling
variance of p (1 - p) even without any noise: another sample of N rows would give another one. The
sums of a run add to that

    v = D^2 r / (N mu^2)        r directions, D = 1 for two classes and sqrt 2 for several

in each direction (a row's weights have length 1 where its share of an orthonormal basis has length
sqrt(r/N); stages share mu^2, and together reveal r directions on average as precisely as one stage
with all of it). A coefficient from n rows with unprotected labels is as uncertain if
p (1 - p)/n = (p (1 - p) + v)/N. So the run learns what n rows with unprotected labels would teach,
or less where that lies outside the r directions:

    n = N p (1 - p) / (p (1 - p) + v)

Half of the rows' worth is left at N p (1 - p) = D^2 r/mu^2. For labels that are numbers, as shares
of their range, their variance takes the place of p (1 - p) (`share_of_variance`). It is an upper
limit, and separates a table that is too small from one that is not (`docs/results.md`): stages with
different directions do not add up completely, and a smaller rank takes directions away.
"""

import math
from typing import NamedTuple


class LabelUtility(NamedTuple):
    """What a run can learn from its labels at a bound."""

    rows: float  # with unprotected labels, that would teach as much, at most
    share: float  # the same as a share of the training rows, within 0 and 1
    half_at_rows: int  # of the same share of positives, at which that share is one half


def label_utility(
    num_rows: int, pos_fraction: float, mu: float, rank: int, num_classes: int = 2
) -> LabelUtility:
    """Forecast what a run can learn, from nothing but the settings and the size of the table.

    The share of positives, with several classes that of a class, is above 0 and below 1; for
    numbers it is the share with which 0 and 1 would have the labels' variance.
    """
    if num_rows < 1 or rank < 1 or not 0 < pos_fraction < 1 or not 0 < mu < math.inf:
        raise ValueError(
            f"expected rows, a share of positives, mu and a rank above 0, got {num_rows}, "
            f"{pos_fraction}, {mu} and {rank}"
        )
    sampling = pos_fraction * (1 - pos_fraction)
    moved = 1 if num_classes <= 2 else 2
    noise = moved * min(rank, num_rows) / mu**2
    share = num_rows * sampling / (num_rows * sampling + noise)
    return LabelUtility(num_rows * share, share, math.ceil(moved * rank / mu**2 / sampling))


def share_of_variance(variance: float) -> float:
    """Return the share of positives, at most 1/2, with which labels of 0 and 1 have a variance.

    Rounding may take that of numbers within 0 and 1 slightly above 1/4.
    """
    return (1 - math.sqrt(max(1 - 4 * variance, 0.0))) / 2
