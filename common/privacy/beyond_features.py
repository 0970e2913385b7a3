"""Measures what a run's attacks reveal about labels that features do not reveal.

Features reveal labels, too, and a model that learns makes its gradients repeat it. Here the scores
of a run's audit are measured against predictions of models that have not seen a row's label.

    adjusted     `splitveil.common.privacy.adjusted_auc`: the leak AUC among rows of one prediction
    advantage    `splitveil.common.privacy.adjusted_auc`: over the attacker's own features
    epsilon      `splitveil.common.privacy.observational_audit`: no run with a smaller epsilon would
                 have let the attacks guess so many labels

With more than two classes they are about the pair of classes that an attack separates best on
the half of the rows that chooses attacks; the other half tests them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy import adjusted_auc, observational_audit
from splitveil.common.privacy.accumulation import RunScores, combine_with_hints
from splitveil.common.privacy.attacks import ATTACKS, RUN_ATTACKS, WITHOUT_GRADIENTS
from splitveil.common.privacy.cross_fitting import FeatureModels, Predictions, TooFewRows
from splitveil.common.privacy.figures import AdjustedFigures, AdvantageFigures, BeyondFigures
from splitveil.common.privacy.leakage import OneClass
from splitveil.common.privacy.observation import TWO_CLASSES, LabelClasses
from splitveil.common.privacy.run_level import SEED, aucs_of


class Covariates(NamedTuple):
    """Predictors of some training rows' labels that have not memorised them."""

    positions: npt.NDArray[np.int64]  # in the common order, ascending, (rows,)
    activations: npt.NDArray[np.float32]  # of the passive parties, (rows, values), finite
    predictions: npt.NDArray[np.float32]  # of the whole model, (rows, values), finite
    own: npt.NDArray[np.float32]  # of the active party, (rows, values), finite; perhaps none
    labels: npt.NDArray[Any]  # class indices or numbers, (rows,), only for the measurement

    @property
    def features(self) -> npt.NDArray[np.float32]:
        return np.column_stack([self.activations, self.predictions, self.own])

    def scored(self, seen: RunScores) -> RunScores:
        """Return the scores of these rows, with indices into them as positions."""
        _, rows, chosen = np.intersect1d(
            self.positions, seen.positions, assume_unique=True, return_indices=True
        )
        return RunScores(rows, seen.scores[chosen])


def measure_beyond_features(
    covariates: Covariates,
    batch_attacks: Mapping[str, Sequence[RunScores]],
    run_attacks: Mapping[str, Sequence[RunScores]],
    classes: LabelClasses = TWO_CLASSES,
    know_classes: Collection[str] = (),
) -> BeyondFigures | None:
    """Measure the attacks on some of a run's rows; None if these hold too few of a class.

    Attacks have one score, or one per target. Those that ``know_classes``, whose score of a row
    depends on labels of other rows that are tested, do not count for epsilon.
    """
    models = FeatureModels.of(covariates.features, covariates.labels)
    try:
        predicted = models.predictions(covariates.labels, classes.num_classes)
    except TooFewRows:
        return None
    named = [*batch_attacks.items(), *run_attacks.items()]
    pairs = dict(_pairs(covariates, named, predicted, classes))
    adjusted = {name: adjusted_leak(models, pair) for name, pair in pairs.items()}
    advantage = {
        str(name): figure
        for name in run_attacks
        if name in pairs and (figure := _advantage(name, pairs[name], covariates)) is not None
    }
    audited = {name: pair for name, pair in pairs.items() if name not in know_classes}
    epsilon = observational_audit.observe_epsilon(models, audited)
    leaks = [name for name in adjusted if name not in WITHOUT_GRADIENTS]
    if not leaks:
        return BeyondFigures(adjusted, advantage, epsilon, 0)
    strongest = pairs[max(leaks, key=lambda name: adjusted[name].value)]
    aucs = [
        max(0.5, adjusted_auc.placements(by, strongest.positive).auc)
        for by in (strongest.predictions, *strongest.by_each_kind)
    ]
    return BeyondFigures(adjusted, advantage, epsilon, len(strongest.rows), *aucs)


def adjusted_leak(models: FeatureModels, scored: observational_audit.ScoredRows) -> AdjustedFigures:
    """Return the feature-adjusted leak AUC of an attack's scores. Raises ``OneClass``."""
    rows, scores, positive, predictions = scored[:4]
    values = observational_audit.normal_scores(scores)
    explained = models.explained(values, rows)
    known = adjusted_auc.informed(predictions, explained, positive)
    return adjusted_auc.adjusted_leak_auc(adjusted_auc.rest_of(values, explained), positive, known)


def _pairs(
    covariates: Covariates,
    attacks: Iterable[tuple[str, Sequence[RunScores]]],
    predicted: Predictions,
    classes: LabelClasses,
) -> Iterator[tuple[str, observational_audit.ScoredRows]]:
    """Yield each attack's scores for the two classes that it separates best."""
    chooses = observational_audit.choosing_half(len(covariates.positions))
    for attack, by_target in attacks:
        known = [covariates.scored(scores) for scores in by_target]
        target, other = 1, 0
        if classes.is_multi_class:
            choosing = [
                RunScores(rows[chooses[rows]], scores[chooses[rows]]) for rows, scores in known
            ]
            try:
                target, other = aucs_of(choosing, covariates.labels, classes).worst_pair()
            except OneClass:
                continue
        rows, scores = known[target if classes.is_multi_class and len(known) > 1 else 0]
        labels = covariates.labels[rows]
        of_pair = (labels == target) | (labels == other)
        rows, scores = rows[of_pair], scores[of_pair]
        positive = labels[of_pair] == target
        if min(int(positive.sum()), int((~positive).sum())) < 2:
            continue
        of_both = [each[rows][:, [target, other]] for each in predicted]
        likely, *apart = [each[:, 0] / each.sum(axis=1) for each in of_both]
        yield (
            attack,
            observational_audit.ScoredRows(rows, scores, positive, likely, target, tuple(apart)),
        )


def _advantage(
    name: str, pair: observational_audit.ScoredRows, covariates: Covariates
) -> AdvantageFigures | None:
    """Compare an attack with a model of the activations that knows as many labels.

    None for an attack that knows labels of the whole run in the end, because it knows something
    about every batch, and for one on the last activations, which is such a model itself.
    """
    attack = RUN_ATTACKS[name]
    if attack.is_final or not all(ATTACKS[source].is_free for source in attack.sources):
        return None
    rows, scores, positive = pair[:3]
    if not attack.num_hints:
        return adjusted_auc.advantage_over(np.zeros(len(scores)), scores, positive)
    prior = combine_with_hints(
        covariates.activations.astype(np.float64),
        (covariates.labels == pair.target).astype(np.int64),
        attack.num_hints,
        np.random.default_rng(SEED),
    )
    if prior is None:
        return None
    own, others = prior
    chosen = others[rows]
    try:
        return adjusted_auc.advantage_over(own[rows][chosen], scores[chosen], positive[chosen])
    except OneClass:
        return None
