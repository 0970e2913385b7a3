"""The noise of a given power that leaves the classes the least symmetrised divergence (sumKL).

The two classes' gradients are modelled as N(m0, u I) and N(m1, v I) in d dimensions, with
c = |m1 - m0|^2 and a fraction p of them positive. Positives get noise with variance l11 along the
gap m1 - m0 and l21 in each direction across it, negatives l10 and l20. Minimise (Li et al., "Label
Leakage and Protection in Two-party Split Learning", ICLR 2022, section 4.2)

    F = (d-1) [(l20+u)/(l21+v) + (l21+v)/(l20+u)] + (l10+u+c)/(l11+v) + (l11+v+c)/(l10+u)

subject to  p l11 + p (d-1) l21 + (1-p) l10 + (1-p) (d-1) l20 = P  and  l1k >= l2k >= 0.
Then sumKL = F/2 - d, which is written below as a sum of squares, so that terms do not cancel.

In the logarithms of the total variances (noise plus spread) this is a geometric program: F and the
budget are posynomials, the other constraints are linear. It is convex, so its minimum is unique and
one root of one derivative finds it. Only the class with the smaller variance, A, gets noise across
the gap. Letters of the solver, where a and b are the classes' fractions:

    x = l2A     noise across the gap, the only unknown      z = s_A + x     total variance across, A
    r = P - a (d-1) x     budget left along the gap         C = r + a s_A + b s_B
    X, Y        total variances along the gap, A and B      E = Y/X = sqrt((C + a c) / (C + b c))

For a fixed x the best X is C / (a + b E), unless l1A >= x or l1B >= 0 says otherwise.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

from splitveil.active_party.defenses.dp_bounds import find_root

_TINIEST = 1e-120  # share of the largest input, or class fraction, below which it counts as zero
_LARGEST = 1e250  # a power above this, in units of the largest input, is infinite


class NoiseSolution(NamedTuple):
    """Noise variances per direction, and the divergence that is left."""

    neg_along: float
    neg_across: float
    pos_along: float
    pos_across: float
    sum_kl: float


class _Spread(NamedTuple):
    """The problem in units of its largest number: A has the smaller variance, B the larger."""

    var_a: float
    var_b: float
    gap: float
    across_dim: float
    frac_a: float
    frac_b: float
    power: float


class _NoiseSplit(NamedTuple):
    """A point of the search: the noise of A and B, and the differences in the terms of sumKL."""

    across_a: float
    along_a: float
    along_b: float
    across_difference: float  # s_B - z
    along_difference: float  # X - Y


def solve_noise(
    neg_variance: float,
    pos_variance: float,
    gap_squared: float,
    cut_dim: int,
    pos_fraction: float,
    noise_power: float,
) -> NoiseSolution:
    """Find the noise of the given power that leaves the least symmetrised divergence.

    Variances (u, v) are per coordinate, ``gap_squared`` is c, ``cut_dim`` d, ``pos_fraction`` p,
    ``noise_power`` P, the mean expected squared noise norm. ``along`` is the variance in the
    direction of the gap, ``across`` that in each other one. ``sum_kl`` is infinite where the
    classes differ and one has neither spread nor noise. Raises ValueError if an argument is outside
    its range.
    """
    variances = {
        "neg_variance": neg_variance,
        "pos_variance": pos_variance,
        "gap_squared": gap_squared,
        "noise_power": noise_power,
    }
    for name, value in variances.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {value}")
    if not 0 < pos_fraction < 1:
        raise ValueError(f"pos_fraction must be above 0 and below 1, got {pos_fraction}")
    if not 1 <= cut_dim < math.inf:
        raise ValueError(f"cut_dim must be at least 1, got {cut_dim}")
    exponent = math.frexp(max(neg_variance, pos_variance, gap_squared, noise_power))[1]
    neg, pos, gap, power = (
        scaled if (scaled := math.ldexp(value, -exponent)) > _TINIEST else 0.0
        for value in (neg_variance, pos_variance, gap_squared, noise_power)
    )
    pos_fraction = max(pos_fraction, _TINIEST)
    fractions = (1 - pos_fraction, pos_fraction)
    pos_is_smaller = pos < neg
    spread = _Spread(
        var_a=min(neg, pos),
        var_b=max(neg, pos),
        gap=gap,
        across_dim=float(cut_dim - 1),
        frac_a=fractions[pos_is_smaller],
        frac_b=fractions[not pos_is_smaller],
        power=power,
    )
    noise = _best_noise(spread)
    remaining = _divergence(spread, noise)
    across_a, along_a, along_b = (_times_power_of_two(value, exponent) for value in noise[:3])
    if pos_is_smaller:
        return NoiseSolution(along_b, 0.0, along_a, across_a, remaining)
    return NoiseSolution(along_a, across_a, along_b, 0.0, remaining)


def power_for_sum_kl(
    neg_variance: float,
    pos_variance: float,
    gap_squared: float,
    cut_dim: int,
    pos_fraction: float,
    sum_kl: float,
) -> float:
    """Find the least noise power that leaves no more than ``sum_kl``: the inverse of the solver.

    To a relative 1e-7, and never too small; infinite where it is too large for a float.
    """
    if not sum_kl > 0:
        raise ValueError(f"sum_kl must be above 0, got {sum_kl}")
    bare = solve_noise(neg_variance, pos_variance, gap_squared, cut_dim, pos_fraction, 0.0)
    if bare.sum_kl <= sum_kl:
        return 0.0
    exponent = math.frexp(max(neg_variance, pos_variance, gap_squared))[1]
    neg, pos, gap = (
        math.ldexp(value, -exponent) for value in (neg_variance, pos_variance, gap_squared)
    )
    spread = (1 - pos_fraction) * neg + pos_fraction * pos
    # sumKL >= c/2 (1/X + 1/Y), which is least, for a mean of X and Y, at c (sqrt a + sqrt b)^2/2.
    least = gap * (0.5 + math.sqrt(pos_fraction * (1 - pos_fraction))) / sum_kl - spread
    # It is enough to make the classes equal, and to add equal noise along the gap to both.
    frac_a = pos_fraction if pos < neg else 1 - pos_fraction
    enough = frac_a * cut_dim * abs(pos - neg) + max(gap / sum_kl - max(neg, pos), 0.0)
    if enough > _LARGEST:
        return math.inf

    def log_excess(t: float) -> float:
        left = solve_noise(neg, pos, gap, cut_dim, pos_fraction, unit * math.expm1(t)).sum_kl
        return math.log(sum_kl) - math.log(min(max(left, 1e-300), 1e300))

    # P = unit expm1(t): small powers are resolved, and large ones spread over their logarithms.
    unit = spread + gap
    low, high = (math.log1p(max(power, 0.0) / unit) for power in (least, enough))
    power = unit * math.expm1(find_root(log_excess, low, high, tolerance=1e-10))
    step = 1e-9 * power
    while solve_noise(neg, pos, gap, cut_dim, pos_fraction, power).sum_kl > sum_kl:
        power += step
        step *= 2
    return _times_power_of_two(power, exponent)


def estimated_auc(sum_kl: float) -> float:
    """Return the AUC of the best score between two Gaussians of equal variance."""
    return 0.5 * (1 + math.erf(math.sqrt(sum_kl) / 2))


def leak_auc_bound(sum_kl: float) -> float:
    """Bound the AUC of every attack on one answer by its divergence.

    With total variation V: sumKL >= 2 V ln((1+V)/(1-V)) (Gilardoni, 2010), AUC <= 1/2 + V - V^2/2.
    Never vacuous for a finite divergence, unlike 1/2 + sqrt(K)/2 - K/8, which holds below 4 only.
    """
    if sum_kl > 75:  # V = 1 to double precision
        return 1.0
    # With V = tanh(w) the inequality reads 4 w tanh(w) <= sumKL: convex, increasing, no pole.
    w = max(math.sqrt(sum_kl) / 2, sum_kl / 4)
    for _ in range(50):
        tanh = math.tanh(w)
        step = (4 * w * tanh - sum_kl) / (4 * (tanh + w * (1 - tanh * tanh))) if w else 0.0
        w -= step
        if abs(step) <= 1e-15 * w:
            break
    variation = math.tanh(w)
    return 0.5 + variation - variation * variation / 2


def sum_kl_along_gap(neg_deviation: float, pos_deviation: float, gap: float) -> float:
    """Return the divergence of N(0, neg_deviation^2) and N(gap, pos_deviation^2).

    That is the information in an answer for a peer that knows everything that spreads would hide.
    Infinite if a class has no noise.
    """
    if not (0 < neg_deviation < math.inf and 0 < pos_deviation < math.inf):
        return math.inf
    ratio = neg_deviation / pos_deviation - pos_deviation / neg_deviation
    shifts = gap / neg_deviation, gap / pos_deviation
    return (ratio * ratio + shifts[0] * shifts[0] + shifts[1] * shifts[1]) / 2


def sum_kl_for_leak_auc(leak_auc: float) -> float:
    """Return the divergence at which ``leak_auc_bound`` is the given AUC, above 0.5 and below 1."""
    variation = 1 - math.sqrt(2 * (1 - leak_auc))
    return 4 * variation * math.atanh(variation)


def sum_kl_for_estimated_auc(leak_auc: float) -> float:
    """Return the divergence at which ``estimated_auc`` is the given AUC, above 0.5 and below 1."""
    return 2 * NormalDist().inv_cdf(leak_auc) ** 2


def _best_noise(spread: _Spread) -> _NoiseSplit:
    var_a, var_b, gap, across_dim, frac_a, _, power = spread
    variance_gap = var_b - var_a
    if power == 0 or (gap == 0 and variance_gap == 0):
        return _NoiseSplit(0.0, 0.0, 0.0, variance_gap, -variance_gap)
    highest = min(variance_gap, power / (frac_a * (across_dim + 1)))
    if across_dim == 0 or highest == 0:
        return _split_along(spread, 0.0, variance_gap)
    across = _best_across(spread, highest)
    return _split_along(spread, across, _difference_across(spread, across))


def _best_across(spread: _Spread, highest: float) -> float:
    """Find x between 0 and ``highest``."""
    var_a = spread.var_a
    slope = _log_slope(spread)
    if slope(highest) <= 0:
        return highest
    if var_a == 0:  # F is infinite at x = 0
        lowest = highest / 1024
        while slope(lowest) > 0:
            highest, lowest = lowest, lowest / 1024
        return math.exp(
            find_root(lambda t: slope(math.exp(t)), math.log(lowest), math.log(highest))
        )
    if slope(0.0) >= 0:
        return 0.0
    # x = s_A expm1(t) resolves both a tiny x and many orders of magnitude of z.
    top = math.log1p(highest / var_a)
    return min(
        highest, var_a * math.expm1(find_root(lambda t: slope(var_a * math.expm1(t)), 0.0, top))
    )


def _log_slope(spread: _Spread) -> Callable[[float], float]:
    """Build log(gain/loss), where dF/dx = gain - loss: the sign of dF/dx, without its poles."""
    var_a, var_b, gap, across_dim, frac_a, frac_b, power = spread
    log = math.log
    weight_b = frac_b * across_dim
    weight_a = frac_a * (across_dim + 1)

    def log_slope(across: float) -> float:
        z = var_a + across
        left = max(power - frac_a * across_dim * across, 0.0)
        ratio, along_a, along_b, total = _unclamped(spread, left)
        if along_a < across:
            y = var_b + max(left - frac_a * across, 0.0) / frac_b
            gain = frac_b / y + weight_b / var_b + weight_a * ((z + gap) / y / y)
            loss = (weight_a + (weight_b * var_b + frac_b * (y + gap)) / z) / z
        elif along_b < 0:
            x = var_a + left / frac_a
            gain = (var_b + gap) / x / x
            loss = var_b / z / z
        else:
            gap_price = frac_a * gap * (1 + frac_b * ratio + frac_a / ratio) / total / total
            gain = 1 / var_b + gap_price
            loss = var_b / z / z
        return log(gain / loss)

    return log_slope


def _unclamped(spread: _Spread, left: float) -> tuple[float, float, float, float]:
    """Split the power ``left`` along the gap as if variances could be negative: E, l1A, l1B, C."""
    var_a, var_b, gap, _, frac_a, frac_b, _ = spread
    total = left + frac_a * var_a + frac_b * var_b
    ratio = math.sqrt((total + frac_a * gap) / (total + frac_b * gap))
    excess = _ratio_excess(spread, total, ratio)
    shift = var_b - var_a - var_a * excess
    scale = frac_a + frac_b * ratio
    return ratio, (left + frac_b * shift) / scale, (ratio * left - frac_a * shift) / scale, total


def _ratio_excess(spread: _Spread, total: float, ratio: float) -> float:
    """E - 1, exact also where E is nearly 1."""
    gap = spread.gap
    return (spread.frac_a - spread.frac_b) * gap / (total + spread.frac_b * gap) / (ratio + 1)


def _difference_across(spread: _Spread, across: float) -> float:
    """s_B - z at the optimum.

    Where the power suffices to make both classes nearly equal, the difference is far below the
    rounding of x; there the condition dF/dx = 0 itself gives it.
    """
    var_a, var_b, gap, across_dim, frac_a, frac_b, power = spread
    difference = var_b - (var_a + across)
    left = max(power - frac_a * across_dim * across, 0.0)
    ratio, along_a, along_b, total = _unclamped(spread, left)
    if difference > 1e-6 * var_b or along_a < across or along_b < 0:
        return difference
    gap_price = frac_a * gap * (1 + frac_b * ratio + frac_a / ratio) / total / total
    excess = var_b * gap_price
    return var_b * excess / math.sqrt(1 + excess) / (1 + math.sqrt(1 + excess))


def _split_along(spread: _Spread, across: float, across_difference: float) -> _NoiseSplit:
    """Divide the power that remains after the noise across the gap between the two classes."""
    var_a, var_b, _, across_dim, frac_a, frac_b, power = spread
    left = max(power - frac_a * across_dim * across, 0.0)
    ratio, along_a, along_b, total = _unclamped(spread, left)
    if along_a < across:
        along_a, along_b = across, max(left - frac_a * across, 0.0) / frac_b
    elif along_b < 0:
        along_a, along_b = max(left / frac_a, across), 0.0
    else:
        x = total / (frac_a + frac_b * ratio)
        difference = -x * _ratio_excess(spread, total, ratio)
        return _NoiseSplit(across, along_a, along_b, across_difference, difference)
    return _NoiseSplit(
        across, along_a, along_b, across_difference, along_a - along_b + var_a - var_b
    )


def _divergence(spread: _Spread, noise: _NoiseSplit) -> float:
    """F/2 - d, as (d-1)/2 (s_B - z)^2/(s_B z) + (X - Y)^2/(2 X Y) + c/2 (1/X + 1/Y)."""
    var_a, var_b, gap, across_dim, *_ = spread
    z = var_a + noise.across_a
    x = var_a + noise.along_a
    y = var_b + noise.along_b
    across = _relative(noise.across_difference, noise.across_difference, var_b, z)
    along = _relative(noise.along_difference, noise.along_difference, x, y)
    shift = _relative(gap, 1.0, x, 1.0) + _relative(gap, 1.0, y, 1.0)
    return ((across_dim * across if across_dim else 0.0) + along + shift) / 2


def _relative(first: float, second: float, variance: float, other: float) -> float:
    """Divide first * second by variance * other, where 0/0 means no difference: 0."""
    if first == 0 or second == 0:
        return 0.0
    if variance == 0 or other == 0:
        return math.inf
    return first / variance * (second / other)


def _times_power_of_two(value: float, exponent: int) -> float:
    """Like math.ldexp, but infinite where that raises."""
    half = exponent // 2
    return value * 2.0**half * 2.0 ** (exponent - half)
