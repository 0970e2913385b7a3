"""The rows that projected labels are worth: the forecast, and the noise of real designs."""

import math

import pytest
import torch

from splitveil.active_party.defenses.dp_bounds import mu_of_leak_auc
from splitveil.active_party.defenses.projected.design import Design
from splitveil.active_party.defenses.projected.label_utility import label_utility
from tests.defenses.test_projection import design_of, rows_of


def noise_of(rows: Design, mu: float) -> float:
    """Mean variance of the coefficients, in an orthonormal basis, that a whole run tells.

    Stages share mu^2, so that together they tell the same directions as one stage with all of it:
    A^T y + z/mu. The best linear estimate from that has the covariance (A^T A)^-1/mu^2 in the
    coordinates of A; in those of Q, with A = Q R, it is that of R^-T z/mu.
    """
    weights = rows.block(0).double()
    orthonormal, triangle = torch.linalg.qr(weights)
    assert torch.allclose(orthonormal @ triangle, weights)
    inverse = torch.linalg.inv(triangle)
    return float(inverse.square().sum() / mu**2 / rows.rank)


@pytest.mark.parametrize("leak_auc", [0.55, 0.7])
def test_the_noise_of_a_real_design_is_the_one_that_is_forecast(leak_auc: float) -> None:
    """Within a quarter, as weights are not all of length 1; rejects half and twice the noise."""
    num_rows, rank, share = 2000, 16, 0.3
    mu = mu_of_leak_auc(leak_auc)
    noise = noise_of(design_of(rows_of(num_rows), rank), mu)
    sampling = share * (1 - share)
    worth = num_rows * sampling / (sampling + noise)
    forecast = label_utility(num_rows, share, mu, rank).rows
    added, expected = num_rows / worth - 1, num_rows / forecast - 1
    assert 0.75 < added / expected < 1.25


def test_half_of_the_worth_is_left_where_it_is_said_to_be() -> None:
    mu = mu_of_leak_auc(0.6)
    for share in (0.5, 0.01):
        half = label_utility(10_000, share, mu, 64).half_at_rows
        assert label_utility(half, share, mu, 64).share == pytest.approx(0.5, abs=1e-3)
    assert half * 0.01 * 0.99 == pytest.approx(64 / mu**2, rel=1e-3)


def test_several_classes_count_twice_and_no_more_directions_than_rows() -> None:
    worth = [label_utility(1_000, 0.2, 0.36, *more).share for more in ((64, 10), (128, 2))]
    assert worth[0] == worth[1] < label_utility(1_000, 0.2, 0.36, 64).share
    assert label_utility(5, 0.5, 0.36, 64).share == label_utility(5, 0.5, 0.36, 5).share


@pytest.mark.parametrize(
    ("rows", "share", "mu", "rank"),
    [
        (0, 0.5, 1.0, 1),
        (9, 0.0, 1.0, 1),
        (9, 1.0, 1.0, 1),
        (9, math.nan, 1.0, 1),
        (9, 0.5, 0.0, 1),
        (9, 0.5, math.nan, 1),
        (9, 0.5, 1.0, 0),
    ],
)
def test_sizes_that_do_not_exist_are_refused(rows: int, share: float, mu: float, rank: int) -> None:
    with pytest.raises(ValueError, match="expected rows"):
        label_utility(rows, share, mu, rank)
