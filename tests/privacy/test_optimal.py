"""The exact likelihood ratio of one projected label equals that of the densities."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor
from torch.nn.functional import one_hot

from tests.support.optimal import ReleasedSums, optimal


def release(designs: Sequence[Tensor], truth: Tensor, noise_std: float) -> list[ReleasedSums]:
    generator = torch.Generator().manual_seed(4)
    releases = []
    for design in designs:
        clean = design.T @ truth
        noise = torch.randn(clean.shape, generator=generator, dtype=torch.float64)
        releases.append(ReleasedSums(design, clean + noise_std * noise, noise_std))
    return releases


def log_density(one: ReleasedSums, labels: Tensor) -> float:
    """Return the log density of a release, all labels given, by an independent way."""
    truth = labels if one.sums.ndim == 1 else one_hot(labels.long(), one.sums.shape[1])
    mean = (one.design.numpy().T @ truth.double().numpy()).reshape(-1)
    covariance = one.noise_std**2 * np.eye(len(mean))
    return float(multivariate_normal.logpdf(one.sums.numpy().reshape(-1), mean, covariance))


def likelihood(found: Sequence[ReleasedSums], labels: Tensor, row: int, label: int) -> float:
    changed = labels.clone()
    changed[row] = label
    return sum(log_density(one, changed) for one in found)


@pytest.mark.parametrize("labels", [torch.tensor([0, 1, 1, 0, 1]), torch.tensor([0, 2, 1, 0, 2])])
def test_it_is_the_ratio_of_the_densities(labels: Tensor) -> None:
    """Designs of any lengths, two stages of different rank and noise; a column for each class."""
    generator = torch.Generator().manual_seed(6)
    is_binary = bool(labels.max() == 1)
    truth = labels.double() if is_binary else one_hot(labels, 3).double()
    found = [
        *release([torch.randn(5, 3, generator=generator).double()], truth, 0.7),
        *release([torch.randn(5, 2, generator=generator).double()], truth, 2.0),
    ]
    scores = optimal(found, labels)
    for row in range(5):
        for label in (1,) if is_binary else (1, 2):
            expected = likelihood(found, labels, row, label) - likelihood(found, labels, row, 0)
            ratio = scores[row] if is_binary else scores[row, label] - scores[row, 0]
            assert float(ratio) == pytest.approx(expected, rel=1e-9)
