"""The observational audit: a lower bound on epsilon from a run whose labels nobody changed.

    offered pair    a row's true label and another one, at even odds given the row's features: the
                    other one comes from the cross-fitted p(y given x)
    guess           which of the two the run was trained on, from an attack's score less what
                    features explain of it; the highest scores as often as the lowest
    bound           the largest epsilon that the correct guesses exclude

(Kalemaj, Melis, Boucher, Mironov and Mahloujifar, "Observational Auditing of Label Privacy", arXiv
2511.14084.) A pair of equal labels would reveal nothing, so rows are offered the opposite label, a
positive with probability min(q, 1 - q) / q and a negative with min(q, 1 - q) / (1 - q). If q is the
conditional probability, an offered row's label is a fair coin given its features.

The predictions q only approximate p(y given x). Two things keep their errors out of the guesses: a
score's part that features explain is subtracted, which leaves the product of two errors
(`adjusted_auc`), and as many high as low scores are guessed, so that a shift of q alone makes as
many wrong guesses as right ones. One half of the rows chooses attack, sign and number of guesses,
and the other half is tested: the confidence holds however many attacks were tried.

An adversary of one training run guesses for some of m independent pairs which of the two was used.
Under (epsilon, delta)-differential privacy of each choice, with even odds before,

    P[v or more of r guesses correct]  <=  beta + 2 m delta alpha
    beta   = P[B >= v],   B ~ Binomial(r, exp(epsilon) / (1 + exp(epsilon)))
    alpha  = max over i = 1, 2, ... of P[v - i <= B < v] / i

(Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, theorem
5.2). The right side is the p-value of the claim that the run was that private; the largest epsilon
that it rejects is a lower bound.
"""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy.adjusted_auc import Mask
from splitveil.common.privacy.cross_fitting import FeatureModels
from splitveil.common.privacy.figures import EpsilonBound
from splitveil.common.privacy.leakage import Floats

CONFIDENCE = 0.95
DELTA = 1e-5  # smaller than one over most runs' rows; (epsilon, 0) implies (epsilon, delta)

_LARGEST = 40.0  # no number of rows excludes an epsilon beyond this

SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Shares of the offered pairs that are guessed."""

FEWEST_PAIRS = 20  # offered pairs per half below which there is nothing to test

_CHOOSING_CONFIDENCE = 0.999  # strict, so that few lucky guesses are not preferred

_SEED_OF_HALVES, _SEED_OF_OFFERS = 0, 1


def p_value(guesses: int, correct: int, pairs: int, epsilon: float, delta: float = DELTA) -> float:
    """Return the largest probability of so many correct guesses on ``pairs`` under a bound."""
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
    guesses: int, correct: int, pairs: int, delta: float = DELTA, confidence: float = CONFIDENCE
) -> float:
    """Return the largest epsilon whose p-value is at most one minus the confidence, or 0."""
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


class ScoredRows(NamedTuple):
    rows: npt.NDArray[np.int64]  # indices into the rows of the audit, (scored,)
    scores: Floats  # (scored,); infinities are allowed
    positive: Mask  # which of the two classes each row has, (scored,)
    predictions: Floats  # cross-fitted probability of the positive class, (scored,)
    target: int = 1  # the class that counts as positive
    by_each_kind: tuple[Floats, ...] = ()  # predictions by functions alone, and by trees alone


def observe_epsilon(
    models: FeatureModels, attacks: Mapping[str, ScoredRows]
) -> EpsilonBound | None:
    """Bound epsilon from below with the best of some attacks; None without enough pairs."""
    draws = np.random.default_rng(_SEED_OF_OFFERS).random(models.num_rows)
    explainer = _Explainer(models, attacks.values())
    choices = []
    for name, scored in attacks.items():
        halves = _halves(scored, explainer, draws)
        if halves is not None:
            choosing, testing = halves
            choices.append((_choose(*choosing), name, testing))
    if not choices:
        return None
    (_, _, sign, share), attack, (scores, positive) = max(choices, key=lambda one: one[0][:2])
    guesses, correct = _guess(sign * scores, positive, share)
    of_guesses = guesses, correct, len(scores)
    epsilon, by_chance = epsilon_lower_bound(*of_guesses), p_value(*of_guesses, 0.0)
    return EpsilonBound(epsilon, attack, *of_guesses, CONFIDENCE, DELTA, by_chance)


def choosing_half(num_rows: int) -> Mask:
    """Return the rows that choose attack, sign and number of guesses; the others test them."""
    chooses: Mask = np.random.default_rng(_SEED_OF_HALVES).random(num_rows) < 0.5
    return chooses


def is_offered(predictions: Floats, positive: Mask, draws: Floats) -> Mask:
    """Return which rows are offered the opposite label, by independent uniform ``draws``."""
    of_label = np.where(positive, predictions, 1 - predictions)
    offered: Mask = draws * of_label < np.minimum(predictions, 1 - predictions)
    return offered


def _halves(
    scored: ScoredRows, explainer: "_Explainer", draws: Floats
) -> list[tuple[Floats, Mask]] | None:
    """Return scores and labels of the half that chooses, and of the tested one.

    None if there are too few offered pairs.
    """
    rows = scored.rows
    if len(rows) < 2 * FEWEST_PAIRS:
        return None
    rest = explainer.unexplained(scored)
    offered = is_offered(scored.predictions, scored.positive, draws[rows])
    chooses = choosing_half(len(draws))[rows]
    halves = [offered & chooses, offered & ~chooses]
    if min(int(side.sum()) for side in halves) < FEWEST_PAIRS:
        return None
    return [(rest[side], scored.positive[side]) for side in halves]


class _Explainer:
    """Subtracts from scores their prediction from features."""

    def __init__(self, models: FeatureModels, attacks: Iterable[ScoredRows]) -> None:
        known: list[Floats] = []
        for scored in attacks:
            group = next((group for group in known if _agree(group, scored)), None)
            if group is None:
                group = np.full(models.num_rows, np.nan)
                known.append(group)
            group[scored.rows] = scored.predictions
        self._known: list[tuple[Floats, FeatureModels]] = []
        """Predictions of two classes, NaN where no attack has a score, and models that know them:
        most attacks score the same rows, and of the others, few are missing."""
        for group in known:
            likely = np.where(np.isnan(group), 0.5, group)
            odds = np.log(likely) - np.log1p(-likely)
            informed = models.with_features(np.column_stack([odds, likely]))
            self._known.append((group, informed))

    def unexplained(self, scored: ScoredRows) -> Floats:
        """Return the rest of an attack's scores, as normal quantiles, (scored,)."""
        models = next(models for group, models in self._known if _agree(group, scored))
        values = normal_scores(scored.scores)
        rest: Floats = values - models.explained(values, scored.rows)
        return rest


def _agree(predictions: Floats, scored: ScoredRows) -> bool:
    known = predictions[scored.rows]
    return bool(((known == scored.predictions) | np.isnan(known)).all())


def _choose(scores: Floats, positive: Mask) -> tuple[float, float, float, float]:
    """Return the sign and the share of guesses that do best, after their bound and their excess.

    The excess is that of correct guesses above half, in standard errors: where bounds are 0.
    """
    choices = []
    for sign in (1.0, -1.0):
        for share in SHARES:
            made, correct = _guess(sign * scores, positive, share)
            excess = (2 * correct - made) / made**0.5
            bound = quick_lower_bound(made, correct, _CHOOSING_CONFIDENCE)
            choices.append((bound, excess, sign, share))
    return max(choices, key=itemgetter(0, 1))


def _guess(scores: Floats, positive: Mask, share: float) -> tuple[int, int]:
    """Guess the highest scores positive, as many lowest negative; return guesses, correct ones."""
    each = max(1, int(share * len(scores) / 2))
    order = np.argsort(scores, kind="stable")
    correct = int(positive[order[-each:]].sum()) + int((~positive[order[:each]]).sum())
    return 2 * each, correct


def normal_scores(scores: Floats) -> Floats:
    """Replace scores by the normal quantiles of their ranks; ties share a rank."""
    from scipy.special import ndtri  # noqa: PLC0415
    from scipy.stats import rankdata  # noqa: PLC0415

    quantiles: Floats = ndtri((rankdata(scores) - 0.5) / len(scores))
    return quantiles
