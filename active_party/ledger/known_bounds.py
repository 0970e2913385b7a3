"""What is known of accounts besides their divergence, from which smaller bounds follow.

An account may be a single release of which the best AUC is known, such as one noisy label, and it
may consist of releases whose odds are bounded. Each of these bounds on the AUC of every score holds
where it is finite, and so does the smallest of them:

    a                      all charges are one release, and no score of it passes a
    1/2 + tanh(e/2)/2      all charges are label-DP, e in total (`exact_auc.auc_of_epsilon`)
    Phi(mu / sqrt 2)       no charge reveals more than some Gaussian mechanism; mu^2 adds up

The last one holds for mixtures. A label of each mechanism reveals no more than some Gaussian
mechanism (`exact_auc`), and neither does any e-label-DP release (`exact_auc.gaussian_of_epsilon`).
Releases that follow each other, however the later ones depend on the earlier ones, reveal no more
than the Gaussian mechanisms in their places (Dong, Roth and Su 2022, "Gaussian differential
privacy", theorem 3.2). For a Gaussian mechanism mu^2 is the divergence itself, so an account
remembers by how much mu^2 exceeds it.
"""

import math

import numpy as np
import numpy.typing as npt

from splitveil.active_party.defenses.exact_auc import auc_of_epsilon, gaussian_of_epsilon
from splitveil.active_party.defenses.sum_kl import estimated_auc, leak_auc_bound

KnownBounds = npt.NDArray[np.float64]
"""Three columns, (3, accounts), or the three numbers of one account, (3,):

    leak_auc    AUC that no score passes if all charges are one release: 0.5 before the first one,
                1 if it is unknown or there are several
    epsilon     label differential privacy of all charges together; infinite for none
    excess      mu^2 of a Gaussian mechanism that reveals no less, minus the divergence; infinite if
                unknown, 0 for a Gaussian mechanism
"""

NOTHING: KnownBounds = np.array([0.5, 0.0, 0.0])
"""Of an account without charges."""
OF_ANY_KIND: KnownBounds = np.array([1.0, math.inf, math.inf])


def known_of(
    sum_kl: float, epsilon: float, leak_auc: float = 1.0, mu: float = math.inf
) -> KnownBounds:
    """Return what is known of one release, (3,).

    Args:
        sum_kl: its divergence.
        epsilon: its label differential privacy; infinite for none.
        leak_auc: AUC that no score of it passes; 1 if none is known.
        mu: of a Gaussian mechanism that reveals no less; infinite if none is known.
    """
    if sum_kl == 0:
        return NOTHING
    if not math.isfinite(sum_kl):
        return OF_ANY_KIND
    mu = min(mu, gaussian_of_epsilon(epsilon))
    # Of a Gaussian mechanism nothing but rounding may be left: mu is the root of sum_kl.
    excess = 0.0 if mu == math.sqrt(sum_kl) else max(mu**2 - sum_kl, 0.0)
    return np.array([min(auc_of_epsilon(epsilon), leak_auc), epsilon, excess])


def compose(some: KnownBounds, more: KnownBounds) -> KnownBounds:
    """Return what is known of the charges of both together, account by account."""
    both = some + more
    both[0] = 1.0
    for one, other in ((some, more), (more, some)):
        is_nothing = one[0] == NOTHING[0]
        if is_nothing.any():
            np.copyto(both, other, where=is_nothing & (one[1] == 0) & (one[2] == 0))
    return both


def where_charged(charged: npt.NDArray[np.bool_], known: KnownBounds) -> KnownBounds:
    """Return what is known of the charged accounts, (3,), and of no charge for the others."""
    return np.where(charged, known[:, None], NOTHING[:, None])


def auc_bound(sum_kl: float, known: KnownBounds) -> float:
    """Return the AUC that no score of one account passes.

    Args:
        sum_kl: the account's divergence.
        known: of the account, (3,).
    """
    leak_auc, epsilon, excess = map(float, known)
    return min(
        leak_auc, leak_auc_bound(sum_kl), estimated_auc(sum_kl + excess), auc_of_epsilon(epsilon)
    )


def estimate_of(sum_kl: float, known: KnownBounds) -> float:
    """Return the AUC of the best score under the Gaussian model, or what bounds every score."""
    return min(estimated_auc(sum_kl), auc_bound(sum_kl, known))
