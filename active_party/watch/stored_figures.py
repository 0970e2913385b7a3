"""Bounds and evaluations in the forms that a run's record and its checkpoints hold."""

from typing import Any

from splitveil.active_party.ledger.bounds import LeakBounds, PeerBound, Spread
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.active_party.training.predictions import ClassFigures
from splitveil.common.privacy.covers import Covers
from splitveil.common.record import summary
from splitveil.common.record.figures import LedgerFigures, NumberFigures, SpreadFigures
from splitveil.common.run.splits import SplitName

SpreadState = tuple[float, float, float]
BoundsState = tuple[SpreadState, SpreadState, list[tuple[SpreadState, float | None]], float | None]


def ledger_figures(bounds: LeakBounds) -> LedgerFigures:
    """Return bounds as a run's record holds them."""
    anybody, honest, class_means = (SpreadFigures(*one.leak_auc) for one in bounds.by_peers)
    sum_kl, estimate = SpreadFigures(*bounds.sum_kl), SpreadFigures(*bounds.estimate)
    return LedgerFigures(sum_kl, estimate, anybody, honest, class_means, bounds.epsilon)


def peer_bounds(bounds: LeakBounds) -> tuple[summary.PeerBound, ...]:
    """Return the bounds of the most exposed example as a run's summary holds them."""
    return tuple(
        summary.PeerBound(peers, bounds.against(peers).leak_auc.max, bounds.against(peers).mu)
        for peers in Covers
    )


def state_of_bounds(bounds: LeakBounds) -> BoundsState:
    """Return bounds as a checkpoint holds them."""
    by_peers = [(_state_of(one.leak_auc), one.mu) for one in bounds.by_peers]
    return _state_of(bounds.sum_kl), _state_of(bounds.estimate), by_peers, bounds.epsilon


def bounds_of_state(state: BoundsState) -> LeakBounds:
    """Return the bounds that a checkpoint holds."""
    sum_kl, estimate, by_peers, epsilon = state
    return LeakBounds(
        Spread(*sum_kl),
        Spread(*estimate),
        tuple(PeerBound(Spread(*spread), mu) for spread, mu in by_peers),
        epsilon,
    )


def _state_of(spread: Spread) -> SpreadState:
    return spread.max, spread.q95, spread.mean


def state_of_evaluation(evaluation: Evaluation) -> list[Any]:
    """Return an evaluation as a checkpoint holds it, without its split."""
    figures = [
        evaluation.epoch,
        evaluation.loss,
        evaluation.auc,
        evaluation.calibration_error,
    ]
    classes, number = evaluation.classes, evaluation.number
    if number is not None:
        return [*figures, dict(number._asdict())]
    return figures if classes is None else [*figures, classes.accuracy, *classes.aucs]


def evaluation_of_state(split: SplitName, epoch: int, *figures: Any) -> Evaluation:
    """Return the evaluation that a checkpoint holds."""
    loss, auc, calibration_error, *of_classes = figures
    if of_classes and isinstance(of_classes[0], dict):
        number = NumberFigures(**of_classes[0])
        return Evaluation(epoch, split, loss, auc, calibration_error, number=number)
    classes = ClassFigures(of_classes[0], tuple(of_classes[1:])) if of_classes else None
    return Evaluation(epoch, split, loss, auc, calibration_error, classes)
