"""Noise of equal size in all directions, added to a signal or sent in its place."""

from torch import Tensor

from splitveil.active_party.defenses.interface import Defended, DefenseReport, LeakCharge, release
from splitveil.active_party.defenses.noise import NoiseSource


def isotropic_noise(rows: Tensor, noise_norm: float, noise: NoiseSource) -> Tensor:
    """Draw noise of the rows' shape whose expected squared norm per row is ``noise_norm``^2."""
    deviation = noise_norm / rows.shape[1] ** 0.5
    return noise.standard_normal(tuple(rows.shape), rows).mul_(deviation)


def noise_alone(rows: Tensor, gradients: Tensor, largest: float, noise: NoiseSource) -> Defended:
    """Answer with noise of the batch's largest norm without any signal, which reveals nothing.

    Args:
        rows: raw gradients, (batch, cut_dim).
        gradients: the same gradients in the shape of the answer.
        largest: their largest norm.
        noise: the only source of randomness.
    """
    report = DefenseReport(
        noise_power=largest * largest,
        sum_kl_after=0.0,
        leak_auc_bound=0.5,
        charge=LeakCharge(0.0),
    )
    return Defended(release(isotropic_noise(rows, largest, noise), gradients), report)
