"""Numbers as labels: what attacks read, and targets against an oracle."""

import numpy as np
import pytest
import torch
from torch import Tensor

from splitveil.active_party.defenses.projected.release import exact_sums, on_label_grid
from splitveil.common.privacy import number_attacks
from tests.support.projected import random_design


def test_any_two_values_move_the_sums_by_no_more_than_the_ends() -> None:
    rows = random_design(0, 300, rank=32)
    labels = on_label_grid(torch.rand(300, generator=torch.Generator().manual_seed(2)))
    before = exact_sums(rows, labels)
    for row in range(0, 300, 7):
        for value in (0.0, 0.4, 1.0):
            changed = labels.clone()
            changed[row] = on_label_grid(torch.tensor([value]))[0]
            moved = float((exact_sums(rows, changed) - before).norm())
            assert moved <= abs(float(changed[row] - labels[row])) + 1e-12
            assert moved <= 1


@pytest.mark.parametrize("wrong", [-0.25, 1.25, 0.1, float("nan")])
def test_what_could_not_be_summed_exactly_is_refused(wrong: float) -> None:
    labels = torch.zeros(300, dtype=torch.float64)
    labels[7] = wrong
    with pytest.raises(ValueError, match="expected labels of 0 and 1, or numbers"):
        exact_sums(random_design(0, 300, rank=32), labels)


def test_sums_of_a_large_table_are_exact_in_any_order() -> None:
    generator = torch.Generator().manual_seed(3)
    labels = on_label_grid(torch.rand(20_000, generator=generator))
    rows = random_design(1, 20_000, rank=32)
    shuffled = torch.randperm(20_000, generator=generator)
    other = rows._replace(steps=rows.steps[shuffled])
    assert torch.equal(exact_sums(rows, labels), exact_sums(other, labels[shuffled]))


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
