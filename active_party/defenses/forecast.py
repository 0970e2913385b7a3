"""Forecasts of a defense's charges, made from its settings before any training.

The defense, the epochs and the labels are known before a run; the gradients are not. Therefore a
forecast is one of four kinds:

    exact       only the strength decides: persistent noise, noisy labels or sums, no credit at all
    bound       no gradient is charged more; proved where it is computed
    estimate    the charge of batches that are as the estimate assumes. Other batches are charged
                more, up to infinity, and so may the run be
    unknown     only the gradients decide
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.charge import UNBOUNDED, Charge

NoiseKind = Literal["fresh", "persistent"]

Certainty = Literal["exact", "bound", "estimate", "unknown"]


class ChargeForecast(NamedTuple):
    """A charge, as precisely as it is known before the run."""

    low: float  # the lowest divergence
    highest: Charge  # with the highest divergence, and all its other figures
    certainty: Certainty
    """The relation of the divergence to the two: exactly ``high`` (then ``low`` is the same), at
    most ``high``, probably between the two, or anything at all."""

    @property
    def high(self) -> float:
        return self.highest.sum_kl

    @property
    def adversary(self) -> Adversary:
        return self.highest.adversary

    @property
    def is_promise(self) -> bool:
        """True if a run is never charged more than ``high``."""
        return self.certainty in ("exact", "bound")

    def times(self, answers: int) -> "ChargeForecast":
        """Return the sum over several answers with independent noise."""
        if answers == 1:
            return self
        charge = self.highest
        whole = Charge(
            self.high * answers, adversary=charge.adversary, is_gaussian=charge.is_gaussian
        )
        return ChargeForecast(self.low * answers, whole, self.certainty)

    def narrowed(self, peers: Adversary) -> "ChargeForecast":
        """Return the same for no more peers than these."""
        return self._replace(highest=self.highest.narrowed(peers))


def exactly(charge: Charge | float) -> ChargeForecast:
    """Return a charge that the settings determine."""
    charge = charge if isinstance(charge, Charge) else Charge(charge)
    return ChargeForecast(charge.sum_kl, charge, "exact")


UNKNOWN = ChargeForecast(0.0, UNBOUNDED, "unknown")


class Forecast(NamedTuple):
    """A forecast of the charges of a run with a defense's settings."""

    charges: Mapping[NoiseKind, ChargeForecast]
    """The charge of one answer, by kind of noise; that of persistent noise covers all
    repetitions."""
    configured: NoiseKind  # the kind of noise that is set, one of the keys of ``charges``
    honesty: str  # a sentence about how reliable the forecast is

    @property
    def charge(self) -> ChargeForecast:
        """The forecast for the noise that is set."""
        return self.charges[self.configured]


def depends_on_gradients(name: str) -> str:
    """Explain that a charge is unknown before the run."""
    return (
        f"The charge of {name} depends on the gradients alone: nothing can be said "
        "before the run. Its ledger says it after each epoch."
    )
