"""The figures that both a run's metrics and its summary hold, and their names in the files."""

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator

from splitveil.common.privacy.adversary import Adversary
from splitveil.common.record.values import IF_ANY, Flat, Form, Number, as_number


class AttackFigure(NamedTuple):
    """The leak AUC of one attack on one layer."""

    layer: str
    attack: str
    leak_auc: float | None


class SpreadFigures(NamedTuple):
    """One figure over the training examples; None where it is infinite or was not written."""

    max: Number = None
    q95: Number = None
    """The value that 95 % of the examples do not exceed."""
    mean: Number = None


def _or_nan(value: object) -> float:
    number = as_number(value)
    return math.nan if number is None else number


OrNan = Annotated[float, BeforeValidator(_or_nan)]


class NumberFigures(NamedTuple):
    """The predictions of labels that are numbers, in the label's unit."""

    rmse: OrNan = math.nan
    mae: OrNan = math.nan
    r2: OrNan = math.nan
    """1 less the squared errors' share of the labels' variance; NaN if all labels are the same."""
    constant_rmse: OrNan = math.nan
    """The RMSE of predicting the mean of the training labels for every row."""
    constant_mae: OrNan = math.nan
    """The MAE of the same prediction."""


_NONE = SpreadFigures()


@dataclass(frozen=True)
class LedgerFigures(Form):
    """The bounds of a leak ledger on what the answers so far may have revealed."""

    sum_kl: Annotated[SpreadFigures, Flat("sum_kl_")] = _NONE
    estimate: Annotated[SpreadFigures, Flat("estimate_")] = _NONE
    """AUC of the best score if the classes are Gaussian."""
    anybody: Annotated[SpreadFigures, Flat("anybody_")] = _NONE
    """AUC that no score of anybody exceeds, the guarantee; 1 for an example without a bound."""
    honest_but_curious: Annotated[SpreadFigures, Flat("honest_but_curious_")] = _NONE
    """The same for a peer that sends its model's activations."""
    knows_class_means_only: Annotated[SpreadFigures, Flat("knows_class_means_only_")] = _NONE
    """The same for a peer that compares gradients with the class means of a batch."""
    epsilon: Annotated[Number, IF_ANY] = None
    """Label differential privacy of all answers together; None if some answers lack it."""

    def against(self, peers: Adversary) -> SpreadFigures:
        return self.by_peers()[peers]

    def by_peers(self) -> dict[Adversary, SpreadFigures]:
        bounds = (self.anybody, self.honest_but_curious, self.knows_class_means_only)
        return dict(zip(Adversary, bounds, strict=True))
