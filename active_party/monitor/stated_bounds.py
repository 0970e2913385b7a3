"""What the ledger states, as a record holds it, and held against what attacks reveal."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from splitveil.active_party.defenses.dp_bounds import epsilon_of
from splitveil.active_party.ledger.bounds import LeakBounds
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.figures import BeyondFigures, LedgerFigures, SpreadFigures
from splitveil.common.privacy.observational_audit import p_value
from splitveil.common.record import summary
from splitveil.common.record.assessment import assess_figures, passes_stated
from splitveil.common.text.upper_bounds import at_least, at_most

logger = logging.getLogger(__name__)


def ledger_figures(bounds: LeakBounds) -> LedgerFigures:
    """Return bounds as a run's record holds them."""
    anybody, honest, class_means = (SpreadFigures(*one.leak_auc) for one in bounds.by_peers)
    sum_kl, estimate = SpreadFigures(*bounds.sum_kl), SpreadFigures(*bounds.estimate)
    return LedgerFigures(sum_kl, estimate, anybody, honest, class_means, bounds.epsilon)


def peer_bounds(bounds: LeakBounds) -> tuple[summary.AdversaryBound, ...]:
    """Return the bounds of the most exposed example as a run's summary holds them."""
    return tuple(
        summary.AdversaryBound(peers, bounds.against(peers).leak_auc.max, bounds.against(peers).mu)
        for peers in Adversary
    )


class Stated(NamedTuple):
    """The smallest epsilon that a ledger states."""

    epsilon: float
    peers: Adversary
    """For whom."""


def stated_epsilon(bounds: LeakBounds, delta: float) -> Stated | None:
    """Return the smallest epsilon of label differential privacy that bounds state at a delta.

    A Gaussian mechanism states one at every delta (Dong, Roth and Su 2022, corollary 2.13), a
    randomised label the same at all. None where nothing states one.
    """
    found = []
    if bounds.epsilon is not None:
        found.append(Stated(bounds.epsilon, Adversary.ANYBODY))
    for peers in Adversary:
        mu = bounds.against(peers).mu
        if mu is not None and math.isfinite(epsilon_of(mu, delta)):
            found.append(Stated(epsilon_of(mu, delta), peers))
    return min(found, key=lambda one: one.epsilon, default=None)


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
            stated=stated.epsilon,
            stated_for=stated.peers,
            p_value_of_stated=p_value(*guesses, stated.epsilon, measured.delta),
        ),
    )


def log_beyond(
    beyond: BeyondFigures, bounds: LeakBounds | None, defense: Mapping[str, Any]
) -> None:
    """Log what attacks reveal beyond features, and an alarm for every statement that they pass."""
    epsilon = beyond.epsilon
    assessment = assess_figures(beyond, None if bounds is None else ledger_figures(bounds), defense)
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
