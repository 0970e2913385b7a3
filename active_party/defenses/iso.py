"""Isotropic noise: every row gets N(0, (t/d) max|g|^2 I), whatever its label, with t = r^2."""

import math

from torch import Tensor

from splitveil.active_party.defenses.class_statistics import ClassEstimate, measure_means
from splitveil.active_party.defenses.interface import (
    ClassMemory,
    DefendedGradient,
    DefenseReport,
    LeakCharge,
    release,
)
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.rows import as_positive, as_rows
from splitveil.active_party.defenses.sum_kl import sum_kl_along_gap


class Isotropic(ClassMemory):
    """Adds the same amount of Gaussian noise to every example.

    The labels decide what is charged for an answer, and nothing in it.

    Args:
        noise_ratio: root-mean-square noise norm r in units of the batch's largest gradient norm.
        noise: the only source of randomness.
    """

    def __init__(self, noise_ratio: float, noise: NoiseSource) -> None:
        super().__init__()
        self._noise_ratio = noise_ratio
        self._noise = noise

    def defend(
        self,
        gradients: Tensor,
        labels: Tensor,
        *,
        example_keys: Tensor | None = None,  # noqa: ARG002
        probabilities: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[DefendedGradient, DefenseReport]:
        """Add noise."""
        rows = as_rows(gradients)
        batch, norms = measure_means(rows, as_positive(labels, rows))
        largest = float(norms.max())
        noise_norm = self._noise_ratio * largest
        defended = isotropic_noise(rows, noise_norm, self._noise).add_(rows)
        return release(defended, gradients), DefenseReport(
            noise_power=noise_norm * noise_norm,
            charge=self._charge(self.classes.take_in(batch), largest, rows.shape[1]),
        )

    def _charge(self, estimate: ClassEstimate | None, largest: float, cut_dim: int) -> LeakCharge:
        """Charge the gap against the noise on it.

        A class that has never been seen leaves the gap unknown, and the charge infinite.
        """
        if largest == 0:
            return LeakCharge(0.0)
        if estimate is None:
            return LeakCharge(math.inf)
        deviation = self._noise_ratio * largest / math.sqrt(cut_dim)
        return LeakCharge(sum_kl_along_gap(deviation, deviation, estimate.gap_length))


def isotropic_noise(rows: Tensor, noise_norm: float, noise: NoiseSource) -> Tensor:
    """Draw noise of the rows' shape whose expected squared norm per row is ``noise_norm``^2."""
    deviation = noise_norm / rows.shape[1] ** 0.5
    return noise.standard_normal(tuple(rows.shape), rows).mul_(deviation)


def noise_alone(
    rows: Tensor, gradients: Tensor, largest: float, noise: NoiseSource
) -> tuple[DefendedGradient, DefenseReport]:
    """Answer by noise of the batch's largest norm without any signal, which tells nothing.

    Args:
        rows: raw gradients, (batch, cut_dim).
        gradients: the same in the shape of the answer.
        largest: their largest norm.
        noise: the only source of randomness.
    """
    report = DefenseReport(
        noise_power=largest * largest,
        sum_kl_after=0.0,
        leak_auc_bound=0.5,
        charge=LeakCharge(0.0),
    )
    return release(isotropic_noise(rows, largest, noise), gradients), report
