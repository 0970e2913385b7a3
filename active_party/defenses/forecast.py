"""Forecasts: what the settings of a defense say about its charges before any training.

The defense, the epochs and the labels are known before a run; the gradients are not. So a forecast
is one of four kinds:

    exact       the strength alone decides: persistent noise, noisy labels, no credit at all
    bound       no gradient is charged more; proved where it is computed
    estimate    the charge of batches that are as the estimate assumes. Other batches are charged
                more, up to infinity, and so may the run be
    unknown     the gradients alone decide
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

NoiseKind = Literal["fresh", "persistent"]

Certainty = Literal["exact", "bound", "estimate", "unknown"]


class ChargeForecast(NamedTuple):
    """A divergence as far as it is known before the run."""

    low: float
    high: float
    certainty: Certainty
    """Whether the charge is ``high`` (then ``low`` is the same), at most ``high``, probably between
    the two, or anything at all."""

    def times(self, answers: int) -> "ChargeForecast":
        """Return the sum over several answers, each with noise of its own."""
        return self._replace(low=self.low * answers, high=self.high * answers)

    @classmethod
    def exactly(cls, sum_kl: float) -> "ChargeForecast":
        """Return a charge that the settings determine."""
        return cls(sum_kl, sum_kl, "exact")

    @property
    def is_promise(self) -> bool:
        """Whether no run is charged more than ``high``."""
        return self.certainty in ("exact", "bound")


UNKNOWN = ChargeForecast(0.0, math.inf, "unknown")


class Forecast(NamedTuple):
    """The answer of a defense's settings to the question what a run would be charged."""

    charges: Mapping[NoiseKind, ChargeForecast]
    """The charge of one answer, for each kind of noise that could be set; that of persistent noise
    covers all repetitions."""

    configured: NoiseKind
    """The kind of noise that is set, one of the keys of ``charges``."""

    honesty: str
    """A sentence about how far the forecast can be relied on."""

    @property
    def charge(self) -> ChargeForecast:
        """The forecast for the noise that is set."""
        return self.charges[self.configured]


def depends_on_gradients(name: str) -> str:
    """Say that nothing is known about a charge before the run."""
    return (
        f"The charge of {name} depends on the gradients alone: nothing can be said "
        "before the run. Its ledger tells after each epoch."
    )
