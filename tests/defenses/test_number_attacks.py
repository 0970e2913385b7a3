"""Numbers as labels: what attacks read, and targets against an oracle."""

import numpy as np
import torch
from torch import Tensor

from splitveil.common.privacy import number_attacks
from splitveil.common.privacy.attacks import CUT
from splitveil.common.privacy.audit import LeakAudit
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.privacy.observation import Observation
from tests.support.equality import same, stored


def gradients_of(labels: Tensor, predictions: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of a squared error with slopes that rows share in part, and the slopes."""
    generator = torch.Generator().manual_seed(8)
    slopes = 1 + 0.3 * torch.randn(len(labels), 6, generator=generator)
    return (predictions - labels)[:, None] * slopes, slopes


def top_direction_r2(gradients: Tensor, labels: Tensor) -> float:
    return number_attacks.r2_of(number_attacks.top_direction(gradients), labels)


def informed_r2(gradients: Tensor, predictions: Tensor, slopes: Tensor, labels: Tensor) -> float:
    known = KnownPredictions(predictions, slopes)
    return number_attacks.r2_of(number_attacks.informed(gradients, known), labels)


def test_attacks_read_the_labels_from_undefended_gradients() -> None:
    generator = torch.Generator().manual_seed(7)
    labels = torch.rand(400, generator=generator)
    predictions = torch.full((400,), 0.1)
    gradients, slopes = gradients_of(labels, predictions)
    assert top_direction_r2(gradients, labels) > 0.9
    assert number_attacks.ridge_r2(gradients, labels, seed=1) > 0.85
    assert informed_r2(gradients, predictions, slopes, labels) > 0.999_999


def test_attacks_read_nothing_from_gradients_of_other_labels() -> None:
    generator = torch.Generator().manual_seed(9)
    labels, others = torch.rand(2, 400, generator=generator)
    predictions = torch.full((400,), 0.1)
    gradients, slopes = gradients_of(others, predictions)
    assert top_direction_r2(gradients, labels) < 0.03
    assert number_attacks.ridge_r2(gradients, labels, seed=1) < 0.03
    assert informed_r2(gradients, predictions, slopes, labels) < 0.03


def test_sums_over_a_run_average_out_fresh_noise() -> None:
    generator = torch.Generator().manual_seed(10)
    labels = torch.rand(400, generator=generator)
    gradients, _ = gradients_of(labels, torch.full((400,), 0.1))
    audit = LeakAudit(num_examples=400, labels=number_attacks.LabelNumbers())
    for epoch in range(60):
        noise = 2 * torch.randn(400, 6, generator=generator)
        observed = Observation(
            epoch,
            0,
            {CUT: gradients + noise},
            labels,
            positions=torch.arange(400),
            activations=torch.zeros(400, 6),
        )
        audit.observe(observed)
    noisy = gradients + 2 * torch.randn(400, 6, generator=generator)
    found = audit.figures().of_numbers
    other = LeakAudit(num_examples=400, labels=number_attacks.LabelNumbers())
    other.load_state_dict(stored(audit.state_dict()))
    assert same(other.state_dict(), audit.state_dict())
    assert other.figures().of_numbers == found
    assert found["accumulated_top_direction"].r2 > 0.6 > 3 * top_direction_r2(noisy, labels)


def test_figures_that_do_not_exist_are_no_numbers() -> None:
    constant, gradients = torch.ones(50), torch.randn(50, 3)
    assert np.isnan(top_direction_r2(gradients, constant))
    assert np.isnan(number_attacks.ridge_r2(gradients, constant, seed=0))
    assert np.isnan(number_attacks.ridge_r2(gradients[:41], torch.rand(41), seed=0))
