"""The ledger's bounds, as a record holds them, compared with what attacks reveal."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

from splitveil.active_party.defenses.dp_bounds import epsilon_of
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.figures import BeyondFigures, LeakBounds
from splitveil.common.privacy.observational_audit import p_value
from splitveil.common.record.assessment import assess_figures, passes_stated
from splitveil.common.text.upper_bounds import at_least, at_most

logger = logging.getLogger(__name__)


def stated_epsilon(bounds: LeakBounds, delta: float) -> tuple[float, Adversary] | None:
    """Return the smallest epsilon of label-DP that bounds state at a delta, and for whom.

    A Gaussian mechanism states one at every delta (Dong, Roth and Su 2022, corollary 2.13), a
    randomised label the same at all. None where nothing states one.
    """
    found = []
    if bounds.epsilon is not None:
        found.append((bounds.epsilon, Adversary.ANYBODY))
    for peers, mu in bounds.mu_by_peers().items():
        if mu is not None and math.isfinite(epsilon_of(mu, delta)):
            found.append((epsilon_of(mu, delta), peers))
    return min(found, key=itemgetter(0), default=None)


def hold_against(beyond: BeyondFigures, bounds: LeakBounds | None) -> BeyondFigures:
    """Return the figures with the ledger's own epsilon beside the one that attacks exclude."""
    measured = beyond.epsilon
    if measured is None or bounds is None:
        return beyond
    stated = stated_epsilon(bounds, measured.delta)
    if stated is None:
        return beyond
    guesses = measured.guesses, measured.correct, measured.pairs
    return replace(
        beyond,
        epsilon=measured._replace(
            stated=stated[0],
            stated_for=stated[1],
            p_value_of_stated=p_value(*guesses, stated[0], measured.delta),
        ),
    )


def log_beyond(
    beyond: BeyondFigures, bounds: LeakBounds | None, defense: Mapping[str, Any]
) -> None:
    """Log what attacks reveal beyond features, and an alarm for every bound that they exceed."""
    epsilon = beyond.epsilon
    assessment = assess_figures(beyond, bounds, defense)
    logger.info("feature-adjusted leak AUC, strongest attack: %s", assessment.in_words)
    if epsilon is not None:
        logger.debug(
            "epsilon of label differential privacy is at least %s (delta %g): %s guessed %d of "
            "%d labels right; the ledger states %s",
            at_least(epsilon.epsilon),
            epsilon.delta,
            epsilon.attack,
            epsilon.correct,
            epsilon.guesses,
            "none" if epsilon.stated is None else at_most(epsilon.stated),
        )
        if passes_stated(epsilon, assessment):
            logger.error(
                "LEAK ALARM: attacks exclude the epsilon of %s that the ledger states for %s",
                at_most(epsilon.stated or 0.0),
                epsilon.stated_for,
            )
    for attack in assessment.above_bound:
        logger.error(
            "LEAK ALARM: %s, feature-adjusted leak AUC %s: %s",
            attack.attack,
            attack.figures,
            attack.why,
        )
