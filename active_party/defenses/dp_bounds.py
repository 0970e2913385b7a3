"""Bounds on what a differentially private release reveals: exact AUCs, mu, epsilon and delta.

A mechanism is mu-GDP if telling two neighbouring inputs apart by its output is at least as hard as
telling N(0, 1) from N(mu, 1) (Dong, Roth and Su, JRSS B 2022, definition 2.5). A Gaussian mechanism
of sensitivity D and standard deviation s is exactly D/s-GDP, and mechanisms compose exactly:
mu^2 adds up (their corollary 3.3).

    AUC of the best score             Phi(mu / sqrt 2)
    (epsilon, delta)                  delta = Phi(-epsilon/mu + mu/2)
                                              - exp(epsilon) Phi(-epsilon/mu - mu/2)

The second line is exact: corollary 2.13 there, and theorem 8 of Balle and Wang (ICML 2018).

A peer that sees a release about one example scores it by the likelihood ratio of the two labels,
and no other score has a higher AUC (Neyman and Pearson). Let L be the logarithm of that ratio in
favour of the example's own label. For every mechanism here L has the same distribution under both
labels, and the scores of a positive and a negative example are in the right order if the sum of two
independent copies of L is above 0. So

    AUC = P(L + L' > 0) + P(L + L' = 0) / 2.

    Gaussian, mu              L ~ N(mu^2/2, mu^2)                      Phi(mu / sqrt 2)
    randomised response, e    L = e or -e, odds exp(e) to 1            1/2 + tanh(e/2) / 2
    Laplace of scale 1/e      L has mass 1/2 at e, exp(-e)/2 at -e, and the density
                              exp((l - e)/2) / 4 in between

For two classes, the AUC of randomised response is the bound of all e-label-DP mechanisms: every
other one is a function of its output (Kairouz, Oh and Viswanath, "The Composition Theorem for
Differential Privacy", ICML 2015).

For releases that follow each other the AUCs do not add up, and Gaussian mechanisms do. One reveals
no less than a mechanism if its trade-off curve, the error on one label at each error on the other,
lies nowhere above the mechanism's (Blackwell; theorem 2 there). Its curve is convex, goes through
(0, 1) and (1, 0), and consists of the points (Phi(-z), Phi(z - mu)).

    randomised response   the curve is a polygon with the corners (s, 1 - k), (1 - k, s), k the
                          probability of the own class and s that of the other. A convex curve that
                          lies below the corners lies below the sides:
                          mu = Phi^-1(k) - Phi^-1(s)
    Laplace               between the straight ends at (exp(-e)/2, 1/2) and (1/2, exp(-e)/2), the
                          curve is a b = exp(-e)/4. Phi(-z) Phi(z - mu) is log-concave in z and
                          symmetric, so it is largest at z = mu/2: with
                          mu = -2 Phi^-1(exp(-e/2)/2) it is exp(-e)/4 there, and below it elsewhere;
                          the ends follow by convexity. Two numbers: twice that mu^2, at e/2
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from scipy import special


def find_root(
    function: Callable[[float], float], low: float, high: float, tolerance: float = 1e-15
) -> float:
    """Find the zero of a function that is negative at ``low`` and positive at ``high``."""
    # Imported here: it takes .15 s, which a party that solves for nothing does not pay.
    from scipy import optimize  # noqa: PLC0415

    if function(high) <= 0:  # rounding moved the end of the interval past the zero
        return high
    if function(low) >= 0:
        return low
    return float(optimize.brentq(function, low, high, xtol=1e-300, rtol=tolerance, maxiter=1000))


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def auc_of_epsilon(epsilon: float) -> float:
    """Return the most that any score of an epsilon-label-DP release reaches."""
    return 0.5 + math.tanh(epsilon / 2) / 2


def gaussian_of_epsilon(epsilon: float) -> float:
    """Return the mu of the weakest Gaussian mechanism that reveals no less than any e-label-DP one.

    Epsilon is infinite for a mechanism without label-DP.
    """
    # exp(-e) is 0 in double precision from 745 on.
    return gaussian_of_response(epsilon) if epsilon < 700 else math.inf


def gaussian_of_response(epsilon: float, num_classes: int = 2) -> float:
    """Return the mu of the weakest Gaussian mechanism that reveals as much; epsilon below 700."""
    swapped = 1 / (math.exp(epsilon) + num_classes - 1)
    return -NormalDist().inv_cdf((num_classes - 1) * swapped) - NormalDist().inv_cdf(swapped)


def gaussian_of_laplace(epsilon: float, num_numbers: int = 1) -> float:
    """Return the mu of a Gaussian mechanism that reveals no less, arguments as ``laplace_auc``."""
    each = -2 * NormalDist().inv_cdf(math.exp(-epsilon / num_numbers / 2) / 2)
    return each * math.sqrt(num_numbers)


def response_auc(epsilon: float, num_classes: int = 2) -> float:
    """Return the best AUC between two classes against randomised response over several."""
    kept = 1 / (1 + (num_classes - 1) * math.exp(-epsilon))
    swapped = kept * math.exp(-epsilon)
    neither = max(1 - kept - swapped, 0.0)
    return kept * kept + kept * (2 * neither + swapped) + neither * neither / 2


def laplace_auc(epsilon: float, num_numbers: int = 1) -> float:
    """Return the best AUC against numbers that the label moves by 1, with Laplace noise.

    Epsilon is that of all ``num_numbers`` together: 1 for a label of 0 or 1, and 2 for the entries
    of a one-hot label that move.
    """
    # exp(-l/2) times the density of L is symmetric, and so is its convolution with itself: atoms of
    # weight 1/2 at +-size and a uniform part of weight size/2, all times exp(-size/2).
    size, copies = epsilon / num_numbers, 2 * num_numbers
    total = 0.0
    for uniform in range(copies + 1):
        atoms = copies - uniform
        for positive in range(atoms + 1):
            centre = (2 * positive - atoms) * size
            weight = math.comb(copies, uniform) * math.comb(atoms, positive) * 2.0**-atoms
            above = _tilted_above_zero(uniform, size, centre, copies * size)
            total += weight * (size / 2) ** uniform * above
    return total


def strength_for_auc(auc_of: Callable[[float], float], leak_auc: float) -> float:
    """Return the strength at which an increasing bound, 0.5 at 0, is an AUC above 0.5, below 1."""
    high = 1.0
    while auc_of(high) < leak_auc:
        high *= 2
    return find_root(lambda strength: auc_of(strength) - leak_auc, 0.0, high)


def _tilted_above_zero(uniform: int, size: float, centre: float, top: float) -> float:
    """Integrate exp((s - top)/2) over s > 0, s the centre plus some numbers uniform in +-size.

    Without any the sum is an atom, and half of it counts if it is at 0. The largest s is ``top``.
    """
    if uniform == 0:
        return math.exp((centre - top) / 2) * (0.5 if centre == 0 else float(centre > 0))
    total = 0.0
    for piece in range(uniform):  # the density is a polynomial on each
        low = max(centre + (2 * piece - uniform) * size, 0.0)
        high = centre + (2 * piece + 2 - uniform) * size
        if high > low:
            s = (high - low) / 2 * _NODES + (high + low) / 2
            density = _sum_of_uniforms((s - centre) / size, uniform) / size
            total += (high - low) / 2 * float(_WEIGHTS @ (np.exp((s - top) / 2) * density))
    return total


def _sum_of_uniforms(x: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    """Return the density of the sum of ``count`` numbers uniform in (-1, 1) (Irwin-Hall)."""
    below = (count - np.abs(x)) / 2  # symmetric; fewer terms cancel below the centre
    density = np.zeros_like(x)
    for k in range(count // 2 + 1):
        density += np.where(
            below > k, (-1) ** k * math.comb(count, k) * (below - k) ** (count - 1), 0
        )
    return density / (2 * math.factorial(count - 1))


_LARGEST_MU = 1e6


def mu_of_leak_auc(leak_auc: float) -> float:
    """Return the mu at which the best score has this AUC, which is within [0.5, 1)."""
    if not 0.5 <= leak_auc < 1:
        raise ValueError(f"expected a leak AUC from 0.5 to less than 1, got {leak_auc}")
    return math.sqrt(2) * float(special.ndtri(leak_auc))


def leak_auc_of_mu(mu: float) -> float:
    """Return the AUC of the best score, Phi(mu / sqrt 2)."""
    if not mu >= 0:
        raise ValueError(f"expected mu of at least 0, got {mu}")
    return float(special.ndtr(mu / math.sqrt(2)))


def delta_of(mu: float, epsilon: float) -> float:
    """Return the least delta for which mu-GDP implies (epsilon, delta)-privacy."""
    if not 0 < mu < math.inf or not 0 <= epsilon < math.inf:
        raise ValueError(f"expected finite mu > 0 and epsilon >= 0, got {mu} and {epsilon}")
    near, far = (epsilon / mu - mu / 2) / math.sqrt(2), (epsilon / mu + mu / 2) / math.sqrt(2)
    # exp(epsilon) Phi(-sqrt(2) far) without overflow: near^2 = far^2 - epsilon.
    subtracted = 0.5 * math.exp(-(near**2)) * float(special.erfcx(far))
    if near > 0:  # both terms share the factor exp(-near^2): no digits cancel in a small delta
        return 0.5 * math.exp(-(near**2)) * float(special.erfcx(near) - special.erfcx(far))
    return max(0.0, 0.5 * math.erfc(near) - subtracted)


def epsilon_of(mu: float, delta: float) -> float:
    """Return the least epsilon for which mu-GDP implies (epsilon, delta)-privacy.

    Rounded up by less than a millionth; infinite for a uselessly large mu.
    """
    if not mu >= 0 or not 0 < delta < 1:
        raise ValueError(f"expected mu of at least 0 and 0 < delta < 1, got {mu} and {delta}")
    if mu > _LARGEST_MU:
        return math.inf
    if mu == 0 or delta_of(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_of(mu, high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(mu, middle) > delta else (low, middle)
    return high
