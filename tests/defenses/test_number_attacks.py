"""Numbers as labels: what attacks read, and targets against an oracle."""

import numpy as np
import torch
from torch import Tensor

from splitveil.common.privacy import number_attacks


def gradients_of(labels: Tensor, predictions: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of a squared error with slopes that rows share in part, and the slopes."""
    generator = torch.Generator().manual_seed(8)
    slopes = 1 + 0.3 * torch.randn(len(labels), 6, generator=generator)
    return (predictions - labels)[:, None] * slopes, slopes


def test_attacks_read_the_labels_from_undefended_gradients() -> None:
    generator = torch.Generator().manual_seed(7)
    labels = torch.rand(400, generator=generator)
    predictions = torch.full((400,), 0.1)
    gradients, slopes = gradients_of(labels, predictions)
    assert number_attacks.top_direction_r2(gradients, labels) > 0.9
    assert number_attacks.ridge_r2(gradients, labels, seed=1) > 0.85
    assert (
        number_attacks.r2_of(number_attacks.informed_scores(gradients, predictions, slopes), labels)
        > 0.999_999
    )


def test_attacks_read_nothing_from_gradients_of_other_labels() -> None:
    generator = torch.Generator().manual_seed(9)
    labels, others = torch.rand(2, 400, generator=generator)
    predictions = torch.full((400,), 0.1)
    gradients, slopes = gradients_of(others, predictions)
    assert number_attacks.top_direction_r2(gradients, labels) < 0.03
    assert number_attacks.ridge_r2(gradients, labels, seed=1) < 0.03
    assert (
        number_attacks.r2_of(number_attacks.informed_scores(gradients, predictions, slopes), labels)
        < 0.03
    )


def test_sums_over_a_run_average_out_fresh_noise() -> None:
    generator = torch.Generator().manual_seed(10)
    labels = torch.rand(400, generator=generator)
    gradients, _ = gradients_of(labels, torch.full((400,), 0.1))
    sums = number_attacks.SummedGradients(400)
    for _ in range(60):
        noise = 2 * torch.randn(400, 6, generator=generator)
        sums.add(torch.arange(400), gradients + noise, labels, torch.zeros(400, 6))
    seen = sums.seen()
    assert seen is not None
    noisy = gradients + 2 * torch.randn(400, 6, generator=generator)
    assert seen.figures(0)[0] > 0.6 > 3 * number_attacks.top_direction_r2(noisy, labels)


def test_figures_that_do_not_exist_are_no_numbers() -> None:
    constant, gradients = torch.ones(50), torch.randn(50, 3)
    assert np.isnan(number_attacks.top_direction_r2(gradients, constant))
    assert np.isnan(number_attacks.ridge_r2(gradients, constant, seed=0))
    assert np.isnan(number_attacks.ridge_r2(gradients[:41], torch.rand(41), seed=0))
