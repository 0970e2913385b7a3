"""The solver against a grid of all noise, and on every input that could break it."""

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad

from splitveil.active_party.defenses.sum_kl import NoiseSolution, leak_auc_bound, solve_noise

Instance = tuple[float, float, float, int, float, float]
"""neg_variance, pos_variance, gap_squared, cut_dim, pos_fraction, noise_power."""


def moderate_instance(generator: random.Random) -> Instance:
    gap_squared = 10 ** generator.uniform(-6, 6)
    sizes = [gap_squared * 10 ** generator.uniform(-3, 2) for _ in range(3)]
    cut_dim = round(10 ** generator.uniform(0, 3))
    return sizes[0], sizes[1], gap_squared, cut_dim, generator.uniform(0.02, 0.98), sizes[2]


def is_feasible(instance: Instance, solution: NoiseSolution) -> bool:
    """Say whether the constraints hold and the budget is used up."""
    neg_variance, pos_variance, gap_squared, cut_dim, pos_fraction, power = instance
    *noise, sum_kl = solution
    if not all(0 <= value < math.inf for value in noise) or not sum_kl >= 0:
        return False
    neg_along, neg_across, pos_along, pos_across = noise
    across_dim = cut_dim - 1
    if gap_squared == 0 and neg_variance == pos_variance:
        return sum(noise) == sum_kl == 0
    spent = pos_fraction * (pos_along + across_dim * pos_across)
    spent += (1 - pos_fraction) * (neg_along + across_dim * neg_across)
    return (
        abs(spent - power) <= 1e-9 * power and pos_along >= pos_across and neg_along >= neg_across
    )


def random_instance(generator: random.Random, log_low: float, log_high: float) -> Instance:
    """Draw sizes over many orders of magnitude, and now and then a zero or an equality."""

    def size() -> float:
        return 0.0 if generator.random() < 0.02 else 10 ** generator.uniform(log_low, log_high)

    neg_variance, pos_variance, gap_squared, power = size(), size(), size(), size()
    if generator.random() < 0.05:
        pos_variance = neg_variance
    cut_dim = round(10 ** generator.uniform(0, 5))
    rare = 10 ** generator.uniform(-12, -0.31)
    pos_fraction = generator.choice((generator.uniform(0.01, 0.99), rare, 1 - rare))
    return neg_variance, pos_variance, gap_squared, cut_dim, pos_fraction, power


def grid_of(instance: Instance, steps: int = 16) -> np.ndarray:
    """Return the noise of all shares of the power that are multiples of 1/steps, (points, 4)."""
    *_, cut_dim, pos, power = instance
    axes = np.indices((steps + 1,) * 3).reshape(3, -1).T
    inside = axes[axes.sum(axis=1) <= steps]
    shares = power * np.column_stack([inside, steps - inside.sum(axis=1)]).T / steps
    neg_across, pos_across = shares[0] / ((1 - pos) * cut_dim), shares[2] / (pos * cut_dim)
    neg_along, pos_along = neg_across + shares[1] / (1 - pos), pos_across + shares[3] / pos
    return np.column_stack([neg_along, neg_across, pos_along, pos_across])


def remaining(instance: Instance, noise: np.ndarray) -> np.ndarray:
    """F/2 - d of noise (..., 4), from the paper's definition, each ratio's terms minus two."""
    u, v, gap_squared, cut_dim, *_ = instance
    neg_along, neg_across, pos_along, pos_across = np.moveaxis(noise, -1, 0)
    neg, pos = neg_along + u, pos_along + v
    across = (cut_dim - 1) * ratio_distance(neg_across + u, pos_across + v)
    return np.asarray(across + ratio_distance(neg, pos) + gap_squared * (1 / neg + 1 / pos)) / 2


def ratio_distance(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """first/second + second/first - 2."""
    return np.asarray((first - second) ** 2 / (first * second))


EDGES: dict[str, dict[str, float]] = {
    "moderate": {},
    "one column": {"cut_dim": 1},
    "rare positives": {"pos_fraction": 1e-6},
    "rare negatives": {"pos_fraction": 1 - 1e-6},
    "bare negatives": {"neg_variance": 0.0},
    "bare positives": {"pos_variance": 0.0},
    "bare classes": {"neg_variance": 0.0, "pos_variance": 0.0},
    "like spreads": {"neg_variance": 0.125, "pos_variance": 0.125},
    "no gap": {"gap_squared": 0.0},
}


def edge_instances(edge: dict[str, float], scale: float, seed: int) -> Iterator[Instance]:
    generator = random.Random(seed)
    for _ in range(15):
        u, v, c, d, p, power = moderate_instance(generator)
        sizes = {"neg_variance": u / c, "pos_variance": v / c, "gap_squared": 1.0} | edge
        yield (
            scale * sizes["neg_variance"],
            scale * sizes["pos_variance"],
            scale * sizes["gap_squared"],
            int(edge.get("cut_dim", d)),
            edge.get("pos_fraction", p),
            scale * power / c,
        )


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e8])
@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
def test_no_point_of_a_grid_over_all_four_variances_is_better(
    edge: dict[str, float], scale: float
) -> None:
    """Nor is one a thousandth of the way from the solution to any of them."""
    for instance in edge_instances(edge, scale, seed=9):
        solution, grid = solve_noise(*instance), grid_of(instance)
        nearby = 0.999 * np.array(solution[:4]) + 0.001 * grid
        with np.errstate(divide="ignore", invalid="ignore"):  # some points leave a class bare
            best = float(np.nanmin(remaining(instance, np.concatenate([grid, nearby]))))
        assert solution.sum_kl <= best * (1 + 1e-12)
        assert is_feasible(instance, solution)


