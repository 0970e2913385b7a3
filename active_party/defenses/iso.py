"""Isotropic noise: every row gets N(0, (t/d) max|g|^2 I), whatever its label, with t = r^2."""

from torch import Tensor

from active_party.defenses.noise import NoiseSource
from active_party.defenses.report import DefendedGradient, DefenseReport, Stateless, release
from active_party.defenses.rows import as_positive, as_rows, row_norms


class Isotropic(Stateless):
    """Adds the same amount of Gaussian noise to every example.

    Args:
        noise_ratio: root-mean-square noise norm r in units of the batch's largest gradient norm.
        noise: the only source of randomness.
    """

    def __init__(self, noise_ratio: float, noise: NoiseSource) -> None:
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
        """Add noise. The labels' values are checked and not used."""
        rows = as_rows(gradients)
        as_positive(labels, rows)
        noise_norm = self._noise_ratio * float(row_norms(rows).max())
        defended = isotropic_noise(rows, noise_norm, self._noise).add_(rows)
        return release(defended, gradients), DefenseReport(noise_power=noise_norm * noise_norm)


def isotropic_noise(rows: Tensor, noise_norm: float, noise: NoiseSource) -> Tensor:
    """Draw noise of the rows' shape whose expected squared norm per row is ``noise_norm``^2."""
    deviation = noise_norm / rows.shape[1] ** 0.5
    return noise.standard_normal(tuple(rows.shape), rows).mul_(deviation)
