"""The noise solver's oracle: random instances, what a solution has to keep, and a grid."""

import math
import random

import numpy as np

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


def simplex_grid(steps: int = 24) -> np.ndarray:
    """Build all points of the simplex whose coordinates are multiples of 1/steps."""
    axes = np.indices((steps + 1,) * 3).reshape(3, -1).T
    inside = axes[axes.sum(axis=1) <= steps]
    return np.column_stack([inside, steps - inside.sum(axis=1)]) / steps


def shares_of(instance: Instance, solution: NoiseSolution) -> np.ndarray:
    """Return what each part of a solution costs, as shares of the budget, (4,)."""
    _, _, _, cut_dim, pos, power = instance
    neg_along, neg_across, pos_along, pos_across, _ = solution
    neg_parts = cut_dim * neg_across, neg_along - neg_across
    pos_parts = cut_dim * pos_across, pos_along - pos_across
    return np.array([*((1 - pos) * x for x in neg_parts), *(pos * x for x in pos_parts)]) / power


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
