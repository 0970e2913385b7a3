"""The strongest attack on projected labels: the exact likelihood ratio of one label.

A release reveals noisy sums t = A'y + s z of all labels y, with a design A (examples, rank) that
the peer knows, z standard normal. A peer that knows every label but y_i subtracts what the others
contribute, and is left with r_i = y_i A_i + s z. By the lemma of Neyman and Pearson, no score of
r_i separates y_i = 1 from y_i = 0 better than

    log p(t | y_i = 1) - log p(t | y_i = 0) = (<r_i, A_i> - |A_i|^2 / 2) / s^2,

summed over independent releases. It is normal with variance m^2 and means +- m^2 / 2, where
m^2 = sum |A_i|^2 / s^2, so that its AUC is Phi(m / sqrt 2): the bound of mu-Gaussian differential
privacy with mu = m (Dong, Roth and Su, "Gaussian Differential Privacy", JRSS-B 2022, section 2.2).

With several classes, y_i is one-hot and t has a column for each class. The log-likelihood of class
c is <r_i,c , A_i> / s^2 up to an amount that is the same for all classes.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot


class ReleasedSums(NamedTuple):
    """One release of projected labels, as its receiver knows it."""

    design: Tensor  # weight of each example in each sum, (examples, rank)
    sums: Tensor  # (rank,) for two classes, (rank, classes) for more
    noise_std: float


def optimal(releases: Iterable[ReleasedSums], labels: Tensor) -> Tensor:
    """Score each example's label by all releases, given the labels of all other examples.

    An example's own label is only used to restore the sums without it.

    Returns:
        For two classes the log-likelihood ratio of label 1 against label 0, (examples,); with a
        column for each class the log-likelihoods of the classes, (examples, classes).
    """
    return torch.stack([_one_release(release, labels) for release in releases]).sum(dim=0)


def _one_release(release: ReleasedSums, labels: Tensor) -> Tensor:
    design, sums = release.design.double(), release.sums.double()
    power, variance = design.square().sum(dim=1), release.noise_std**2
    if sums.ndim == 1:
        truth = labels.double()
        without_own = design @ (sums - design.T @ truth) + truth * power
        return (without_own - power / 2) / variance
    truth = one_hot(labels.long(), sums.shape[1]).double()
    return (design @ (sums - design.T @ truth) + truth * power[:, None]) / variance
