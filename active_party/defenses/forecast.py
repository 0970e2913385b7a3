"""Forecasts of a defense's charges, made from its settings before any training.

The defense, the epochs and the labels are known before a run; the gradients are not. Therefore a
forecast is one of four kinds:

    exact       the strength alone decides: persistent noise, noisy labels, no credit at all
    bound       no gradient is charged more; proved where it is computed
    estimate    the charge of batches that are as the estimate assumes. Other batches are charged
                more, up to infinity, and so may the run be
    unknown     the gradients alone decide
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from splitveil.active_party.defenses.interface import LeakCharge
from splitveil.common.privacy.covers import Covers

NoiseKind = Literal["fresh", "persistent"]

Certainty = Literal["exact", "bound", "estimate", "unknown"]


class ChargeForecast(NamedTuple):
    """A divergence, as precisely as it is known before the run."""

    low: float
    high: float
    certainty: Certainty
    """The relation of the charge to the two figures: exactly ``high`` (then ``low`` is the same),
    at most ``high``, probably between the two, or anything at all."""

    covers: Covers = Covers.CLASS_MEANS
    """The peers whom the charge describes."""

    is_gaussian: bool = False
    """Whether the answers are a Gaussian mechanism, see ``LeakCharge``."""

    epsilon: float | None = None
    """Label differential privacy of repeated noise, see ``LeakCharge``."""

    leak_auc: float | None = None
    """AUC that no score of repeated noise passes, see ``LeakCharge``."""

    dominating_mu: float | None = None
    """mu of a Gaussian mechanism that tells no less than repeated noise, see ``LeakCharge``."""

    def times(self, answers: int) -> "ChargeForecast":
        """Return the sum over several answers with independent noise."""
        if answers == 1:
            return self
        whole = self._replace(low=self.low * answers, high=self.high * answers)
        return whole._replace(epsilon=None, leak_auc=None, dominating_mu=None)

    def as_charge(self) -> LeakCharge:
        """Return the highest charge that is forecast."""
        return LeakCharge(
            self.high,
            "forecast",
            self.epsilon,
            self.covers,
            self.is_gaussian,
            self.leak_auc,
            self.dominating_mu,
        )

    @classmethod
    def exactly(
        cls, sum_kl: float, covers: Covers = Covers.CLASS_MEANS, *, is_gaussian: bool = False
    ) -> "ChargeForecast":
        """Return a charge that the settings determine."""
        return cls(sum_kl, sum_kl, "exact", covers, is_gaussian)

    @classmethod
    def of(cls, charge: LeakCharge) -> "ChargeForecast":
        """Return a charge that the settings determine, with everything that is known of it."""
        exact = cls.exactly(charge.sum_kl, charge.covers, is_gaussian=charge.is_gaussian)
        return exact._replace(
            epsilon=charge.epsilon, leak_auc=charge.leak_auc, dominating_mu=charge.dominating_mu
        )

    @property
    def is_promise(self) -> bool:
        """Whether a run is never charged more than ``high``."""
        return self.certainty in ("exact", "bound")


UNKNOWN = ChargeForecast(0.0, math.inf, "unknown")


class Forecast(NamedTuple):
    """A forecast of the charges of a run with a defense's settings."""

    charges: Mapping[NoiseKind, ChargeForecast]
    """The charge of one answer, for each kind of noise that could be set; the charge of persistent
    noise covers all repetitions."""

    configured: NoiseKind
    """The kind of noise that is set, one of the keys of ``charges``."""

    honesty: str
    """A sentence about how reliable the forecast is."""

    @property
    def charge(self) -> ChargeForecast:
        """The forecast for the noise that is set."""
        return self.charges[self.configured]


def depends_on_gradients(name: str) -> str:
    """Explain that a charge is unknown before the run."""
    return (
        f"The charge of {name} depends on the gradients alone: nothing can be said "
        "before the run. Its ledger tells after each epoch."
    )