@pytest.mark.parametrize("edge", [name for name in EDGES if not name.startswith("bare")])
def test_the_divergence_is_that_of_the_noise_returned(edge: str) -> None:
    for instance in edge_instances(EDGES[edge], scale=1.0, seed=10):
        solution = solve_noise(*instance)
        assert remaining(instance, np.array(solution[:4])) == pytest.approx(solution.sum_kl, 1e-9)


def test_nothing_fails_across_scales_and_edges() -> None:
    generator = random.Random(4)
    for _ in range(8_000):
        instance = random_instance(generator, log_low=-30, log_high=10)
        assert is_feasible(instance, solve_noise(*instance)), instance


def test_nothing_raises_on_the_widest_range_of_floats() -> None:
    generator = random.Random(5)
    for _ in range(5000):
        solution = solve_noise(*random_instance(generator, log_low=-300, log_high=300))
        assert all(value >= 0 for value in solution)


def test_solution_scales_with_the_gradient_bit_for_bit() -> None:
    generator = random.Random(6)
    for _ in range(200):
        u, v, c, d, p, power = moderate_instance(generator)
        k = 2.0 ** generator.randint(-90, 30)
        scaled = solve_noise(k * u, k * v, k * c, d, p, k * power)
        solution = solve_noise(u, v, c, d, p, power)
        assert scaled == (*(k * value for value in solution[:4]), solution.sum_kl)


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        # no noise: the divergence of two Gaussians, term by term
        ((1.0, 1.0, 4.0, 5, 0.5, 0.0), (0, 0, 0, 0, 4.0)),
        ((1.0, 2.0, 0.0, 5, 0.5, 0.0), (0, 0, 0, 0, 1.25)),
        # equal classes of equal size: both get P along the gap
        ((0.0, 0.0, 1.0, 7, 0.5, 4.0), (4.0, 0, 4.0, 0, 0.25)),
        ((1.0, 1.0, 1.0, 7, 0.5, 4.0), (4.0, 0, 4.0, 0, 0.2)),
        # nothing differs
        ((1.0, 1.0, 0.0, 7, 0.5, 4.0), (0, 0, 0, 0, 0.0)),
        ((0.0, 0.0, 0.0, 7, 0.5, 4.0), (0, 0, 0, 0, 0.0)),
        # one dimension: only along the gap
        ((0.0, 0.0, 1.0, 1, 0.5, 4.0), (4.0, 0, 4.0, 0, 0.25)),
    ],
)
def test_solution_in_cases_done_by_hand(instance: Instance, expected: tuple[float, ...]) -> None:
    assert solve_noise(*instance) == pytest.approx(expected)


@pytest.mark.parametrize(
    "instance",
    [(0.0, 1.0, 0.0, 5, 0.5, 0.0), (0.0, 0.0, 1.0, 5, 0.5, 0.0), (1.0, 0.0, 1.0, 1, 0.5, 0.0)],
)
def test_bare_classes_diverge_infinitely(instance: Instance) -> None:
    assert solve_noise(*instance).sum_kl == math.inf


def test_tiny_divergence_does_not_drown_in_rounding() -> None:
    """With c/P = 1e-20, F/2 - d computed literally is lost; the limit c/2 (1/X + 1/Y) is not."""
    solution = solve_noise(1.0, 1.0, 1e-20, 100, 0.5, 1.0)
    assert solution.sum_kl == pytest.approx(5e-21, rel=1e-9, abs=0)


@pytest.mark.parametrize(
    "change",
    [
        {"neg_variance": -1.0},
        {"pos_variance": math.nan},
        {"gap_squared": math.inf},
        {"noise_power": -1e-300},
        {"pos_fraction": 0.0},
        {"pos_fraction": 1.0},
        {"pos_fraction": math.nan},
        {"cut_dim": 0},
    ],
)
def test_impossible_arguments_are_refused(change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "neg_variance": 1.0,
        "pos_variance": 2.0,
        "gap_squared": 1.0,
        "cut_dim": 8,
        "pos_fraction": 0.25,
        "noise_power": 1.0,
    }
    solve_noise(**arguments)
    with pytest.raises(ValueError, match=next(iter(change))):
        solve_noise(**(arguments | change))


def test_leak_bound_is_attained_by_its_own_worst_case() -> None:
    """Two coins with bias (1 +- V)/2 have exactly the divergence that the bound starts from."""
    for variation in (1e-6, 0.01, 0.3, 0.9, 0.999):
        high, low = (1 + variation) / 2, (1 - variation) / 2
        sum_kl = 2 * (high - low) * math.log(high / low)
        expected = quad(lambda x, v=variation: min(1.0, x + v), 0, 1, points=[1 - variation])[0]
        assert leak_auc_bound(sum_kl) == pytest.approx(expected, rel=1e-7)
    assert (leak_auc_bound(0.0), leak_auc_bound(math.inf)) == (0.5, 1.0)
