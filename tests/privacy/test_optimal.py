"""The exact likelihood ratio of one projected label: right, and as strong as the bound."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from scipy.stats import norm as normal
from torch import Tensor
from torch.nn.functional import one_hot

from splitveil.common.privacy.leakage import auc
from splitveil.common.privacy.optimal import ReleasedSums, optimal

STAGES, RANK, ROWS = 20, 24, 20_000
TOLERANCE = 0.012
"""Three standard errors of an AUC of 8,000 against 12,000 independent scores; the seeds are fixed,
and noise that is a fifth too low moves the AUC by .024 and more."""


def designs(num_stages: int, num_rows: int, rank: int, seed: int = 3) -> list[Tensor]:
    """Draw designs of which every row has length 1, so that every row is charged the same."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(num_stages, num_rows, rank, generator=generator, dtype=torch.float64)
    return list(drawn / drawn.norm(dim=2, keepdim=True))


def release(
    design: Sequence[Tensor],
    truth: Tensor,
    noise_std: float,
    *,
    lowered: float = 1.0,
    seed: int = 4,
) -> list[ReleasedSums]:
    """Release sums with the stated noise times ``lowered``."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for one in design:
        clean = one.T @ truth
        noise = torch.randn(clean.shape, generator=generator, dtype=torch.float64)
        found.append(ReleasedSums(one, clean + lowered * noise_std * noise, noise_std))
    return found


def dealt(num_rows: int, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(num_rows, generator=generator) < 0.4).long()


def measured(bound: float, *, lowered: float = 1.0) -> float:
    """Return the AUC of the attack on labels that were dealt out, at a noise for a bound."""
    mu = 2**0.5 * normal.ppf(bound)
    labels = dealt(ROWS)
    design = designs(STAGES, ROWS, RANK)
    found = release(design, labels.double(), STAGES**0.5 / mu, lowered=lowered)
    return auc(optimal(found, labels), labels)


@pytest.mark.parametrize("bound", [0.55, 0.6, 0.8])
def test_it_meets_the_bound_and_does_not_pass_it(bound: float) -> None:
    assert abs(measured(bound) - bound) < TOLERANCE


@pytest.mark.parametrize("bound", [0.6, 0.8])
def test_noise_a_fifth_too_low_is_noticed(bound: float) -> None:
    expected = normal.cdf(normal.ppf(bound) / 0.8)
    found = measured(bound, lowered=0.8)
    assert found > bound + TOLERANCE
    assert abs(found - expected) < TOLERANCE


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


def test_it_is_the_ratio_of_the_densities() -> None:
    """Designs of any lengths, two stages of different rank and noise."""
    generator = torch.Generator().manual_seed(6)
    labels = torch.tensor([0, 1, 1, 0, 1])
    found = [
        *release([torch.randn(5, 3, generator=generator).double()], labels.double(), 0.7),
        *release([torch.randn(5, 2, generator=generator).double()], labels.double(), 2.0),
    ]
    scores = optimal(found, labels)
    for row in range(5):
        expected = likelihood(found, labels, row, 1) - likelihood(found, labels, row, 0)
        assert float(scores[row]) == pytest.approx(expected, rel=1e-9)


def test_its_columns_differ_by_the_ratios_of_the_classes() -> None:
    labels = torch.tensor([0, 2, 1, 0, 2])
    design = torch.randn(5, 3, generator=torch.Generator().manual_seed(7)).double()
    found = release([design], one_hot(labels, 3).double(), 0.7)
    scores = optimal(found, labels)
    for row in range(5):
        for label in range(3):
            expected = likelihood(found, labels, row, label) - likelihood(found, labels, row, 0)
            assert float(scores[row, label] - scores[row, 0]) == pytest.approx(expected, rel=1e-9)


def test_an_example_s_own_label_does_not_help() -> None:
    """Of the same sums, the score is the same whichever label the example is said to have."""
    labels = dealt(50)
    found = release(designs(2, 50, 4), labels.double(), 1.5)
    scores = optimal(found, labels)
    for row in (0, 7, 31):
        flipped = labels.clone()
        flipped[row] = 1 - flipped[row]
        assert float(optimal(found, flipped)[row]) == pytest.approx(float(scores[row]), rel=1e-9)


def test_what_does_not_fit_is_refused() -> None:
    design = torch.ones(4, 2)
    with pytest.raises(ValueError, match="at least one release"):
        optimal([], torch.ones(4))
    with pytest.raises(ValueError, match="noise above 0, got 0"):
        optimal([ReleasedSums(design, torch.ones(2), 0.0)], torch.ones(4))
    with pytest.raises(ValueError, match=r"one sum for each column of the design, got \(3,\)"):
        optimal([ReleasedSums(design, torch.ones(3), 1.0)], torch.ones(4))
    with pytest.raises(ValueError, match="expected 4 labels, got 5"):
        optimal([ReleasedSums(design, torch.ones(2), 1.0)], torch.ones(5))
