"""Gaussian differential privacy: one number, mu, in the units in which people state a bound.

A mechanism is mu-GDP if telling two neighbouring inputs apart by its output is at least as hard as
telling N(0, 1) from N(mu, 1) (Dong, Roth and Su, JRSS B 2022, definition 2.5). A Gaussian mechanism
of sensitivity D and standard deviation s is exactly D/s-GDP, and mechanisms compose exactly:
mu^2 adds up (their corollary 3.3).

    AUC of the best score             Phi(mu / sqrt 2)
    (epsilon, delta)                  delta = Phi(-epsilon/mu + mu/2)
                                              - exp(epsilon) Phi(-epsilon/mu - mu/2)

The second line is corollary 2.13 there, and theorem 8 of Balle and Wang (ICML 2018). It is exact:
the mechanism is (epsilon, delta)-private for this delta and for no smaller one.
"""

import math

from scipy import special

from splitveil.active_party.defenses.root_finding import find_root

_LARGEST_MU = 1e6


def mu_of_leak_auc(leak_auc: float) -> float:
    """Return the mu for which no score reaches a higher AUC, which is within [0.5, 1)."""
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

    Rounded up by less than a millionth; infinite for a mu beyond all use.
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


def mu_of_epsilon_delta(epsilon: float, delta: float) -> float:
    """Return the largest mu that implies (epsilon, delta)-privacy, delta within (1e-300, 1)."""
    if not 0 < epsilon < math.inf or not 1e-300 < delta < 1:
        raise ValueError(f"expected epsilon > 0 and 0 < delta < 1, got {epsilon} and {delta}")

    def excess(log_mu: float) -> float:
        reached = delta_of(math.exp(log_mu), epsilon)
        return math.log(reached / delta) if reached > 0 else -math.inf

    low = high = 0.0
    while excess(low) >= 0:
        low -= 1.0
    while excess(high) <= 0:
        high += 1.0
    while math.isinf(excess(low)):  # the search needs finite ends
        low = (low + high) / 2 if excess((low + high) / 2) < 0 else low + 1e-3 * (high - low)
    mu = math.exp(find_root(excess, low, high))
    while delta_of(mu, epsilon) > delta:  # the last digits, on the safe side
        mu *= 1 - 1e-15
    return mu
