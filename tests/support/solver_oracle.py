"""The noise solver's oracle: random instances, what a solution has to keep, and a brute force."""

import math
import random

import numpy as np
from scipy import optimize

from splitveil.active_party.defenses.sum_kl import NoiseSolution

Instance = tuple[float, float, float, int, float, float]
"""neg_variance, pos_variance, gap_squared, cut_dim, pos_fraction, noise_power."""


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


def brute_force(instance: Instance) -> float:
    """Search all four variances: a grid over shares of the budget, then a polish of the best.

    Knows nothing of the closed forms: only the objective, the budget and l1 >= l2 >= 0. Shares
    (s1, s2, s3, s4) of the budget pay for the isotropic part of each class and for what the gap
    gets on top, so that every point of the simplex is feasible.
    """
    grid = simplex_grid()
    values = objective(instance, grid)
    best = float(values.min())
    starts = grid[np.argsort(values)[:4]]
    for start in starts:
        point = start
        for radius in (0.3, 0.03, 1e-3, 1e-5):  # restarts keep the simplex search from stalling
            found = optimize.minimize(
                lambda free: float(objective(instance, to_shares(free))),
                np.log(np.maximum(point, 1e-12)),
                method="Nelder-Mead",
                options={
                    "xatol": 1e-13,
                    "fatol": 0,
                    "maxiter": 2000,
                    "initial_simplex": np.log(np.maximum(point, 1e-12))
                    + radius * np.vstack([np.zeros(4), 10 * np.eye(4)]),
                },
            )
            point = to_shares(found.x)
            best = min(best, float(found.fun))
    return best


def simplex_grid(steps: int = 24) -> np.ndarray:
    """Build all points of the simplex whose coordinates are multiples of 1/steps."""
    axes = np.indices((steps + 1,) * 3).reshape(3, -1).T
    inside = axes[axes.sum(axis=1) <= steps]
    return np.column_stack([inside, steps - inside.sum(axis=1)]) / steps


def to_shares(free: np.ndarray) -> np.ndarray:
    """Map any four numbers to shares that sum to one."""
    positive = np.exp(free - free.max())
    return np.asarray(positive / positive.sum())


def objective(instance: Instance, shares: np.ndarray) -> np.ndarray:
    """F/2 - d for shares (..., 4) of the budget, from the definition (terms minus two, squared)."""
    neg_variance, pos_variance, gap_squared, cut_dim, pos_fraction, power = instance
    money = power * np.moveaxis(shares, -1, 0)
    neg_across = money[0] / ((1 - pos_fraction) * cut_dim)
    neg_along = neg_across + money[1] / (1 - pos_fraction)
    pos_across = money[2] / (pos_fraction * cut_dim)
    pos_along = pos_across + money[3] / pos_fraction
    across = ratio_distance(neg_across + neg_variance, pos_across + pos_variance)
    neg_total, pos_total = neg_along + neg_variance, pos_along + pos_variance
    along = ratio_distance(neg_total, pos_total)
    shift = gap_squared * (1 / neg_total + 1 / pos_total)
    return np.asarray(((cut_dim - 1) * across + along + shift) / 2)


def ratio_distance(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """first/second + second/first - 2."""
    return np.asarray((first - second) ** 2 / (first * second))
