"""Noise along each gradient that brings it, on average, to the largest norm of its batch.

Row g becomes g (1 + s n) with n ~ N(0, 1) and s^2 = |g_max|^2/|g|^2 - 1, one scalar per row, so
that E|row|^2 = |g_max|^2 for every row (Li et al., ICLR 2022, section 4.1). g_max is the largest
row, not the whole batch: noise up to the batch's norm, spread over all directions, leaves a smaller
row with more of it, and the norm leaks with the opposite sign.

Persistent noise draws n once per example. It protects only against a peer that adds up answers
(see ``persistent``), and is charged without bound.
"""

import math
from typing import Literal

from torch import Tensor

from splitveil.active_party.defenses.build_inputs import BuildInputs, DefenseContext
from splitveil.active_party.defenses.forecast import (
    UNKNOWN,
    ChargeForecast,
    depends_on_gradients,
)
from splitveil.active_party.defenses.gaps import gap_memory
from splitveil.active_party.defenses.interface import (
    Defended,
    Defense,
    DefenseReport,
    LeakCharge,
    RawBatch,
    RememberingDefense,
    release,
)
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.persistent import own_scalars
from splitveil.active_party.defenses.row_noise import missing_norms, stretch_rows
from splitveil.active_party.defenses.rows import as_rows
from splitveil.active_party.defenses.section import NoisyDefense


class NormAligningDefense(NoisyDefense):
    """The settings of the defenses that bring rows to a common norm."""

    def noise_key_strength(self, _context: DefenseContext, /) -> str | None:
        """Name the strength for which the noise key is derived."""
        return f"{self.title} to the largest norm" if self.noise == "persistent" else None

    def fresh_charge(self, _context: DefenseContext) -> ChargeForecast:
        """Return that the charge is unknown: it depends on the gradients alone."""
        return UNKNOWN

    def repeated_charge(self, _context: DefenseContext) -> ChargeForecast:
        """Return an infinite charge: repeated noise is charged without bound."""
        return ChargeForecast.exactly(math.inf)

    def honesty(self, _context: DefenseContext) -> str:
        """Describe how reliable the forecast is."""
        if self.noise == "persistent":
            return f"The ledger gives persistent {self.title} no credit."
        return depends_on_gradients(self.title)

    def budget_refusal(self, _context: DefenseContext, /) -> str | None:
        """Explain why the first answer would exceed every budget."""
        if self.noise == "fresh":
            return None
        return (
            f"the ledger gives persistent {self.title} no credit, and the first answer would "
            "pass every budget; expected noise: fresh, or another defense"
        )


class MaxNormDefense(NormAligningDefense):
    """Noise along each gradient that brings it to the batch's largest norm."""

    name: Literal["max_norm"] = "max_norm"

    def _build(self, given: BuildInputs, /) -> Defense:
        noise = self.keyed_noise_source(given.secrets)
        return MaxNorm(noise, given.context.num_classes, is_persistent=self.noise == "persistent")


class MaxNorm(RememberingDefense):
    """Aligns every row to the batch's largest norm.

    A row without a direction of its own (zero, or too small to be divided by) gets a random
    direction and exactly the largest norm. The labels only decide the charge for an answer; the
    answer itself does not depend on them.

    Args:
        noise: the source of fresh noise, and of random directions.
        num_classes: number of classes.
        is_persistent: draw the scalars from the examples' keys; charged without bound.
    """

    def __init__(
        self, noise: NoiseSource, num_classes: int = 2, *, is_persistent: bool = False
    ) -> None:
        self._gaps = gap_memory(num_classes)
        super().__init__(self._gaps)
        self._noise = noise
        self._is_persistent = is_persistent

    def defend(self, batch: RawBatch) -> Defended:
        """Add noise.

        Raises:
            ValueError: as for every defense, or data that the norms or persistent noise need is
                missing.
        """
        rows = as_rows(batch.gradients)
        gaps = self._gaps.measure(rows, batch.labels)
        missing = self.noise_norms(batch, rows, gaps.norms)
        if self._is_persistent:
            scalars = own_scalars(batch.example_keys, rows).to(rows.dtype)
        else:
            scalars = self._noise.standard_normal((rows.shape[0], 1), rows)
        noise = stretch_rows(rows, gaps.norms, missing, scalars, self._noise)
        charge = LeakCharge(math.inf) if self._is_persistent else gaps.charge(noise)
        defended = noise.directions.mul_(noise.scalars).add_(rows)
        report = DefenseReport(noise_power=float(noise.norms.square().mean()), charge=charge)
        return Defended(release(defended, batch.gradients), report)

    def noise_norms(self, _batch: RawBatch, _rows: Tensor, norms: Tensor) -> Tensor:
        """Return the root-mean-square noise norm of each row, (batch,) float64.

        Args:
            _batch: the batch.
            _rows: its gradients, (batch, cut_dim).
            norms: their norms, (batch,) float64.
        """
        return missing_norms(norms)
