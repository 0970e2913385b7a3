"""The strongest attack on projected labels: the exact likelihood ratio of one label.

A release reveals noisy sums t = A'y + s z of all labels y, with a design A (examples, rank) that
the peer knows, z standard normal. A peer that knows every label but y_i subtracts what the others
contribute, r_i = t - A'y_-i, and is left with r_i = y_i A_i + s z. By the lemma of Neyman and
Pearson, no score of r_i separates y_i = 1 from y_i = 0 better than

    log p(t | y_i = 1) - log p(t | y_i = 0) = (<r_i, A_i> - |A_i|^2 / 2) / s^2,

summed over independent releases. It is normal with variance m^2 and means +- m^2 / 2, where
m^2 = sum |A_i|^2 / s^2, so that its AUC is Phi(m / sqrt 2): the bound of mu-Gaussian differential
privacy with mu = m (Dong, Roth and Su, "Gaussian Differential Privacy", JRSS-B 2022, section 2.2).

With several classes, y_i is one-hot and t has a column for each class. The log-likelihood of class
c is <r_i,c , A_i> / s^2 up to an amount that is the same for all classes; separating one class from
another has m^2 = 2 sum |A_i|^2 / s^2, because two columns move.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot


class ReleasedSums(NamedTuple):
    """One release of projected labels, as its receiver knows it."""

    design: Tensor
    """Weight of each example in each sum, (examples, rank)."""

    sums: Tensor
    """The released sums: (rank,) for two classes, (rank, classes) for more."""

    noise_std: float
    """Standard deviation of the noise in each sum, > 0."""


def optimal(releases: Iterable[ReleasedSums], labels: Tensor) -> Tensor:
    """Score each example's label by all releases, given the labels of all other examples.

    An example's own label is only used to restore the sums without it: whoever knows the others
    can compute its score.

    Args:
        releases: with independent noise, each over the same examples; at least one.
        labels: 0 or 1, or class indices where the sums have a column for each class, (examples,).

    Returns:
        In float64 and on the design's device: for two classes the log-likelihood ratio of label 1
        against label 0, (examples,); with a column for each class the log-likelihoods of the
        classes, (examples, classes), up to an amount for each example: the difference of two
        columns is the log-likelihood ratio of these classes.

    Raises:
        ValueError: there is no release, a noise is not positive, or the shapes do not match.
    """
    scores = [_one_release(release, labels) for release in releases]
    if not scores:
        raise ValueError("expected at least one release")
    return torch.stack(scores).sum(dim=0)


def _one_release(release: ReleasedSums, labels: Tensor) -> Tensor:
    design, sums = release.design.detach().double(), release.sums.detach().double()
    _check(release, labels)
    variance = release.noise_std**2
    known = labels.detach().to(design.device).reshape(-1)
    power = design.square().sum(dim=1)
    if sums.ndim == 1:
        truth = known.double()
        without_own = design @ (sums - design.T @ truth) + truth * power
        return (without_own - power / 2) / variance
    truth = one_hot(known.long(), sums.shape[1]).double()
    return (design @ (sums - design.T @ truth) + truth * power[:, None]) / variance


def _check(release: ReleasedSums, labels: Tensor) -> None:
    design, sums, noise_std = release
    if not noise_std > 0:
        raise ValueError(f"expected noise above 0, got {noise_std}")
    if design.ndim != 2 or sums.ndim not in (1, 2) or len(sums) != design.shape[1]:
        raise ValueError(
            f"expected one sum for each column of the design, got {tuple(sums.shape)} for "
            f"{tuple(design.shape)}"
        )
    if labels.numel() != len(design):
        raise ValueError(f"expected {len(design)} labels, got {labels.numel()}")
