"""Bounds and evaluations in the forms that a run's record and its checkpoints hold."""

from typing import Any

from splitveil.active_party.ledger.ledger import LeakBounds, Spread
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.active_party.training.predictions import ClassFigures
from splitveil.common.record.figures import LedgerFigures, SpreadFigures
from splitveil.common.run.splits import SplitName

SpreadState = tuple[float, float, float]
BoundsState = tuple[SpreadState, SpreadState, SpreadState, float | None]


def ledger_figures(bounds: LeakBounds) -> LedgerFigures:
    """Return bounds as a run's record holds them."""
    sum_kl, estimate, guarantee = (
        SpreadFigures(spread.max, spread.q95, spread.mean)
        for spread in (bounds.sum_kl, bounds.estimate, bounds.guarantee)
    )
    return LedgerFigures(sum_kl, estimate, guarantee, bounds.epsilon)


def state_of_bounds(bounds: LeakBounds) -> BoundsState:
    """Return bounds as a checkpoint holds them."""
    sum_kl, estimate, guarantee = (
        (spread.max, spread.q95, spread.mean)
        for spread in (bounds.sum_kl, bounds.estimate, bounds.guarantee)
    )
    return sum_kl, estimate, guarantee, bounds.epsilon


def bounds_of_state(state: BoundsState) -> LeakBounds:
    """Return the bounds that a checkpoint holds."""
    sum_kl, estimate, guarantee, epsilon = state
    return LeakBounds(Spread(*sum_kl), Spread(*estimate), Spread(*guarantee), epsilon)


def state_of_evaluation(evaluation: Evaluation) -> list[Any]:
    """Return an evaluation as a checkpoint holds it, without its split."""
    figures = [
        evaluation.epoch,
        evaluation.loss,
        evaluation.auc,
        evaluation.calibration_error,
    ]
    classes = evaluation.classes
    return figures if classes is None else [*figures, classes.accuracy, *classes.aucs]


def evaluation_of_state(split: SplitName, epoch: int, *figures: float) -> Evaluation:
    """Return the evaluation that a checkpoint holds."""
    loss, auc, calibration_error, *of_classes = figures
    classes = ClassFigures(of_classes[0], tuple(of_classes[1:])) if of_classes else None
    return Evaluation(epoch, split, loss, auc, calibration_error, classes)
