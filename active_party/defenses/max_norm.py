"""Noise along each gradient that brings it, on average, to the largest norm of its batch.

Row g becomes g (1 + s n) with n ~ N(0, 1) and s^2 = |g_max|^2/|g|^2 - 1, one scalar per row, so
that E|row|^2 = |g_max|^2 for every row (Li et al., ICLR 2022, section 4.1). g_max is the largest
row, not the batch: noise up to the norm of the whole batch, spread over all directions, leaves a
smaller row more of it, and the norm leaks with its sign turned.
"""

import torch
from torch import Tensor

from active_party.defenses.noise import NoiseSource
from active_party.defenses.report import DefendedGradient, DefenseReport, Stateless, release
from active_party.defenses.rows import as_positive, as_rows, row_norms


class MaxNorm(Stateless):
    """Aligns every row to the batch's largest norm.

    A row without a direction of its own (zero, or too small to be divided by) gets a random one,
    and the largest norm itself.
    """

    def __init__(self, noise: NoiseSource) -> None:
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
        norms = row_norms(rows)
        bare = (norms < torch.finfo(rows.dtype).tiny).nonzero().squeeze(1)
        largest = norms.max()
        unit = torch.where(largest > 0, largest, 1.0)
        shares = norms / unit
        powers = torch.where(largest > 0, (1 - shares) * (1 + shares), 0.0)
        scalars = self._noise.standard_normal((rows.shape[0], 1), rows)
        scalars *= (powers.sqrt() * unit)[:, None].to(rows.dtype)
        scaled = rows / norms[:, None].to(rows.dtype)
        if len(bare):
            random = self._noise.standard_normal((len(bare), rows.shape[1]), rows)
            scaled[bare] = random.div_(torch.linalg.vector_norm(random, dim=1, keepdim=True))
            scalars[bare] = largest.to(rows.dtype)
        power = float(powers.mean() * unit * unit)
        return release(scaled.mul_(scalars).add_(rows), gradients), DefenseReport(power)
