"""A lower bound on epsilon from correct guesses: one training run, no second model.

An adversary guesses for some of m independent pairs which of the two was used, and abstains from
the others. Under (epsilon, delta)-differential privacy of each choice, with even odds before,

    P[v or more of r guesses correct]  <=  beta + 2 m delta alpha
    beta   = P[B >= v],   B ~ Binomial(r, exp(epsilon) / (1 + exp(epsilon)))
    alpha  = max over i = 1, 2, ... of P[v - i <= B < v] / i

(Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, theorem
5.2). The right side is the p-value of the claim that the run was that private; the largest epsilon
that it rejects is a lower bound.
"""

import numpy as np

CONFIDENCE = 0.95
DELTA = 1e-5
"""The delta at which epsilon is bounded: smaller than one over the rows of most runs. What is
(epsilon, 0)-private is (epsilon, delta)-private, too."""

_LARGEST = 40.0
"""No number of rows excludes an epsilon beyond this."""


def p_value(guesses: int, correct: int, pairs: int, epsilon: float, delta: float = DELTA) -> float:
    """Return the largest probability of so many correct guesses under a bound.

    Args:
        guesses: pairs on which the adversary did not abstain.
        correct: its correct guesses.
        pairs: all pairs, of which it chose the guesses.
        epsilon: the bound, at least 0; infinity bounds nothing.
        delta: its delta.

    Raises:
        ValueError: the numbers do not fit each other.
    """
    if not 0 <= correct <= guesses <= pairs or not epsilon >= 0 or not 0 <= delta <= 1:
        raise ValueError(
            f"expected correct <= guesses <= pairs, epsilon >= 0 and delta in [0, 1], got "
            f"{correct}, {guesses}, {pairs}, {epsilon} and {delta}"
        )
    # Importing it takes time that only a run that is measured should pay.
    from scipy.stats import binom  # noqa: PLC0415

    accuracy = 1 / (1 + np.exp(-epsilon))
    by_chance = float(binom.sf(correct - 1, guesses, accuracy))
    if not delta or not correct:
        return min(1.0, by_chance)
    fewer = np.arange(correct - 1, -1, -1)
    reached = np.cumsum(binom.pmf(fewer, guesses, accuracy))
    alpha = float((reached / np.arange(1, correct + 1)).max())
    return min(1.0, by_chance + 2 * pairs * delta * alpha)


def epsilon_lower_bound(
    guesses: int,
    correct: int,
    pairs: int,
    delta: float = DELTA,
    confidence: float = CONFIDENCE,
) -> float:
    """Return the largest epsilon that so many correct guesses exclude; 0 if they exclude none.

    Args:
        confidence: an epsilon is excluded if its p-value is at most one minus this.
    """
    largest_p = 1 - confidence
    if p_value(guesses, correct, pairs, 0.0, delta) > largest_p:
        return 0.0
    low, high = 0.0, _LARGEST
    while high - low > 1e-4:
        middle = (low + high) / 2
        if p_value(guesses, correct, pairs, middle, delta) <= largest_p:
            low = middle
        else:
            high = middle
    return low


def quick_lower_bound(guesses: int, correct: int, confidence: float = CONFIDENCE) -> float:
    """Return the bound for delta 0 in one step, to compare adversaries with each other."""
    from scipy.stats import beta  # noqa: PLC0415

    if not correct:
        return 0.0
    accuracy = float(beta.ppf(1 - confidence, correct, guesses - correct + 1))
    return max(0.0, float(np.log(accuracy) - np.log1p(-accuracy)))
