"""The figures that both a run's metrics and its summary hold, and their names in the files."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from splitveil.common.privacy.covers import Covers
from splitveil.common.record.values import as_number


class AttackFigure(NamedTuple):
    """The leak AUC of one attack on one layer."""

    layer: str
    attack: str
    leak_auc: float | None


class SpreadFigures(NamedTuple):
    """One figure over the training examples; None where it is infinite or was not written."""

    max: float | None = None
    q95: float | None = None
    """The value that 95 % of the examples do not exceed."""
    mean: float | None = None


class NumberFigures(NamedTuple):
    """The predictions of labels that are numbers, in the label's unit."""

    rmse: float
    """Root of the mean squared error."""
    mae: float
    """Mean absolute error."""
    r2: float
    """1 less the squared errors' share of the labels' variance; NaN if all labels are the same."""
    constant_rmse: float
    """The RMSE of predicting the mean of the training labels for every row."""
    constant_mae: float
    """The MAE of the same prediction."""

    @classmethod
    def from_flat(cls, values: Mapping[str, Any], prefix: str = "") -> "NumberFigures | None":
        """Return the figures among some values; None if there are none.

        Args:
            values: name -> value.
            prefix: stands before each name.
        """
        if not any(f"{prefix}{name}" in values for name in cls._fields):
            return None
        numbers = (as_number(values.get(f"{prefix}{name}")) for name in cls._fields)
        return cls(*(math.nan if number is None else number for number in numbers))

    def flat(self, prefix: str = "") -> dict[str, float]:
        """Return the figures by name, as ``from_flat`` reads them."""
        return {f"{prefix}{name}": value for name, value in self._asdict().items()}


class LedgerFigures(NamedTuple):
    """The bounds of a leak ledger on what the answers so far may have revealed."""

    sum_kl: SpreadFigures = SpreadFigures()
    estimate: SpreadFigures = SpreadFigures()
    """AUC of the best score if the classes are Gaussian."""
    anybody: SpreadFigures = SpreadFigures()
    """AUC that no score of anybody exceeds, the guarantee; 1 for an example without a bound."""
    passive_and_honest: SpreadFigures = SpreadFigures()
    """The same for a peer that sends its model's activations."""
    knows_class_means_only: SpreadFigures = SpreadFigures()
    """The same for a peer that compares gradients with the class means of a batch."""
    epsilon: float | None = None
    """Label differential privacy of all answers together; None if some answers lack it."""

    def against(self, peers: Covers) -> SpreadFigures:
        """Return the bound for a circle of peers."""
        return self.by_peers()[peers]

    def by_peers(self) -> dict[Covers, SpreadFigures]:
        """Return the bound for each circle of peers, from the widest to the narrowest."""
        bounds = (self.anybody, self.passive_and_honest, self.knows_class_means_only)
        return dict(zip(Covers, bounds, strict=True))

    def flat(self) -> dict[str, float | None]:
        """Return the figures under the names that they have in files: ``sum_kl_max`` and so on."""
        named = {
            f"{name}_{part}": value
            for name, spread in zip(_SPREADS, self[:-1], strict=True)
            for part, value in spread._asdict().items()
        }
        return named if self.epsilon is None else named | {"epsilon": self.epsilon}

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> "LedgerFigures":
        """Read the figures back from under their names in files."""
        sum_kl, estimate, anybody, honest, class_means = (
            SpreadFigures(*(as_number(values.get(f"{name}_{part}")) for part in _PARTS))
            for name in _SPREADS
        )
        epsilon = as_number(values.get("epsilon"))
        return cls(sum_kl, estimate, anybody, honest, class_means, epsilon)


_SPREADS = LedgerFigures._fields[:-1]
_PARTS = SpreadFigures._fields
