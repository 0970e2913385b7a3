"""The shared covariance for many classes against a brute-force search, and against Marvell's."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor

from splitveil.active_party.defenses.example_keys import key_from_insecure_seed
from splitveil.active_party.defenses.marvell import (
    SharedNoise,
    draw_shared_noise,
    pair_divergences,
    solve_shared_noise,
)
from splitveil.active_party.defenses.noise import AnswerKeys, NoiseSource


def random_problem(seed: int, classes: int, cut_dim: int) -> tuple[Tensor, Tensor, float]:
    generator = np.random.default_rng(seed)
    means = generator.normal(size=(classes, cut_dim)) * 10 ** generator.uniform(-1, 1, cut_dim)
    priors = generator.dirichlet(np.ones(classes))
    power = 10 ** generator.uniform(-2, 2)
    return torch.from_numpy(means), torch.from_numpy(priors), float(power)


def between_classes(means: Tensor, priors: Tensor) -> np.ndarray:
    points, shares = means.numpy(), priors.numpy()
    mean = sum(q * m for q, m in zip(shares, points, strict=True))
    return np.asarray(
        sum(q * np.outer(m - mean, m - mean) for q, m in zip(shares, points, strict=True))
    )


def covariance(solution: SharedNoise) -> np.ndarray:
    axes = solution.directions.numpy()
    return np.asarray(axes.T @ np.diag(solution.variances.numpy()) @ axes)


def separation(noise: np.ndarray, between: np.ndarray) -> float:
    return float(np.trace(np.linalg.pinv(noise, rcond=1e-12, hermitian=True) @ between))


def brute_force(between: np.ndarray, power: float, seed: int) -> float:
    """Search all covariances L L^T of the given power, from several starts."""
    cut_dim = len(between)
    lower = np.tril_indices(cut_dim)

    def noise_of(free: np.ndarray) -> np.ndarray:
        root = np.zeros((cut_dim, cut_dim))
        root[lower] = free
        product = root @ root.T
        return np.asarray(power * product / np.trace(product))

    generator = np.random.default_rng(seed)
    found = [
        optimize.minimize(
            lambda free: separation(noise_of(free), between),
            generator.normal(size=len(lower[0])),
            method="BFGS",
            options={"gtol": 1e-10, "maxiter": 3000},
        ).fun
        for _ in range(4)
    ]
    return float(min(found))


@pytest.mark.parametrize(("classes", "cut_dim"), [(2, 4), (3, 4), (4, 2), (5, 4), (3, 1)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_covariance_of_the_same_power_separates_less(
    seed: int, classes: int, cut_dim: int
) -> None:
    means, priors, power = random_problem(seed, classes, cut_dim)
    between = between_classes(means, priors)
    solution = solve_shared_noise(means, priors, power)
    # Only in the space that the means span: noise in other directions separates nothing.
    rank = min(classes - 1, cut_dim)
    span = np.linalg.svd(between)[0][:, :rank]
    left, within = separation(covariance(solution), between), span.T @ between @ span
    assert np.trace(within) == pytest.approx(np.trace(between), rel=1e-9)
    assert left == pytest.approx(brute_force(within, power, seed), rel=1e-6)
    if rank > 1:
        assert left < 0.99 * separation(power / rank * np.eye(rank), within)


@pytest.mark.parametrize("seed", range(20))
def test_power_is_used_up_on_no_more_directions_than_there_are_gaps(seed: int) -> None:
    means, priors, power = random_problem(seed, classes=6, cut_dim=32)
    solution = solve_shared_noise(means, priors, power)
    axes = solution.directions
    assert len(solution.variances) <= 5
    assert float(solution.variances.sum()) == pytest.approx(power, rel=1e-12)
    assert float(solution.variances.min()) >= 0
    assert torch.allclose(axes @ axes.T, torch.eye(len(axes), dtype=axes.dtype), atol=1e-12)


def test_noise_that_is_drawn_is_unbiased_and_has_the_covariance_of_the_solution() -> None:
    """Accepts the solution at 5 standard errors, and rejects twice its least variance."""
    means, priors, power = random_problem(2, classes=4, cut_dim=6)
    solution = solve_shared_noise(means, priors, power)
    rows = 200_000
    noise = draw_shared_noise(
        solution,
        torch.empty(rows, 6, dtype=torch.float64),
        NoiseSource(AnswerKeys(key_from_insecure_seed(77))),
    ).numpy()
    expected = covariance(solution)
    error = np.sqrt(np.diag(expected) / rows)
    assert (np.abs(noise.mean(axis=0)) < 5 * error).all()
    assert (np.abs(noise.mean(axis=0) + 0.1 * np.sqrt(np.diag(expected))) > 5 * error).all()
    along = (noise @ solution.directions.numpy().T).var(axis=0)
    assert along == pytest.approx(solution.variances.numpy(), rel=5 * math.sqrt(2 / rows))
    assert np.allclose(np.cov(noise.T), expected, atol=0.02 * power)
    assert along * 1.1 != pytest.approx(solution.variances.numpy(), rel=5 * math.sqrt(2 / rows))


@pytest.mark.parametrize(
    "problem",
    [
        (torch.zeros(3, 4), torch.full((3,), 1 / 3), 2.0),
        (torch.ones(3, 4), torch.full((3,), 1 / 3), 0.0),
        (torch.eye(3), torch.tensor([1.0, 0.0, 0.0]), 1.0),
    ],
    ids=["zeros", "one point", "one class"],
)
def test_classes_that_do_not_differ_get_no_noise(problem: tuple[Any, ...]) -> None:
    solution = solve_shared_noise(*problem)
    assert float(solution.variances.sum()) == 0
    drawn = draw_shared_noise(
        solution,
        torch.empty(5, problem[0].shape[1]),
        NoiseSource(AnswerKeys(key_from_insecure_seed(1))),
    )
    assert torch.equal(drawn, torch.zeros(5, problem[0].shape[1]))


def test_bare_classes_are_separated_infinitely() -> None:
    bare = solve_shared_noise(torch.eye(3), torch.full((3,), 1 / 3), 0.0)
    assert float(pair_divergences(torch.eye(3), bare).max()) == math.inf
